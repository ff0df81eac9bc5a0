// Package paint colours texts for a terminal. Everywhere else texts stay as they are.
package paint

import (
	"io"
	"os"

	"golang.org/x/term"
)

// terminal is a writer that shows colours.
type terminal struct{ io.Writer }

// Out returns the writer for the file's texts. It shows colours if the file is a terminal, unless
// the user set NO_COLOR (https://no-color.org).
func Out(f *os.File) io.Writer {
	if os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" || !term.IsTerminal(int(f.Fd())) {
		return f
	}
	return terminal{f}
}

// Bad returns the text in red, if the writer shows colours.
func Bad(w io.Writer, text string) string { return in(w, "31", text) }

// Careful returns the text in yellow, if the writer shows colours.
func Careful(w io.Writer, text string) string { return in(w, "33", text) }

// Good returns the text in green, if the writer shows colours.
func Good(w io.Writer, text string) string { return in(w, "32", text) }

// Strong returns the text in bold, if the writer shows colours.
func Strong(w io.Writer, text string) string { return in(w, "1", text) }

func in(w io.Writer, code, text string) string {
	if _, colours := w.(terminal); !colours || text == "" {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

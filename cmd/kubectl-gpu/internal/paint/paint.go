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

// Bad, Careful, Good and Strong return the text as the writer shows it.
func Bad(w io.Writer, text string) string     { return in(w, "31", text) }
func Careful(w io.Writer, text string) string { return in(w, "33", text) }
func Good(w io.Writer, text string) string    { return in(w, "32", text) }
func Strong(w io.Writer, text string) string  { return in(w, "1", text) }

func in(w io.Writer, code, text string) string {
	if _, colours := w.(terminal); !colours || text == "" {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

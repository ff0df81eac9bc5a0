// Gotest runs `go test` and lists the skipped and the failed tests with their messages at the end.
// Without -v, `go test` shows a skipped test like one that passed, and logs of a cluster can bury
// why a test failed. The arguments and the exit code are those of `go test`.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
)

func main() {
	code, err := run(os.Args[1:], os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "gotest:", err)
		os.Exit(1)
	}
	os.Exit(code)
}

func run(args []string, out io.Writer) (code int, err error) {
	test := exec.Command("go", append([]string{"test", "-json"}, args...)...)
	test.Stderr = os.Stderr
	events, err := test.StdoutPipe()
	if err != nil {
		return 0, err
	}
	if err := test.Start(); err != nil {
		return 0, err
	}
	r := newReport(out, slices.Contains(args, "-v"))
	readErr := r.read(events)
	ended := test.Wait()
	var failed *exec.ExitError
	if ended != nil && !errors.As(ended, &failed) {
		return 0, ended
	}
	return test.ProcessState.ExitCode(), errors.Join(readErr, r.end())
}

// event is a line of `go test -json`. See `go doc test2json`.
type event struct{ Action, Package, Test, Output string }

type name struct{ pkg, test string }

// report prints the output of `go test`, without -v only that of failed tests and of packages. It
// keeps the names of failed and of skipped tests and their reasons for the end.
type report struct {
	out     io.Writer
	verbose bool
	said    map[name][]string // output of tests that have not ended
	failed  []string
	skipped []string
}

func newReport(out io.Writer, verbose bool) *report {
	return &report{out: out, verbose: verbose, said: map[name][]string{}}
}

func (r *report) read(events io.Reader) error {
	lines := bufio.NewReader(events)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			if err := r.add(line); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the tests' output: %w", err)
		}
	}
}

func (r *report) add(line []byte) error {
	var e event
	if err := json.Unmarshal(line, &e); err != nil {
		_, err := r.out.Write(line) // Print what is not an event.
		return err
	}
	test := name{e.Package, e.Test}
	switch e.Action {
	case "output":
		if e.Test != "" {
			r.said[test] = append(r.said[test], e.Output)
		}
		if r.verbose || e.Test == "" && e.Output != "PASS\n" {
			return r.print(e.Output)
		}
	case "build-output":
		return r.print(e.Output)
	case "skip":
		if e.Test != "" {
			r.skipped = append(r.skipped, fmt.Sprintf("%s %s: %s", e.Package, e.Test, reason(r.said[test])))
		}
		delete(r.said, test)
	case "fail":
		said := r.said[test]
		delete(r.said, test)
		if messages := messages(said); len(messages) > 0 {
			r.failed = append(r.failed, fmt.Sprintf("%s %s:\n    %s", e.Package, e.Test, strings.Join(messages, "\n    ")))
		}
		if !r.verbose {
			return r.print(strings.Join(said, ""))
		}
	case "pass":
		delete(r.said, test)
	}
	return nil
}

// end prints the output of tests that have no result because their process died, and then the lists
// of skipped and of failed tests. The failures come last, because CI shows the end of its output.
func (r *report) end() error {
	var b strings.Builder
	if !r.verbose {
		for _, said := range r.said {
			b.WriteString(strings.Join(said, ""))
		}
	}
	if len(r.skipped) > 0 {
		fmt.Fprintf(&b, "\nSKIPPED, so NOT tested, because:\n  %s\n", strings.Join(r.skipped, "\n  "))
	}
	if len(r.failed) > 0 {
		fmt.Fprintf(&b, "\nFAILED, with these messages:\n  %s\n", strings.Join(r.failed, "\n  "))
	}
	return r.print(b.String())
}

func (r *report) print(text string) error {
	_, err := io.WriteString(r.out, text)
	return err
}

// messageLine is the first line of what a test logs or reports.
var messageLine = regexp.MustCompile(`^\s+\w+\.go:\d+: `)

const (
	maxMessages      = 8 // at the beginning, and again at the end
	maxMessageLength = 600
)

// messages returns the first line of each message of a failed test, of the first and last messages.
func messages(said []string) []string {
	var lines []string
	for _, line := range said {
		if messageLine.MatchString(line) {
			line = strings.TrimSpace(line)
			lines = append(lines, line[:min(len(line), maxMessageLength)])
		}
	}
	if more := len(lines) - 2*maxMessages; more > 0 {
		lines = slices.Replace(lines, maxMessages, maxMessages+more, fmt.Sprintf("(%d more)", more))
	}
	return lines
}

// reason returns the output of a skipped test (said, in lines) as one line.
func reason(said []string) string {
	var words []string
	for _, line := range said {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "=== ") && !strings.HasPrefix(line, "--- ") {
			words = append(words, line)
		}
	}
	return strings.Join(words, " ")
}

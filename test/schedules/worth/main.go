// Worth says what the schedules of faults are worth: it puts one mistake after the other into the code, runs the schedules over it, and lists which of the
// mistakes they have not found. The code itself is not touched: the compiler is given another file in the place of one.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

func main() {
	schedules := flag.Int("schedules", 1000, "how many schedules have to find a mistake")
	only := flag.String("only", "", "a part of the names of the mistakes that are tried")
	flag.Parse()
	if err := run(context.Background(), os.Stdout, *schedules, *only); err != nil {
		fmt.Fprintln(os.Stderr, "worth:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, schedules int, only string) error {
	dir, err := os.MkdirTemp("", "worth-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	fmt.Fprintln(out, "| mistake | found by | what did not hold |\n|---|---|---|")
	tried, found := 0, 0
	for _, m := range mistakes {
		if !strings.Contains(m.name, only) {
			continue
		}
		tried++
		by, what, err := m.try(ctx, dir, schedules)
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		if by != "" {
			found++
		} else {
			by = "**nothing**"
		}
		fmt.Fprintf(out, "| %s | %s | %s |\n", m.name, by, what)
	}
	fmt.Fprintf(out, "\n%d of %d mistakes were found.\n", found, tried)
	if found < tried {
		return fmt.Errorf("%d mistakes were not found", tried-found)
	}
	return nil
}

// mistake is a change of the code that breaks it.
type mistake struct {
	name, file string
	// was is text of the file, which is there once, and is what stands there instead.
	was, is string
}

// apply is the file with the mistake in it.
func (m mistake) apply(root string) ([]byte, error) {
	text, err := os.ReadFile(filepath.Join(root, m.file))
	if err != nil {
		return nil, err
	}
	if n := strings.Count(string(text), m.was); n != 1 {
		return nil, fmt.Errorf("%s has this text %d times, and not once: %q", m.file, n, m.was)
	}
	return []byte(strings.Replace(string(text), m.was, m.is, 1)), nil
}

var (
	seed  = regexp.MustCompile(`((?:schedule|sequence) \d+): run it again`)
	first = regexp.MustCompile(`run it again with .*\n\s+(.*)\n`)
)

// bound is for how long one mistake is looked for. Where it is over, nothing was found.
const bound = 20 * time.Minute

// try runs the schedules over the mistake. by is what has found it, empty if nothing has.
func (m mistake) try(ctx context.Context, dir string, schedules int) (by, what string, err error) {
	root, err := filepath.Abs(".")
	if err != nil {
		return "", "", err
	}
	text, err := m.apply(root)
	if err != nil {
		return "", "", err
	}
	changed, overlay := filepath.Join(dir, filepath.Base(m.file)), filepath.Join(dir, "overlay.json")
	replaced, err := json.Marshal(map[string]map[string]string{"Replace": {filepath.Join(root, m.file): changed}})
	binary := filepath.Join(dir, "schedules.test")
	if err = errors.Join(err, os.WriteFile(changed, text, 0o600), os.WriteFile(overlay, replaced, 0o600)); err != nil {
		return "", "", err
	}
	build := exec.CommandContext(ctx, "go", "test", "-c", "-overlay", overlay, "-o", binary, "./test/schedules")
	if said, err := build.CombinedOutput(); err != nil {
		return "", "", fmt.Errorf("%w: %s", err, said)
	}
	test := func(args ...string) (string, bool) {
		ctx, cancel := context.WithTimeout(ctx, bound)
		defer cancel()
		c := exec.CommandContext(ctx, binary, args...)
		c.Dir = filepath.Join(root, "test", "schedules")
		said, err := c.CombinedOutput()
		return string(said), err != nil && ctx.Err() == nil
	}
	for _, of := range []string{"^TestPolicies", "^TestWhateverGoesWrong"} { // the quick ones first
		said, failed := test("-test.run", of, "-seed", "1", "-policies", strconv.Itoa(schedules), "-schedules", strconv.Itoa(schedules))
		if s := seed.FindStringSubmatch(said); s != nil {
			return s[1], cell(first.FindStringSubmatch(said)), nil
		}
		if failed {
			return "the schedules, by an end", cell([]string{"", said[:min(len(said), 200)]}), nil
		}
	}
	return "", "", nil
}

// cell is what an expression has found, as a cell of a table.
func cell(found []string) string {
	if len(found) < 2 {
		return ""
	}
	text := strings.ReplaceAll(strings.ReplaceAll(found[1], "|", "/"), "\n", " ")
	if len(text) > 160 {
		text = strings.ToValidUTF8(text[:160], "") + "…"
	}
	return text
}

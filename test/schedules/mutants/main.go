// Mutants tests whether package schedules finds defects. It puts one defect at a time into the
// plugin's code, runs the schedules, and lists the defects that they do not find. The source files
// do not change: the compiler reads the mutated file from an overlay.
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
	"slices"
	"strconv"
	"strings"
	"time"
)

func main() {
	schedules := flag.Int("schedules", 1000, "number of schedules that have to find a mutant")
	only := flag.String("only", "", "comma-separated parts of mutants' names: run these mutants only")
	flag.Parse()
	if err := run(context.Background(), os.Stdout, *schedules, strings.Split(*only, ",")); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, schedules int, only []string) error {
	root, err := filepath.Abs(".")
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "mutants-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	fmt.Fprintln(out, "| mutant | found by | what did not hold |\n|---|---|---|")
	tried, found := 0, 0
	for _, m := range mutants {
		if !slices.ContainsFunc(only, func(part string) bool { return strings.Contains(m.name, part) }) {
			continue
		}
		tried++
		by, what, err := m.try(ctx, root, dir, schedules)
		if err != nil {
			return err
		}
		if by != "" {
			found++
		} else {
			by = "**nothing**"
		}
		fmt.Fprintf(out, "| %s | %s | %s |\n", m.name, by, what)
	}
	fmt.Fprintf(out, "\n%d of %d mutants were found.\n", found, tried)
	if found < tried || tried == 0 {
		return fmt.Errorf("%d mutants were tried and %d were not found", tried, tried-found)
	}
	return nil
}

// searches returns the tests that search for a mutant, the fastest first. Few sequences of policies
// are enough: they meet what they can find early.
func searches(schedules int) []search {
	return []search{
		{
			args:  []string{"-test.run", "^TestPolicyChanges", "-policies", strconv.Itoa(max(1, schedules/10))},
			found: regexp.MustCompile(`(sequence \d+): run it again with .*\n\s+(.*)\n`),
		},
		{
			args:  []string{"-test.run", "^TestInvariantsHoldUnderFaults", "-schedules", strconv.Itoa(schedules)},
			found: regexp.MustCompile(`(schedule \d+): run it again with .*\n\s+(.*)\n`),
		},
		{
			args:  []string{"-test.run", "^TestExploreSmallWorlds"},
			found: regexp.MustCompile(`(the explorer) found: (.*)\n`),
		},
	}
}

// search is one test of package schedules.
type search struct {
	args []string
	// found matches the report of a broken invariant. Its groups are who found it, and the invariant.
	found *regexp.Regexp
}

// searchTime limits the search for one mutant. A mutant that takes longer counts as not found.
const searchTime = 20 * time.Minute

// try runs the searches on the plugin with the mutant's defect, until one finds it. The result by
// names who did, such as a schedule, and the result what is the broken invariant. If none finds the
// defect, both are empty.
func (m mutant) try(ctx context.Context, root, dir string, schedules int) (by, what string, err error) {
	path, text, err := m.apply(root)
	if err != nil {
		return "", "", err
	}
	changed, overlay := filepath.Join(dir, filepath.Base(path)), filepath.Join(dir, "overlay.json")
	replaced, err := json.Marshal(map[string]map[string]string{"Replace": {path: changed}})
	binary := filepath.Join(dir, "schedules.test")
	if err = errors.Join(err, os.WriteFile(changed, text, 0o600), os.WriteFile(overlay, replaced, 0o600)); err != nil {
		return "", "", err
	}
	build := exec.CommandContext(ctx, "go", "test", "-c", "-ldflags=-s -w", "-overlay", overlay, "-o", binary, "./test/schedules")
	if output, err := build.CombinedOutput(); err != nil {
		return "", "", fmt.Errorf("mutant %q: %w: %s", m.name, err, output)
	}
	test := func(args ...string) (string, bool) {
		ctx, cancel := context.WithTimeout(ctx, searchTime)
		defer cancel()
		c := exec.CommandContext(ctx, binary, args...)
		c.Dir = filepath.Join(root, "test", "schedules")
		output, err := c.CombinedOutput()
		return string(output), err != nil && ctx.Err() == nil
	}
	for _, search := range searches(schedules) {
		output, failed := test(append(search.args, "-seed", "1")...)
		if found := search.found.FindStringSubmatch(output); found != nil {
			return found[1], cell(found[2]), nil
		}
		if failed {
			return "the schedules, by a crash", cell(output[:min(len(output), 200)]), nil
		}
	}
	return "", "", nil
}

// cell formats text for a cell of a Markdown table.
func cell(text string) string {
	text = strings.ReplaceAll(strings.ReplaceAll(text, "|", "/"), "\n", " ")
	if len(text) > 160 {
		text = strings.ToValidUTF8(text[:160], "") + "…"
	}
	return text
}

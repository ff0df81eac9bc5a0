package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const tests = `package sample

import "testing"

func TestPasses(t *testing.T) { t.Log("of no interest") }
func TestSkips(t *testing.T)  { t.Run("inside", func(t *testing.T) { t.Skip("the program cannot be had") }) }
`

func runIn(t *testing.T, source string, args ...string) (output string, code int) {
	t.Helper()
	dir := t.TempDir()
	for file, content := range map[string]string{"go.mod": "module sample\n", "sample_test.go": source} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	var out strings.Builder
	code, err := run(append(args, "./..."), &out)
	if err != nil {
		t.Fatal(err)
	}
	return out.String(), code
}

func TestReportListsSkipsWithReasons(t *testing.T) {
	const skip = "sample TestSkips/inside: sample_test.go:6: the program cannot be had"
	out, code := runIn(t, tests)
	if code != 0 || !strings.Contains(out, "ok  \tsample") || strings.Contains(out, "of no interest") {
		t.Errorf("exit code %d: %s", code, out)
	}
	if _, summary, _ := strings.Cut(out, "SKIPPED, so NOT tested"); !strings.Contains(summary, skip) {
		t.Errorf("the end does not list the skipped test: %s", out)
	}
	out, code = runIn(t, tests, "-v")
	if _, summary, _ := strings.Cut(out, "SKIPPED, so NOT tested"); code != 0 || !strings.Contains(out, "of no interest") ||
		!strings.Contains(summary, skip) {
		t.Errorf("with -v: exit code %d: %s", code, out)
	}
}

func TestReportKeepsOutputOfFailures(t *testing.T) {
	for name, c := range map[string]struct{ source, says string }{
		"a test":          {tests + `func TestFails(t *testing.T) { t.Error("it is broken") }`, "sample_test.go:7: it is broken"},
		"a panic":         {tests + `func TestFails(t *testing.T) { panic("at the disco") }`, "at the disco"},
		"the compilation": {tests + `func TestFails(t *testing.T) { undefined() }`, "undefined: undefined"},
	} {
		t.Run(name, func(t *testing.T) {
			if out, code := runIn(t, c.source); code == 0 || !strings.Contains(out, c.says) || !strings.Contains(out, "FAIL") {
				t.Errorf("exit code %d: %s", code, out)
			}
		})
	}
}

func TestReportHasNoSummaryWithoutSkips(t *testing.T) {
	if out, code := runIn(t, "package sample\n\nimport \"testing\"\n\nfunc TestPasses(t *testing.T) {}\n"); code != 0 ||
		strings.Contains(out, "SKIPPED") {
		t.Errorf("exit code %d: %s", code, out)
	}
}

func TestReportEndsWithTheMessagesOfFailures(t *testing.T) {
	const source = tests + `func TestFails(t *testing.T) {
	t.Error("it is broken")
	for i := 0; i < 100; i++ {
		t.Log("progress")
	}
	t.Error("it stays broken")
	t.Cleanup(func() { t.Log("logs:\n" + "a line\n") })
}`
	out, code := runIn(t, source, "-v")
	_, summary, _ := strings.Cut(out, "FAILED, with these messages:")
	if code == 0 || !strings.Contains(summary, "sample TestFails:\n    sample_test.go:8: it is broken") ||
		!strings.Contains(summary, "it stays broken") || strings.Contains(summary, "a line") || strings.Contains(summary, "SKIPPED") ||
		strings.Count(summary, "\n") > 25 {
		t.Errorf("exit code %d: %s", code, out)
	}
}

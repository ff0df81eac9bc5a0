package schedules

import (
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"

	"k8s.io/klog/v2"
)

var (
	firstSeed = flag.Uint64("seed", 1, "seed of the first schedule")
	schedules = flag.Int("schedules", 500, "number of schedules, with consecutive seeds")
	table     = flag.String("table", "", "file for the coverage table, fault point by fault")
	least     = flag.Int("least", 0, "how often each fault point must meet each possible fault")
)

// TestMain allows one processor only. Then goroutine numbers follow the order in which goroutines
// start, and a seed always gives the same run.
func TestMain(m *testing.M) {
	runtime.GOMAXPROCS(1)
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	os.Exit(m.Run())
}

// base returns an empty directory for a simulated node, in memory if possible.
func base(t *testing.T) string {
	t.Helper()
	if _, err := os.Stat("/dev/shm"); err != nil {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp("/dev/shm", "schedules-") //nolint:usetesting // in memory it is much faster
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// runSeed runs one schedule. A violation ends the test, because [synctest.Test] does.
func runSeed(t *testing.T, seed uint64, coverage *Coverage) {
	t.Helper()
	dir := base(t)
	defer func() { _ = os.RemoveAll(dir) }()
	synctest.Test(t, func(t *testing.T) {
		violations, trace, err := run(dir, seed, coverage)
		if err != nil {
			t.Fatal(err)
		}
		if len(violations) > 0 {
			t.Errorf("schedule %d: run it again with -seed %d -schedules 1\n%s\nthe end of the trace:\n%s",
				seed, seed, indentLines(violations), trace)
		}
	})
}

func indentLines(lines []string) (text string) {
	for _, l := range lines {
		text += "  " + l + "\n"
	}
	return text
}

func TestInvariantsHoldUnderFaults(t *testing.T) {
	coverage := NewCoverage()
	for i := range *schedules {
		runSeed(t, *firstSeed+uint64(i), coverage) //nolint:gosec // not negative
		if done := i + 1; *table != "" && (done%100 == 0 || done == *schedules) {
			if err := os.WriteFile(*table, fmt.Appendf(nil, "%d schedules\n\n%s", done, coverage.Table()), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, cell := range coverage.Missing(*least) {
		t.Errorf("met fewer than %d times: %s", *least, cell)
	}
}

func TestSeedIsReproducible(t *testing.T) {
	for seed := range uint64(30) {
		var traces []string
		for range 2 {
			dir := base(t)
			synctest.Test(t, func(t *testing.T) {
				_, trace, err := run(dir, seed, NewCoverage())
				if err != nil {
					t.Fatal(err)
				}
				traces = append(traces, strings.ReplaceAll(trace, dir, ""))
			})
			_ = os.RemoveAll(dir)
		}
		if traces[0] != traces[1] {
			t.Errorf("two traces of seed %d:\n%s\nand\n%s", seed, traces[0], traces[1])
		}
	}
}

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
	firstSeed = flag.Uint64("seed", 1, "the seed of the first schedule")
	schedules = flag.Int("schedules", 500, "how many schedules are run, of one seed after the other")
	table     = flag.String("table", "", "where the table of what was met is written to, step by fault")
	least     = flag.Int("least", 0, "how often each step must have met each fault that can happen there")
)

// A goroutine's number says when it was made, on one processor.
func TestMain(m *testing.M) {
	runtime.GOMAXPROCS(1)
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	os.Exit(m.Run())
}

// base is where nodes lie: in memory, where there is such a place.
func base(t *testing.T) string {
	t.Helper()
	if _, err := os.Stat("/dev/shm"); err != nil {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp("/dev/shm", "schedules-") //nolint:usetesting // in memory, and so much quicker
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func tell(t *testing.T, seed uint64, coverage *Coverage) bool {
	t.Helper()
	dir := base(t)
	defer func() { _ = os.RemoveAll(dir) }()
	held := true
	synctest.Test(t, func(t *testing.T) {
		broken, story, err := run(dir, seed, coverage)
		if err != nil {
			t.Fatal(err)
		}
		if len(broken) > 0 {
			held = false
			t.Errorf("schedule %d: run it again with -seed %d -schedules 1\n%s\nwhat happened at the end:\n%s", seed, seed, join(broken), story)
		}
	})
	return held
}

func join(lines []string) (text string) {
	for _, l := range lines {
		text += "  " + l + "\n"
	}
	return text
}

func TestWhateverGoesWrongNothingIsLostOrLeftOrHeldTwice(t *testing.T) {
	coverage := NewCoverage()
	failed := 0
	for i := range *schedules {
		if !tell(t, *firstSeed+uint64(i), coverage) { //nolint:gosec // counted from 0
			if failed++; failed == 3 {
				t.Fatal("and so on")
			}
		}
		if told := i + 1; *table != "" && (told%100 == 0 || told == *schedules) {
			if err := os.WriteFile(*table, fmt.Appendf(nil, "%d schedules\n\n%s", told, coverage.Table()), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, cell := range coverage.Missing(*least) {
		t.Errorf("met less than %d times: %s", *least, cell)
	}
}

func TestASeedTellsTheSameStoryEachTime(t *testing.T) {
	for seed := range uint64(30) {
		var stories []string
		for range 2 {
			dir := base(t)
			synctest.Test(t, func(t *testing.T) {
				_, story, err := run(dir, seed, NewCoverage())
				if err != nil {
					t.Fatal(err)
				}
				stories = append(stories, strings.ReplaceAll(story, dir, ""))
			})
			_ = os.RemoveAll(dir)
		}
		if stories[0] != stories[1] {
			t.Errorf("seed %d told\n%s\nand\n%s", seed, stories[0], stories[1])
		}
	}
}

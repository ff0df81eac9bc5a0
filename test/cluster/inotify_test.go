package cluster

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// host is a fake host: its inotify limit is a file in a temporary folder, and the field taken is
// the number of instances that others use.
type host struct {
	*inotifyLimit
	taken int
	said  []string
}

func newHost(t *testing.T, limit, taken int) *host {
	t.Helper()
	dir := t.TempDir()
	h := &host{taken: taken}
	h.inotifyLimit = &inotifyLimit{
		setting: filepath.Join(dir, "max_user_instances"), record: filepath.Join(dir, "inotify.json"), bootID: "first", write: writeSetting,
		free: func(atMost int) int { return max(0, min(atMost, h.limit(t)-h.taken)) },
	}
	h.set(t, limit)
	return h
}

func (h *host) set(t *testing.T, limit int) {
	t.Helper()
	if err := os.WriteFile(h.setting, []byte(strconv.Itoa(limit)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (h *host) limit(t *testing.T) int {
	t.Helper()
	limit, err := h.read()
	if err != nil {
		t.Fatal(err)
	}
	return limit
}

func (h *host) provide(nodes int, others ...int) error {
	return h.inotifyLimit.provide(nodes, others, func(format string, args ...any) { h.said = append(h.said, fmt.Sprintf(format, args...)) })
}

func (h *host) must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestSufficientInotifyLimitIsUnchanged(t *testing.T) {
	h := newHost(t, 128, 0)
	h.must(t, h.provide(1))
	if h.limit(t) != 128 || len(h.said) > 0 {
		t.Errorf("limit %d, said %q", h.limit(t), h.said)
	}
	h.must(t, h.restore())
	if h.limit(t) != 128 {
		t.Errorf("limit %d", h.limit(t))
	}
}

func TestInotifyLimitIsRaisedAndRestored(t *testing.T) {
	h := newHost(t, 128, 0)
	h.must(t, h.provide(4))
	first := h.limit(t)
	if first < enoughInstances(4, false) || first == 128 || len(h.said) != 1 ||
		!strings.Contains(h.said[0], "from 128 to "+strconv.Itoa(first)) {
		t.Errorf("limit %d, said %q", first, h.said)
	}
	h.must(t, h.provide(9, 4))
	if second := h.limit(t); second < enoughInstances(4, false)+enoughInstances(9, false) {
		t.Errorf("with a second cluster the limit is %d, which is too low for both", second)
	}
	h.must(t, h.restore())
	if h.limit(t) != 128 {
		t.Errorf("the limit is %d after restore, want the initial 128", h.limit(t))
	}
	h.must(t, h.restore())
}

func TestInotifyLimitCountsOtherUsers(t *testing.T) {
	h := newHost(t, 128, 120)
	h.must(t, h.provide(1))
	if got := h.free(1000); got < enoughInstances(1, false) {
		t.Errorf("%d inotify instances are free, which is too few for the cluster", got)
	}
}

func TestForeignInotifyLimitIsNotRestored(t *testing.T) {
	h := newHost(t, 128, 0)
	h.must(t, h.provide(4))
	h.set(t, 8192)
	h.must(t, h.restore())
	if h.limit(t) != 8192 {
		t.Errorf("limit %d", h.limit(t))
	}
	h.set(t, 128)
	h.must(t, h.restore())
	if h.limit(t) != 128 {
		t.Error("restore set a limit although an earlier restore had ended the raise")
	}
}

func TestRecordedInotifyLimitEndsWithHostBoot(t *testing.T) {
	h := newHost(t, 128, 0)
	h.must(t, h.provide(4))
	raised := h.limit(t)
	h.bootID = "second" // the host has booted, with the raised limit as its default
	h.must(t, h.restore())
	if h.limit(t) != raised {
		t.Errorf("restore changed the limit to %d, although the host has booted since; want %d", h.limit(t), raised)
	}
}

func TestInotifyLimitCannotBeRaised(t *testing.T) {
	for name, c := range map[string]struct {
		taken, nodes int
		others       []int
		waits, fails bool
	}{
		"one cluster goes on with what there is":           {nodes: 4},
		"a second one waits for the first":                 {nodes: 4, others: []int{4}, taken: 50, waits: true},
		"two that fit run together":                        {nodes: 1, others: []int{1}, taken: 30},
		"one cluster that cannot start gets an error":      {nodes: 4, taken: 100, fails: true},
		"a second one waits, even if the first is idle":    {nodes: 4, others: []int{4}, waits: true},
		"one that is too large for the host gets an error": {nodes: 20, fails: true},
		"a small one takes what other users leave":         {nodes: 1, taken: 105},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, 128, c.taken)
			h.write = func(string, int) error { return unix.EROFS }
			err := h.provide(c.nodes, c.others...)
			if waits := errors.Is(err, errInstancesTaken); waits != c.waits || (err != nil && !waits) != c.fails {
				t.Fatalf("%v", err)
			}
			if c.fails && !strings.Contains(err.Error(), "sysctl fs.inotify.max_user_instances=") {
				t.Errorf("the error names no remedy: %v", err)
			}
			if _, err := os.Stat(h.record); err == nil {
				t.Error("a raised limit is recorded although the limit could not be raised")
			}
			h.must(t, h.restore())
		})
	}
}

func TestFreeInstancesAreCountedAndClosed(t *testing.T) {
	if first, second := freeInstances(3), freeInstances(3); first != 3 || second != 3 {
		t.Skipf("SKIPPED: this machine has %d, then %d inotify instances left", first, second)
	}
}

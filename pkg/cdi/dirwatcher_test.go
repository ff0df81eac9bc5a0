package cdi

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

// limited is the environment variable that tells the test that it already runs in its own user
// namespace.
const limited = "CDI_TEST_OWN_INOTIFY_LIMIT"

// inOwnUserNamespace runs the test again in a child process, as root of a new user namespace. A
// lower limit of inotify instances there affects no other program. inside is true in the child.
func inOwnUserNamespace(t *testing.T) (inside bool) {
	t.Helper()
	if os.Getenv(limited) != "" {
		return true
	}
	self, err := os.Executable()
	must(t, err)
	again := exec.CommandContext(t.Context(), self, "-test.v", "-test.count=1", "-test.run=^"+t.Name()+"$")
	again.Env = append(os.Environ(), limited+"=1")
	again.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	out, err := again.CombinedOutput()
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSPC) {
		t.Skipf("SKIPPED: needs a user namespace of its own: %v", err)
	}
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("%v\n%s", err, out)
	}
	return false
}

func allowInstances(t *testing.T, n int) {
	t.Helper()
	must(t, os.WriteFile("/proc/sys/user/max_inotify_instances", []byte(strconv.Itoa(n)), 0))
}

// holdsInotify returns true if this process has an inotify instance open.
func holdsInotify(t *testing.T) bool {
	t.Helper()
	open, err := filepath.Glob("/proc/self/fd/*")
	must(t, err)
	for _, fd := range open {
		if what, err := os.Readlink(fd); err == nil && strings.Contains(what, "inotify") {
			return true
		}
	}
	return false
}

func TestWatchReadsFilesWhenInotifyIsExhausted(t *testing.T) {
	if !inOwnUserNamespace(t) {
		return
	}
	allowInstances(t, 0)
	if _, err := fsnotify.NewWatcher(); !errors.Is(err, unix.EMFILE) {
		t.Fatalf("inotify is not exhausted here: %v", err)
	}
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	said := func(what string) int {
		return strings.Count(logger.GetSink().(ktesting.Underlier).GetBuffer().String(), what)
	}
	s, repaired := watched(klog.NewContext(t.Context(), logger), t)
	remove := func() { must(t, os.Remove(filepath.Join(s.root, baseFile))) }
	quickest := patience
	for range 3 {
		remove()
		quickest = min(quickest, expectRepair(t, s, repaired))
	}
	if quickest > repairLimit {
		t.Errorf("repaired in %s at best, want %s", quickest, repairLimit)
	}
	if n := said("fs.inotify.max_user_instances"); n != 1 {
		t.Errorf("the remedy was logged %d times", n)
	}
	if holdsInotify(t) {
		t.Error("opened an inotify instance beyond the limit")
	}

	allowInstances(t, 10)
	for deadline := time.Now().Add(patience); !holdsInotify(t) || said("with inotify again") == 0; {
		if time.Now().After(deadline) {
			t.Fatal("no inotify instance was opened after the limit was raised")
		}
		remove() // triggers a check
		expectRepair(t, s, repaired)
	}
	remove()
	expectRepair(t, s, repaired)
	if n := said("with inotify again"); n != 1 {
		t.Errorf("the recovery was logged %d times", n)
	}
}

func TestWatchReplacesEndedInotify(t *testing.T) {
	if w, err := fsnotify.NewWatcher(); err != nil {
		t.Skipf("SKIPPED: no inotify instance left on this machine: %v", err)
	} else {
		must(t, w.Close())
	}
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	seen := newDirWatcher(s.root)
	defer seen.close()
	log := ktesting.NewLogger(t, ktesting.NewConfig())
	if !seen.renew(log) {
		t.Error("the first check trusts an unwatched directory")
	}
	if seen.renew(log) {
		t.Error("the second check does not trust inotify")
	}
	must(t, seen.inotify.Close())
	<-seen.ended
	seen.close()
	if !seen.renew(log) {
		t.Error("changes without inotify were not detected")
	}
	must(t, s.RemoveClaim("x"))
	must(t, os.Remove(filepath.Join(s.root, baseFile)))
	<-seen.changed
}

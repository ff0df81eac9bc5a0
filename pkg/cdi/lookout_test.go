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

// limited says to a copy of this test that it runs in a user namespace of its own.
const limited = "CDI_TEST_OWN_INOTIFY_LIMIT"

// onANodeOfItsOwn runs the test a second time, as root of a new user namespace: inotify's limit there concerns nobody else on this machine.
func onANodeOfItsOwn(t *testing.T) (inside bool) {
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

// holdsInotify says whether this process has an inotify instance open.
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

func TestWhereInotifyIsExhaustedTheFilesAreRead(t *testing.T) {
	if !onANodeOfItsOwn(t) {
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
	s, mended := watched(klog.NewContext(t.Context(), logger), t)
	remove := func() { must(t, os.Remove(filepath.Join(s.root, baseFile))) }
	quickest := patience
	for range 3 {
		remove()
		quickest = min(quickest, expectMending(t, s, mended))
	}
	if quickest > within {
		t.Errorf("mended in %s at best, promised is %s", quickest, within)
	}
	if n := said("fs.inotify.max_user_instances"); n != 1 {
		t.Errorf("the way out was said %d times", n)
	}
	if holdsInotify(t) {
		t.Error("an inotify instance was got where there is none")
	}

	allowInstances(t, 10)
	for deadline := time.Now().Add(patience); !holdsInotify(t) || said("through inotify again") == 0; {
		if time.Now().After(deadline) {
			t.Fatal("no inotify instance is taken although there are some now")
		}
		remove() // a look is waited for
		expectMending(t, s, mended)
	}
	remove()
	expectMending(t, s, mended)
	if n := said("through inotify again"); n != 1 {
		t.Errorf("the end of it was said %d times", n)
	}
}

func TestAnInotifyThatEndedIsReplaced(t *testing.T) {
	if w, err := fsnotify.NewWatcher(); err != nil {
		t.Skipf("SKIPPED: this machine has no inotify instance left: %v", err)
	} else {
		must(t, w.Close())
	}
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	seen := newLookout(s.root)
	defer seen.close()
	log := ktesting.NewLogger(t, ktesting.NewConfig())
	if !seen.follow(log) {
		t.Error("the first look trusts a directory that nobody has watched")
	}
	if seen.follow(log) {
		t.Error("the second look does not trust inotify")
	}
	must(t, seen.watcher.Close())
	<-seen.ended
	seen.close()
	if !seen.follow(log) {
		t.Error("what happened while inotify was away is trusted")
	}
	must(t, s.RemoveClaim("x"))
	must(t, os.Remove(filepath.Join(s.root, baseFile)))
	<-seen.changed
}

package watch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

func TestDeadWatcherIsReplaced(t *testing.T) {
	s := nvidiatest.NewSite(t, "l40s-x2", layout.Container, "")
	w := watchSite(s, nil)
	first := w.awaitListening()
	w.killChild(s)
	if state := w.awaitState(func(s device.WatcherState) bool { return !s.Up }); !strings.Contains(state.Error, "has ended") ||
		state.Released {
		t.Errorf("%+v", state)
	}
	if again := w.awaitListening(); again.Driver != first.Driver {
		t.Errorf("the driver is %q, was %q", again.Driver, first.Driver)
	}
	s.Change(func(_ *layout.Config, f *state.File) error { return f.XID(1, 45) })
	w.awaitEvent(s.Card(1))
}

func TestWatchReleasesHardwareOnReturn(t *testing.T) {
	s := nvidiatest.NewSite(t, "l40s-x2", layout.Container, "")
	w := watchSite(s, nil)
	first := w.awaitListening()
	inUse := func() (used bool) {
		s.Change(func(_ *layout.Config, f *state.File) error {
			used = f.InUse()
			return nil
		})
		return used
	}
	if !inUse() {
		t.Error("the GPU is not in use")
	}
	if err := w.stop(); err != nil {
		t.Error(err)
	}
	if inUse() {
		t.Error("the GPU is still in use")
	}
	if s := w.awaitState(func(s device.WatcherState) bool { return s.Released }); s.Up || s.Events {
		t.Errorf("%+v", s)
	}
	s.Change(func(c *layout.Config, f *state.File) error { return c.DriverAway(f, false, false) })
	s.Change(func(c *layout.Config, f *state.File) error { return c.DriverBack(f, "", "") })
	if again := watchSite(s, nil).awaitListening(); again.Driver == first.Driver {
		t.Error("the driver reload was not detected")
	}
}

func TestWatchNeedsDriverToStartChild(t *testing.T) {
	s := nvidiatest.NewSite(t, "l40s-x2", layout.Container, "")
	paths := s.Paths()
	s.Change(func(c *layout.Config, f *state.File) error { return c.DriverAway(f, false, false) })
	w := watchSite(s, func(w *watcher) { w.options.Paths = paths })
	if state := w.awaitState(func(device.WatcherState) bool { return true }); state.Up ||
		!strings.Contains(state.Error, "not under the driver root") || state.Driver != "" {
		t.Errorf("%+v", state)
	}
	s.Change(func(c *layout.Config, f *state.File) error { return c.DriverBack(f, "", "") })
	w.awaitListening()
}

func TestGPUHungWithLockGetsOwnWatcher(t *testing.T) {
	h := nvidiatest.NewHost(t)
	s := nvidiatest.Site{T: t, Root: h.Root}
	w := watchSite(s, func(w *watcher) {
		w.wedged = nvidiatest.HangLimit
		w.options.Paths = h.Paths()
		w.options.Command = s.Role("locked")
	})
	cards := nvidiatest.TwoCards()
	w.await("the end of the common child", func(s device.Signal) bool {
		return s.Watcher != nil && strings.Contains(s.Watcher.Error, "a separate process")
	})
	w.awaitCondition(device.Card{PCIAddress: "0000:1b:00.0", UUID: cards[1].UUID}, answers)
	w.awaitCondition(device.Card{PCIAddress: "0000:c3:00.0"}, func(c device.Condition) bool { return c.Reach == device.ReachWedged })
	w.awaitCondition(device.Card{PCIAddress: "0000:1b:00.0", UUID: cards[1].UUID}, answers)
	if err := w.stop(); err != nil {
		t.Error(err)
	}
	w.awaitState(func(s device.WatcherState) bool { return s.Released })
}

func TestUnkillableWatcherIsReported(t *testing.T) {
	w := newWatcher(Options{}, func(device.Signal) {})
	gone := make(chan struct{})
	for range child.MaxStuck {
		w.children = append(w.children, &watchChild{Process: &child.Process[device.Signal]{Gone: gone}})
	}
	h := nvidiatest.NewHost(t)
	w.options.Paths = h.Paths()
	if err := w.watch(t.Context()); err == nil || !strings.Contains(err.Error(), "still hang in the NVIDIA driver") {
		t.Error(err)
	}
	if err := w.release(); err == nil || !strings.Contains(err.Error(), "cannot end the watcher") {
		t.Error(err)
	}
	close(gone)
	if err := w.release(); err != nil {
		t.Error(err)
	}
}

func TestServeWatchRejectsInvalidOrder(t *testing.T) {
	if err := Serve(t.Context(), strings.NewReader("no JSON"), os.Stderr); err == nil {
		t.Error("invalid JSON was accepted")
	}
}

type closedPipe struct{}

func (closedPipe) Write([]byte) (int, error) { return 0, errors.New("the pipe is closed") }

func TestClosedPipeEndsServe(t *testing.T) {
	order, err := json.Marshal(watchOrder{Interval: watchInterval})
	if err != nil {
		t.Fatal(err)
	}
	in, parent := io.Pipe() // the parent keeps it open
	defer func() { _ = parent.Close() }()
	library := nvidiatest.NVML(nvidiatest.TwoCards()...)
	err = serve(t.Context(), io.MultiReader(bytes.NewReader(order), in), closedPipe{},
		func(nvidia.Paths) (nvml.Interface, error) { return library, nil })
	if err == nil || !strings.Contains(err.Error(), "the pipe is closed") {
		t.Error(err)
	}
}

// The parent may end while a full pipe blocks the child. Then the child must end too.
func TestBlockedWatcherEndsWithItsParent(t *testing.T) {
	s := nvidiatest.NewSite(t, "l40s-x2", layout.Host, "")
	order, err := json.Marshal(watchOrder{Paths: s.Paths(), Interval: time.Millisecond, Wedged: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	command := exec.Command(s.Role("watch")[0], s.Role("watch")[1:]...)
	in, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write(order); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	const pipeSize = 1 << 16
	for last, full := 0, false; !full; {
		<-time.After(watchInterval)
		now, err := unix.IoctlGetInt(int(out.(*os.File).Fd()), unix.TIOCINQ)
		if err != nil {
			t.Fatal(err)
		}
		last, full = now, now == last && now > pipeSize-4096
	}
	_ = in.Close()
	_ = out.Close()
	ended := make(chan struct{})
	go func() {
		_ = command.Wait() // whatever its exit status is
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(nvidiatest.Patience):
		_ = command.Process.Kill()
		t.Error("the child has not ended")
	}
}

func TestTenThousandEventsAreCountedWithoutLeak(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	w := watchSite(s, nil)
	for i := range 8 {
		w.awaitCondition(s.Card(i), answers)
	}
	w.awaitListening()
	f, err := state.Open(layout.StatePath(s.Root))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	const burst, bursts = 500, 20
	sendBurst := func() {
		for i := range burst {
			if err := f.XID(i%8, 31); err != nil {
				t.Fatal(err)
			}
		}
		for counted := 0; counted < burst; {
			counted += w.await("the rest of a burst", func(s device.Signal) bool { return s.Event != nil }).Event.Count
			if counted > burst {
				t.Fatalf("%d events were counted of %d", counted, burst)
			}
		}
	}
	sendBurst()
	child := w.children[0].PID
	before := footprint(t, child)
	for range bursts {
		sendBurst()
	}
	after := footprint(t, child)
	if after.files > before.files || after.threads > before.threads+4 || after.kilobytes > before.kilobytes+16<<10 {
		t.Errorf("before: %+v, after: %+v", before, after)
	}
}

// processUsage has the open files, threads and memory of a process.
type processUsage struct{ files, threads, kilobytes int }

func footprint(t *testing.T, pid int) processUsage {
	t.Helper()
	var w processUsage
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	w.files = len(files)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		_, _ = fmt.Sscanf(line, "Threads: %d", &w.threads)
		_, _ = fmt.Sscanf(line, "VmRSS: %d kB", &w.kilobytes)
	}
	return w
}

func TestStoppedWatcherDeliversQueuedEvents(t *testing.T) {
	const taken = `read order; echo '{"condition":{"reach":"ok"}}'; cat > /dev/null; `
	const words = taken + `echo '{"condition":{"reach":"lost"}}{"event":{"kind":"xid","xid":79}}'`
	for name, c := range map[string]struct {
		script string
		events int
	}{
		"in order":   {words, 1},
		"then hangs": {words + "; exec sleep 3600", 1},
		"nothing":    {taken + "exec sleep 3600", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var heard []device.Signal
			w := newWatcher(Options{}, func(s device.Signal) { heard = append(heard, s) })
			process, err := child.Start[device.Signal](child.Command{Args: []string{"sh", "-c", c.script}}, watchOrder{})
			if err != nil {
				t.Fatal(err)
			}
			<-process.Messages
			w.drainAndKill(&watchChild{Process: process}, "load-1")
			<-process.Gone
			if len(heard) != c.events || c.events > 0 && heard[0].Event.XID != 79 {
				t.Errorf("%+v", heard)
			}
		})
	}
}

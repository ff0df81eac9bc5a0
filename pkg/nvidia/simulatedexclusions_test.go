package nvidia

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// newWatchedSite runs Watch on the site. It returns Partitions that exclude a card from this watch
// while they change its MIG mode, as in the plugin.
func newWatchedSite(s site, change func(*watcher)) (watch, *Partitions) {
	s.t.Helper()
	self, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	p := NewPartitions(s.paths(), "env", roleVariable+"=partition", self)
	s.t.Cleanup(p.Close)
	return watchSite(s, func(w *watcher) {
		w.options.Command = []string{"env", roleVariable + "=watch", self}
		w.options.Partitions = p // for watchers of single cards
		w.coordinateWith(p)
		if change != nil {
			change(w)
		}
	}), p
}

// foreignGPUVariable names the environment variable with the index of the GPU that
// runForeignProcess opens.
const foreignGPUVariable = "NVIDIA_TEST_HOLDS"

// runForeignProcess runs a process of another tool, such as a monitor, that has NVML open until it
// is killed. If subscribes is set, the process also opens the GPU's MIG instances.
func runForeignProcess(subscribes bool) {
	library := nvml.New(nvml.WithLibraryPath(os.Getenv("NVIDIA_TEST_LIBRARY")))
	_ = library.Init()
	index, _ := strconv.Atoi(os.Getenv(foreignGPUVariable))
	card, ret := library.DeviceGetHandleByIndex(index)
	for id := 0; subscribes && id < 15; id++ {
		if instance, ret := card.GetGpuInstanceById(id); ret == nvml.SUCCESS {
			_, _ = instance.GetComputeInstanceById(0)
		}
	}
	_, _ = fmt.Fprintln(os.Stdout, int(ret))
	select {}
}

// foreign starts a child process that has the GPU with this index open, like a process of another
// tool, and adds it to the site's /proc. role selects what else the process opens. end kills it.
func (s site) foreign(role string, index int) (pid int, end func()) {
	s.t.Helper()
	library, err := findLibrary(s.paths().withDefaults())
	if err != nil {
		s.t.Fatal(err)
	}
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), roleVariable+"="+role, fmt.Sprint(foreignGPUVariable, "=", index), "NVIDIA_TEST_LIBRARY="+library)
	out, err := command.StdoutPipe()
	if err == nil {
		err = command.Start()
	}
	if err != nil {
		s.t.Fatal(err)
	}
	end = sync.OnceFunc(func() {
		_ = command.Process.Kill()
		_ = command.Wait()
	})
	s.t.Cleanup(end)
	if said, _ := bufio.NewReader(out).ReadString('\n'); said != "0\n" {
		s.t.Fatal(said)
	}
	pid = command.Process.Pid
	if err := os.Symlink(fmt.Sprintf("/proc/%d", pid), filepath.Join(s.root, "proc", fmt.Sprint(pid))); err != nil {
		s.t.Fatal(err)
	}
	return pid, end
}

// refusedBy expects an error that says that the process with this PID has the GPU open.
func refusedBy(t *testing.T, err error, pid int) {
	t.Helper()
	var refusal *PartitionError
	if !errors.As(err, &refusal) || refusal.Code != CodeInUse || !strings.Contains(err.Error(), fmt.Sprintf("(process %d)", pid)) {
		t.Errorf("the error is %v, want one that names process %d", err, pid)
	}
}

func TestModeChangeReplacesWatcherAndLosesNoEvent(t *testing.T) {
	s := newSite(t, "awkward", layout.Container, "")
	w, p := newWatchedSite(s, nil)
	w.awaitListening()
	first := w.children[0].process.Pid
	changed := make(chan error, 1)
	go func() {
		_, err := p.SetMode(t.Context(), s.card(1), true)
		changed <- err
	}()
	// While the mode of GPU 1 changes, each event of another GPU must arrive exactly once.
	const events = 500
	f, err := state.Open(layout.StatePath(s.root))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	go func() {
		for code := range events {
			_ = f.XID(3, 1000+uint64(code))
			<-time.After(time.Millisecond)
		}
	}()
	heard, done := map[uint64]int{}, false
	for len(heard) < events || !done {
		signal := w.await("an event, or a change", func(s device.Signal) bool {
			select {
			case err := <-changed:
				if err != nil {
					t.Fatal(err)
				}
				done = true
				return true
			default:
				return true
			}
		})
		switch {
		case signal.Event != nil && signal.Event.Card == s.card(3):
			heard[signal.Event.XID] += signal.Event.Count
		case signal.Condition != nil && signal.Condition.Reach != device.ReachOK, signal.Watcher != nil && !signal.Watcher.Up:
			t.Errorf("%s", formatSignal(signal))
		}
	}
	for code, count := range heard {
		if count != 1 {
			t.Errorf("event %d arrived %d times", code, count)
		}
	}
	w.awaitCondition(s.card(1), func(c device.Condition) bool { return c.MIG != nil && c.MIG.Enabled })
	w.awaitListening()
	s.change(func(_ *layout.Config, f *state.File) error { return f.XID(1, 45) })
	if e := w.awaitEvent(s.card(1)); e.XID != 45 {
		t.Errorf("%+v", e)
	}
	if err := w.stop(); err != nil {
		t.Error(err)
	}
	for _, c := range w.children {
		if c.process.Pid == first {
			t.Error("the watcher was not replaced")
		}
	}
}

func TestModeChangeEndsWhenTheGPUIsWatchedAgain(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "")
	w, p := newWatchedSite(s, nil)
	w.awaitListening()
	if _, err := p.SetMode(t.Context(), s.card(1), true); err != nil {
		t.Fatal(err)
	}
	s.change(func(_ *layout.Config, f *state.File) error { return f.XID(1, 45) })
	if e := w.awaitEvent(s.card(1)); e.XID != 45 {
		t.Errorf("%+v", e)
	}
}

func TestConcurrentModeChangesShareWatcherReplacements(t *testing.T) {
	s := newSite(t, "awkward", layout.Container, "")
	var pids sync.Map
	w, p := newWatchedSite(s, nil)
	w.awaitListening()
	stop := make(chan struct{})
	go func() { // collects every watcher process
		for {
			p.excluded.mu.Lock()
			for h := range p.excluded.watchers {
				pids.Store(h.pid, true)
			}
			p.excluded.mu.Unlock()
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			if _, err := p.SetMode(t.Context(), s.card(i), true); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	for i := range 8 {
		w.awaitCondition(s.card(i), func(c device.Condition) bool { return c.MIG != nil && c.MIG.Enabled })
	}
	close(stop)
	count := 0
	pids.Range(func(any, any) bool { count++; return true })
	// One new watcher process may serve several mode changes. Otherwise 17 would start: the first one,
	// and two for each of the eight changes. The test allows 12, because the number depends on how
	// many changes begin at about the same time.
	if count > 12 {
		t.Errorf("%d processes were started", count)
	}
}

func TestInstanceWithXIDCanBeDestroyed(t *testing.T) {
	s := newSite(t, "awkward", layout.Container, "")
	w, p := newWatchedSite(s, nil)
	w.awaitListening()
	c := s.changer(p, 1)
	c.mode(true)
	made := c.make(14, device.Placement{Start: 2, Size: 2})
	w.awaitCondition(c.card, func(c device.Condition) bool { return c.MIG != nil && c.MIG.Enabled })
	w.awaitListening()
	s.change(func(_ *layout.Config, f *state.File) error { return f.XIDOn(1, made.ID, made.Compute[0].ID, 94) })
	if e := w.awaitEvent(c.card); e.Place == nil || e.Place.ProfileID != 14 || e.Place.Placement != made.Placement || e.Place.Part {
		t.Errorf("place is %+v", e.Place)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := c.Destroy(ctx, c.card, made); err != nil {
		t.Fatal(err)
	}
}

func TestFirstCreateInUseIsRetried(t *testing.T) {
	s := newSite(t, "awkward", layout.Container, "")
	c := s.changer(s.partitions(), 1)
	c.mode(true)
	c.destroy(c.make(14, device.Placement{Start: 2, Size: 2}))
	// If the GPU stays in use, the error must name the process that has it open.
	pid, _ := s.foreign("hold", 1)
	s.fault(state.Fault{Kind: state.FaultFail, GPU: 1, Error: uint32(nvml.ERROR_IN_USE)}, "nvmlDeviceCreateGpuInstanceWithPlacement", 0)
	_, err := c.CreateInstance(t.Context(), c.card, 14, device.Placement{Start: 2, Size: 2})
	refusedBy(t, err, pid)
}

func TestModeChangeNamesForeignProcess(t *testing.T) {
	s := newSite(t, "awkward", layout.Container, "")
	w, p := newWatchedSite(s, nil)
	w.awaitListening()
	pid, end := s.foreign("hold", 1)
	refused := make(chan error, 1)
	go func() {
		_, err := p.SetMode(t.Context(), s.card(1), true)
		refused <- err
	}()
	began := time.Now()
	s.changer(p, 2).mode(true)
	other := time.Since(began)
	refusedBy(t, <-refused, pid)
	if other > patience/2 {
		t.Errorf("another GPU took %s", other)
	}
	end()
	s.changer(p, 1).mode(true)
	w.awaitCondition(s.card(1), func(c device.Condition) bool { return c.MIG != nil && c.MIG.Enabled })
}

func TestDestroyNamesForeignSubscriber(t *testing.T) {
	s := newSite(t, "awkward", layout.Container, "")
	w, p := newWatchedSite(s, nil)
	w.awaitListening()
	c := s.changer(p, 1)
	c.mode(true)
	made := c.make(14, device.Placement{Start: 2, Size: 2})
	pid, end := s.foreign("subscribe", 1)
	c.destroy(c.make(14, device.Placement{Start: 4, Size: 2})) // the other process has not opened this MIG instance
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	refusedBy(t, c.Destroy(ctx, c.card, made), pid)
	time.AfterFunc(100*time.Millisecond, end)
	c.destroy(made)
}

func TestExclusionNamesWatcherThatCannotEnd(t *testing.T) {
	a := newExclusions()
	h, _ := a.begin("")
	a.started(h, 4711)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := a.exclude(ctx, "0000:1b:00.0", 0); err == nil || !strings.Contains(err.Error(), "process 4711") {
		t.Error(err)
	}
	a.replaced(errors.New("NVML has not started"))
	_, err := a.exclude(ctx, "0000:1b:00.0", 0)
	if err == nil || !strings.Contains(err.Error(), "NVML has not started") {
		t.Error(err)
	}
	if now, later := a.outdated(h); now || later {
		t.Error("the card is still excluded after its mode change gave up")
	}
	a.end(h)
	restore, err := a.exclude(t.Context(), "0000:1b:00.0", 0)
	if err != nil {
		t.Fatal(err)
	}
	if h, may := a.begin("0000:1b:00.0"); may {
		t.Errorf("%+v", h)
	}
	without, _ := a.begin("")
	restore()
	restore()
	if now, later := a.outdated(without); now || !later || without.has("0000:1b:00.0") || !without.has("0000:43:00.0") {
		t.Error(now, later, without)
	}
}

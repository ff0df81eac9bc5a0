package nvidia

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

const excludedCard device.PCIAddress = "0000:1b:00.0"

func TestExclusionDoesNotWaitForKilledWatcherThatHangs(t *testing.T) {
	x := newExclusions()
	hung, _ := x.begin("")
	x.started(hung, 4711)
	time.AfterFunc(10*time.Millisecond, func() { x.kill(hung) })
	for range 2 { // a retry is no slower
		began := time.Now()
		restore, err := x.exclude(t.Context(), excludedCard, 0)
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took < killLimit || took > patience/2 {
			t.Errorf("the exclusion took %s, want about %s", took, killLimit)
		}
		restore()
	}
}

func TestModeChangeWatchesHungGPUApart(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "") // its GPUs attach at once
	w, p := newWatchedSite(s, func(w *watcher) { w.wedged = 4 * hangLimit })
	w.awaitCondition(s.card(3), answers)
	w.awaitListening()
	s.fault(state.Fault{Kind: state.FaultSlow, GPU: 3, DelayMS: 3600_000}, "nvmlDeviceGetRemappedRows", 0)
	w.awaitCondition(s.card(3), func(c device.Condition) bool { return c.Reach == device.ReachWedged })
	s.changer(p, 1).mode(true)
	w.awaitCondition(s.card(1), func(c device.Condition) bool { return c.MIG != nil && c.MIG.Enabled })
	w.awaitCondition(s.card(3), func(c device.Condition) bool { return c.Reach == device.ReachWedged })
	if err := w.stop(); err != nil {
		t.Error(err)
	}
	if hanging := s.card(3).PCIAddress; !slices.Contains(w.apart, hanging) {
		t.Errorf("%v have their own watcher, want %s", w.apart, hanging)
	}
}

func TestHungReplacedWatchersDoNotBlockStart(t *testing.T) {
	s := newSite(t, "l40s-x2", layout.Container, "")
	self, err := os.FindProcess(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	var hung []*watchChild
	for range maxStuck {
		hung = append(hung, &watchChild{process: self, gone: make(chan struct{}), replaced: true})
	}
	w := watchSite(s, func(w *watcher) { w.children = slices.Clone(hung) })
	w.awaitListening()
	for _, c := range hung {
		close(c.gone)
	}
}

// watchersNow lists the registered watcher processes.
func (x *exclusions) watchersNow() []*coverage {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.Collect(maps.Keys(x.watchers))
}

func TestExclusionOfAllGPUsStartsNoReplacement(t *testing.T) {
	for node, count := range map[string]int{"t4-x1": 1, "l40s-x2": 2} {
		t.Run(node, func(t *testing.T) {
			s := newSite(t, node, layout.Container, "")
			w := watchSite(s, nil)
			w.awaitListening()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			var all sync.WaitGroup
			restores := make(chan func(), count)
			for i := range count {
				all.Go(func() {
					restore, err := w.excluded.exclude(ctx, s.card(i).PCIAddress, i)
					if err != nil {
						t.Error(err)
						return
					}
					restores <- restore
				})
			}
			all.Wait()
			if left := w.excluded.watchersNow(); len(left) > 0 {
				t.Errorf("%d processes watch no GPU", len(left))
			}
			close(restores)
			for restore := range restores {
				restore()
			}
			w.awaitCondition(s.card(0), answers)
			w.awaitListening()
		})
	}
}

// scripted makes the watcher start each child process by a shell that first runs script and then
// executes the child's command.
func scripted(script string) func(*watcher) {
	return func(w *watcher) {
		w.options.Command = append([]string{"sh", "-c", script + `; exec "$0"`}, w.options.Command...)
	}
}

func TestExclusionEndsWatcherThatCannotBeReplaced(t *testing.T) {
	s := newSite(t, "l40s-x2", layout.Container, "")
	fails := filepath.Join(t.TempDir(), "fails")
	w := watchSite(s, scripted("test ! -e "+fails+" || exit 1"))
	w.awaitListening()
	if err := os.WriteFile(fails, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience/2)
	defer cancel()
	restore, err := w.excluded.exclude(ctx, s.card(1).PCIAddress, 1)
	if err != nil {
		t.Fatal(err)
	}
	w.awaitState(func(s device.WatcherState) bool { return !s.Up && strings.Contains(s.Error, "no process took over") })
	if err := os.Remove(fails); err != nil {
		t.Fatal(err)
	}
	w.awaitListening()
	restore()
	w.awaitCondition(s.card(1), answers)
}

func TestOutdatedReplacementDoesNotTakeOver(t *testing.T) {
	s := newSite(t, "awkward", layout.Container, "")
	slow := filepath.Join(t.TempDir(), "slow")
	w := watchSite(s, scripted("while test -e "+slow+"; do sleep 0.1; done"))
	w.awaitListening()
	if err := os.WriteFile(slow, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var both sync.WaitGroup
	exclude := func(index int) {
		both.Go(func() {
			if _, err := w.excluded.exclude(t.Context(), s.card(index).PCIAddress, index); err != nil {
				t.Error(err)
			}
		})
	}
	awaitWithout := func(cards int) {
		t.Helper()
		for range 50 {
			if slices.ContainsFunc(w.excluded.watchersNow(), func(c *coverage) bool { return len(c.except) == cards }) {
				return
			}
			<-time.After(replaceLimit / 200)
		}
		t.Errorf("no process without %d cards has started", cards)
	}
	exclude(1)
	awaitWithout(1)
	exclude(2)
	awaitWithout(2)
	if err := os.Remove(slow); err != nil {
		t.Fatal(err)
	}
	both.Wait()
}

func TestWatcherApartIsNotReplacedForAnotherCard(t *testing.T) {
	x := newExclusions()
	x.request(excludedCard, 0, 1)
	apart, _ := x.begin("0000:43:00.0")
	common, _ := x.begin("")
	x.request(excludedCard, 0, -1)
	if now, soon := x.outdated(apart); now || soon {
		t.Errorf("the watcher of another card is replaced (now %t, soon %t)", now, soon)
	}
	if _, soon := x.outdated(common); !soon {
		t.Error("the watcher of all cards is not replaced")
	}
}

func TestExclusionAdvisesResetOnlyForKilledWatcher(t *testing.T) {
	x := newExclusions()
	c, _ := x.begin("")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := x.exclude(ctx, excludedCard, 0); err == nil || strings.Contains(err.Error(), "dmesg") {
		t.Errorf("the error about a living watcher is %v", err)
	}
	x.kill(c)
	if _, err := x.exclude(ctx, excludedCard, 0); err == nil || !strings.Contains(err.Error(), "dmesg") {
		t.Errorf("the error about a killed watcher is %v", err)
	}
}

func TestModeChangeWaitsForIdleWorkerOfAnotherGPU(t *testing.T) {
	s := newSite(t, "awkward", layout.Container, "")
	_, end := s.foreign("hold", 1) // NVML may open this GPU in a worker
	time.AfterFunc(idleLimit, end)
	s.changer(s.partitions(), 1).mode(true)
}

func TestLastEventHasItsPlace(t *testing.T) {
	asked, answer := make(chan struct{}), make(chan struct{})
	places := make(chan device.HealthEvent, 1)
	ctx, cancel := context.WithCancel(t.Context())
	placing, placed := extendContext(ctx)
	defer placed()
	instance := uint32(7)
	r := &placeResolver{
		emit: func(s device.Signal) { places <- *s.Event },
		look: func(ctx context.Context, _ Card) (State, error) {
			close(asked)
			select {
			case <-answer:
				return State{MIG: device.MIG{Instances: []device.Instance{{ID: instance}}}}, nil
			case <-ctx.Done():
				return State{}, ctx.Err()
			}
		},
	}
	r.add(placing, device.HealthEvent{GPUInstance: &instance})
	<-asked
	cancel()
	time.AfterFunc(10*time.Millisecond, func() { close(answer) })
	if e := <-places; e.Place == nil {
		t.Error("the event has no place")
	}
}

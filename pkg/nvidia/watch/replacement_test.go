package watch

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/exclusion"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

func TestModeChangeWatchesHungGPUApart(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "") // its GPUs attach at once
	w, p := newWatchedSite(s, func(w *watcher) { w.wedged = 4 * nvidiatest.HangLimit })
	w.awaitCondition(s.Card(3), answers)
	w.awaitListening()
	s.Fault(state.Fault{Kind: state.FaultSlow, GPU: 3, DelayMS: 3600_000}, "nvmlDeviceGetRemappedRows", 0)
	w.awaitCondition(s.Card(3), func(c device.Condition) bool { return c.Reach == device.ReachWedged })
	s.Changer(p, 1).Mode(true)
	w.awaitCondition(s.Card(1), func(c device.Condition) bool { return c.MIG != nil && c.MIG.Enabled })
	w.awaitCondition(s.Card(3), func(c device.Condition) bool { return c.Reach == device.ReachWedged })
	if err := w.stop(); err != nil {
		t.Error(err)
	}
	if hanging := s.Card(3).PCIAddress; !slices.Contains(w.apart, hanging) {
		t.Errorf("%v have their own watcher, want %s", w.apart, hanging)
	}
}

// While a watcher is replaced, the answers of its replacement wait. One that is older than what was
// sent meanwhile has a smaller energy counter, like after a reset.
func TestOvertakenConditionsAreDropped(t *testing.T) {
	type condition struct {
		card     device.PCIAddress
		at, took time.Duration
		reach    device.Reach
	}
	var sent []condition
	began := time.Now()
	w := newWatcher(Options{}, func(s device.Signal) {
		c := s.Condition
		sent = append(sent, condition{c.Card.PCIAddress, c.At.Sub(began), c.Took, c.Reach})
	})
	list := []condition{
		{"a", 2 * time.Second, time.Second, device.ReachOK},
		{"b", time.Second, 0, device.ReachOK}, // another card
		{"a", 4 * time.Second, 2 * time.Second, device.ReachOK},
		{"a", 3 * time.Second, time.Second, device.ReachLost}, // overtaken from here on
		{"a", 3 * time.Second, time.Second, device.ReachOK},
		{"a", 5 * time.Second, 4 * time.Second, device.ReachOK},
		{"a", 5 * time.Second, time.Second, device.ReachLost}, // newer from here on
		{"a", 6 * time.Second, time.Second, device.ReachOK},
	}
	for _, c := range list {
		w.forward(device.Signal{Condition: &device.Condition{
			Card: device.Card{PCIAddress: c.card, UUID: "GPU-1"}, At: began.Add(c.at), Took: c.took, Reach: c.reach,
		}}, "")
	}
	if want := slices.Delete(list, 3, 6); !slices.Equal(sent, want) {
		t.Errorf("sent %v, want %v", sent, want)
	}
}

// A new card that hangs may block the polls of all cards in the replacement.
func TestReplacementForCardMustHearTheOthers(t *testing.T) {
	condition := func(a device.PCIAddress, reach device.Reach) device.Signal {
		return device.Signal{Condition: &device.Condition{Card: device.Card{PCIAddress: a}, Reach: reach}}
	}
	signals := []device.Signal{
		{Watcher: &device.WatcherState{Up: true}},
		condition("a", device.ReachOK), condition("b", device.ReachWedged), condition("c", device.ReachOK),
	}
	if got := silentIn(signals, []device.PCIAddress{"a", "b", "c", "d"}); !slices.Equal(got, []device.PCIAddress{"b", "d"}) {
		t.Errorf("the silent cards are %v, want b and d", got)
	}
	s := nvidiatest.NewSite(t, "l40s-x2", layout.Container, "")
	w := watchSite(s, nil)
	w.awaitListening()
	w.awaitCondition(s.Card(0), answers)
	w.awaitCondition(s.Card(1), answers)
	if err := w.stop(); err != nil {
		t.Fatal(err)
	}
	if got := w.answering(s.Card(1).PCIAddress); !slices.Equal(got, []device.PCIAddress{s.Card(0).PCIAddress}) {
		t.Errorf("the cards %v are needed, want the other one", got)
	}
}

// What two watchers say about a card must not alternate.
func TestSignalsOfCardApartAreDropped(t *testing.T) {
	sent := 0
	w := newWatcher(Options{}, func(device.Signal) { sent++ })
	w.excluded, w.apart = exclusion.NewSet(), []device.PCIAddress{"a"}
	for _, a := range []device.PCIAddress{"a", "b"} {
		w.forward(device.Signal{Condition: &device.Condition{Card: device.Card{PCIAddress: a}, Reach: device.ReachWedged}}, "")
	}
	if sent != 1 || !slices.Equal(w.hanging, []device.PCIAddress{"b"}) {
		t.Errorf("%d signals were sent, and %v hang, want those of b", sent, w.hanging)
	}
}

func TestHungReplacedWatchersDoNotBlockStart(t *testing.T) {
	s := nvidiatest.NewSite(t, "l40s-x2", layout.Container, "")
	gone := make(chan struct{})
	var hung []*watchChild
	for range child.MaxStuck {
		hung = append(hung, &watchChild{Process: &child.Process[device.Signal]{Gone: gone}, replaced: true})
	}
	w := watchSite(s, func(w *watcher) { w.children = slices.Clone(hung) })
	w.awaitListening()
	close(gone)
}

func TestExclusionOfAllGPUsStartsNoReplacement(t *testing.T) {
	for node, count := range map[string]int{"t4-x1": 1, "l40s-x2": 2} {
		t.Run(node, func(t *testing.T) {
			s := nvidiatest.NewSite(t, node, layout.Container, "")
			record, started := recorded(t)
			w := watchSite(s, record)
			w.awaitListening()
			ctx, cancel := context.WithTimeout(t.Context(), nvidiatest.Patience)
			defer cancel()
			var all sync.WaitGroup
			restores := make(chan func(), count)
			for i := range count {
				all.Go(func() {
					restore, err := w.excluded.Exclude(ctx, s.Card(i).PCIAddress, i)
					if err != nil {
						t.Error(err)
						return
					}
					restores <- restore
				})
			}
			all.Wait()
			for _, process := range started() {
				if _, err := os.Stat(process); err == nil {
					t.Errorf("%s watches no GPU", process)
				}
			}
			close(restores)
			for restore := range restores {
				restore()
			}
			w.awaitCondition(s.Card(0), answers)
			w.awaitListening()
		})
	}
}

func TestExclusionEndsWatcherThatCannotBeReplaced(t *testing.T) {
	s := nvidiatest.NewSite(t, "l40s-x2", layout.Container, "")
	fails := filepath.Join(t.TempDir(), "fails")
	w := watchSite(s, scripted("test ! -e "+fails+" || exit 1"))
	w.awaitListening()
	if err := os.WriteFile(fails, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), nvidiatest.Patience/2)
	defer cancel()
	restore, err := w.excluded.Exclude(ctx, s.Card(1).PCIAddress, 1)
	if err != nil {
		t.Fatal(err)
	}
	w.awaitState(func(s device.WatcherState) bool { return !s.Up && strings.Contains(s.Error, "no process took over") })
	if err := os.Remove(fails); err != nil {
		t.Fatal(err)
	}
	w.awaitListening()
	restore()
	w.awaitCondition(s.Card(1), answers)
}

func TestOutdatedReplacementDoesNotTakeOver(t *testing.T) {
	s := nvidiatest.NewSite(t, "awkward", layout.Container, "")
	slow := filepath.Join(t.TempDir(), "slow")
	record, started := recorded(t)
	w := watchSite(s, func(w *watcher) {
		scripted("while test -e " + slow + "; do sleep 0.1; done")(w)
		record(w)
	})
	w.awaitListening()
	if err := os.WriteFile(slow, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var both sync.WaitGroup
	exclude := func(index int) {
		both.Go(func() {
			if _, err := w.excluded.Exclude(t.Context(), s.Card(index).PCIAddress, index); err != nil {
				t.Error(err)
			}
		})
	}
	awaitStarts := func(processes int) {
		t.Helper()
		for range 50 {
			if len(started()) >= processes {
				return
			}
			<-time.After(replaceLimit / 200)
		}
		t.Errorf("%d processes have started, want %d", len(started()), processes)
	}
	exclude(1)
	awaitStarts(2)
	exclude(2)
	awaitStarts(3)
	if err := os.Remove(slow); err != nil {
		t.Fatal(err)
	}
	both.Wait()
}

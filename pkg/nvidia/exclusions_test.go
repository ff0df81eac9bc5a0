package nvidia

import (
	"os"
	"slices"
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

func TestModeChangeSetsHangingGPUApart(t *testing.T) {
	s := newSite(t, "awkward", layout.Container, "")
	w, p := cutWatched(s, func(w *watcher) { w.wedged = hangLimit })
	w.condition(s.card(3), answers)
	w.listens()
	s.fault(state.Fault{Kind: state.FaultSlow, GPU: 3, DelayMS: 3600_000}, "nvmlDeviceGetRemappedRows", 0)
	w.condition(s.card(3), func(c device.Condition) bool { return c.Reach == device.ReachWedged })
	s.cutting(p, 1).mode(true)
	w.condition(s.card(1), func(c device.Condition) bool { return c.MIG != nil && c.MIG.Enabled })
	w.condition(s.card(3), func(c device.Condition) bool { return c.Reach == device.ReachWedged })
	if err := w.stop(); err != nil {
		t.Error(err)
	}
	if hanging := s.card(3).PCIAddress; !slices.Contains(w.apart, hanging) {
		t.Errorf("%v are watched by processes of their own, want %s", w.apart, hanging)
	}
}

func TestHungReplacedWatchersDoNotKeepTheWatchFromStarting(t *testing.T) {
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
	w.listens()
	for _, c := range hung {
		close(c.gone)
	}
}

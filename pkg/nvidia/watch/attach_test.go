package watch

import (
	"strings"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// untilAllAnswer returns when each of the site's eight cards has answered. It fails the test if a
// card is reported as hung before its first answer, or if the watcher's child process is replaced.
func (w watch) untilAllAnswer() {
	w.t.Helper()
	answered := map[device.PCIAddress]bool{}
	w.await("the first answers of all GPUs", func(s device.Signal) bool {
		if s.Watcher != nil && !s.Watcher.Up {
			w.t.Errorf("the child was replaced: %s", s.Watcher.Error)
		}
		if c := s.Condition; c != nil {
			if c.Reach != device.ReachOK && !answered[c.Card.PCIAddress] {
				w.t.Errorf("%s: %s (%s)", c.Card.PCIAddress, c.Reach, c.Error)
			}
			answered[c.Card.PCIAddress] = true
		}
		return len(answered) == 8 || w.t.Failed()
	})
}

func TestWatcherLivesUntilEachGPUAnsweredOnce(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	s.Change(func(_ *layout.Config, f *state.File) error { return f.SetAttachCost(2 * nvidiatest.HangLimit) })
	w := watchSite(s, func(w *watcher) { w.wedged = 4 * nvidiatest.HangLimit })
	w.untilAllAnswer()
	if t.Failed() {
		return
	}
	// After all cards have answered once, the limit of a query is w.wedged again, because no card
	// waits for another one.
	s.Fault(state.Fault{Kind: state.FaultSlow, GPU: 3, DelayMS: 3600_000}, "nvmlDeviceGetRemappedRows", 0)
	c := w.awaitCondition(s.Card(3), func(c device.Condition) bool { return c.Reach != device.ReachOK })
	if c.Reach != device.ReachWedged || !strings.Contains(c.Error, (4*nvidiatest.HangLimit).String()) {
		t.Errorf("%+v", c)
	}
}

// The test expects that a GPU that hangs from the start is reported as wedged, although the other
// GPUs open slowly.
func TestGPUHungFromStartIsReportedWedged(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	s.Change(func(_ *layout.Config, f *state.File) error { return f.SetAttachCost(nvidiatest.HangLimit) })
	s.Fault(state.Fault{Kind: state.FaultSlow, GPU: 5, DelayMS: 3600_000}, "nvmlDeviceGetHandleByPciBusId_v2", 0)
	w := watchSite(s, func(w *watcher) { w.wedged = 3 * nvidiatest.HangLimit })
	w.await("the wedged GPU", func(s2 device.Signal) bool {
		if s2.Watcher != nil && !s2.Watcher.Up {
			t.Errorf("the child was replaced: %s", s2.Watcher.Error)
		}
		return s2.Condition != nil && s2.Condition.Card.PCIAddress == s.Card(5).PCIAddress && s2.Condition.Reach == device.ReachWedged
	})
	w.awaitCondition(s.Card(7), answers)
}

// The test uses the production time limits, with a simulated node whose GPUs take three seconds
// each to open.
func TestScanOffersEightSlowGPUs(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	s.Change(func(_ *layout.Config, f *state.File) error { return f.SetAttachCost(3 * time.Second) })
	w := watchSite(s, nil)
	node, err := scan.Isolated(s.Paths(), s.Role("scan")...)(t.Context())
	if err != nil || len(node.GPUs) != 8 || len(node.Problems) > 0 {
		t.Fatalf("offered %d GPUs (%v), problems %v", len(node.GPUs), err, node.Problems)
	}
	w.untilAllAnswer()
	// The second scan must be fast, because the watcher keeps the GPUs open.
	began := time.Now()
	if node, err = scan.Isolated(s.Paths(), s.Role("scan")...)(t.Context()); err != nil || len(node.GPUs) != 8 ||
		time.Since(began) > 3*time.Second {
		t.Errorf("another scan took %s: %d GPUs (%v)", time.Since(began), len(node.GPUs), err)
	}
}

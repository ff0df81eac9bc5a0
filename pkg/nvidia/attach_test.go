package nvidia

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// slowToOpen returns a fake NVML library with eight cards. The cards open one after another, and
// each takes the time cost. A card for which hang is true stays out of that order and answers only
// after over is closed.
func slowToOpen(h fakeHost, cost time.Duration, hang func(i int) bool, over <-chan struct{}) *fakeLibrary {
	h.t.Helper()
	cards := make([]card, 8)
	for i := range cards {
		cards[i] = card{
			bus:  fmt.Sprintf("00000000:%02X:00.0", 0xa0+i),
			uuid: fmt.Sprintf("GPU-00000000-0000-0000-0000-00000000000%d", i), name: "NVIDIA L40S", minor: 10 + i,
		}
		h.node(fmt.Sprintf("driver/dev/nvidia%d", cards[i].minor))
	}
	library := fakeNVML(cards...)
	find, driver := library.DeviceGetHandleByIndexFunc, make(chan struct{}, 1)
	library.DeviceGetHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
		if hang(i) {
			<-over
		}
		select {
		case driver <- struct{}{}:
		case <-over:
			return nil, nvml.ERROR_UNKNOWN
		}
		<-time.After(cost)
		<-driver
		return find(i)
	}
	return library
}

func TestScanOffersGPUsThatOpenSequentially(t *testing.T) {
	for _, cost := range []time.Duration{3 * time.Second, 6 * time.Second, 9 * time.Second} {
		t.Run(cost.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, over := newFakeHost(t), make(chan struct{})
				defer func() { close(over); <-time.After(8 * cost) }() // until the library is idle
				library := slowToOpen(h, cost, func(int) bool { return false }, over)
				node, err := h.scanner(library).scan(t.Context())
				if err != nil || len(node.GPUs) != 8 {
					t.Errorf("offered %d GPUs (%v), problems %v", len(node.GPUs), err, node.Problems)
				}
			})
		})
	}
}

func TestGPUThatNeverOpensDelaysOthersByOneLimit(t *testing.T) {
	for hanging := range 3 {
		t.Run(fmt.Sprint(hanging), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, over, began := newFakeHost(t), make(chan struct{}), time.Now()
				const cost = 3 * time.Second
				defer func() { close(over); <-time.After(8 * cost) }()
				library := slowToOpen(h, cost, func(i int) bool { return i < hanging }, over)
				node, err := h.scanner(library).scan(t.Context())
				if err != nil || len(node.GPUs) != 8-hanging {
					t.Errorf("offered %d GPUs (%v), problems %v", len(node.GPUs), err, node.Problems)
				}
				if most := time.Duration(8-hanging)*cost + time.Duration(hanging)*callLimit; time.Since(began) > most {
					t.Errorf("it took %s, want %s at most", time.Since(began), most)
				}
			})
		})
	}
}

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
	s := newSite(t, "dgx-h100", layout.Container, "")
	s.change(func(_ *layout.Config, f *state.File) error { return f.SetAttachCost(2 * hangLimit) })
	w := watchSite(s, func(w *watcher) { w.wedged = 4 * hangLimit })
	w.untilAllAnswer()
	if t.Failed() {
		return
	}
	// After all cards have answered once, the limit of a query is w.wedged again, because no card
	// waits for another one.
	s.fault(state.Fault{Kind: state.FaultSlow, GPU: 3, DelayMS: 3600_000}, "nvmlDeviceGetRemappedRows", 0)
	c := w.awaitCondition(s.card(3), func(c device.Condition) bool { return c.Reach != device.ReachOK })
	if c.Reach != device.ReachWedged || !strings.Contains(c.Error, (4*hangLimit).String()) {
		t.Errorf("%+v", c)
	}
}

// The test expects that a GPU that hangs from the start is reported as wedged, although the other
// GPUs open slowly.
func TestGPUHungFromStartIsReportedWedged(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "")
	s.change(func(_ *layout.Config, f *state.File) error { return f.SetAttachCost(hangLimit) })
	s.fault(state.Fault{Kind: state.FaultSlow, GPU: 5, DelayMS: 3600_000}, "nvmlDeviceGetHandleByPciBusId_v2", 0)
	w := watchSite(s, func(w *watcher) { w.wedged = 3 * hangLimit })
	w.await("the wedged GPU", func(s2 device.Signal) bool {
		if s2.Watcher != nil && !s2.Watcher.Up {
			t.Errorf("the child was replaced: %s", s2.Watcher.Error)
		}
		return s2.Condition != nil && s2.Condition.Card.PCIAddress == s.card(5).PCIAddress && s2.Condition.Reach == device.ReachWedged
	})
	w.awaitCondition(s.card(7), answers)
}

// The test uses the production time limits, with a simulated node whose GPUs take three seconds
// each to open.
func TestScanOffersEightSlowGPUs(t *testing.T) {
	if testing.Short() {
		t.Skip("takes half a minute")
	}
	s := newSite(t, "dgx-h100", layout.Container, "")
	s.change(func(_ *layout.Config, f *state.File) error { return f.SetAttachCost(3 * time.Second) })
	w := watchSite(s, nil)
	node, err := s.scanDuringChange()
	if err != nil || len(node.GPUs) != 8 || len(node.Problems) > 0 {
		t.Fatalf("offered %d GPUs (%v), problems %v", len(node.GPUs), err, node.Problems)
	}
	w.untilAllAnswer()
	// The second scan must be fast, because the watcher keeps the GPUs open.
	began := time.Now()
	if node, err = s.scanDuringChange(); err != nil || len(node.GPUs) != 8 || time.Since(began) > 3*time.Second {
		t.Errorf("another scan took %s: %d GPUs (%v)", time.Since(began), len(node.GPUs), err)
	}
}

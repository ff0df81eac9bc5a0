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

// slowToOpen is a library with eight cards that are opened one after another, each in cost. Those
// that hang is true of do not stand in that queue, and do not answer before it is over.
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

func TestGPUsThatAreOpenedOneAfterAnotherAreAllOffered(t *testing.T) {
	for _, cost := range []time.Duration{3 * time.Second, 6 * time.Second, 9 * time.Second} {
		t.Run(cost.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, over := newFakeHost(t), make(chan struct{})
				defer func() { close(over); <-time.After(8 * cost) }() // until the library is at rest
				library := slowToOpen(h, cost, func(int) bool { return false }, over)
				node, err := h.scanner(library).scan(t.Context())
				if err != nil || len(node.GPUs) != 8 {
					t.Errorf("%d GPUs are offered (%v), problems %v", len(node.GPUs), err, node.Problems)
				}
			})
		})
	}
}

func TestAGPUThatNeverOpensCostsTheOthersTheOldLimit(t *testing.T) {
	for hanging := range 3 {
		t.Run(fmt.Sprint(hanging), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, over, began := newFakeHost(t), make(chan struct{}), time.Now()
				const cost = 3 * time.Second
				defer func() { close(over); <-time.After(8 * cost) }()
				library := slowToOpen(h, cost, func(i int) bool { return i < hanging }, over)
				node, err := h.scanner(library).scan(t.Context())
				if err != nil || len(node.GPUs) != 8-hanging {
					t.Errorf("%d GPUs are offered (%v), problems %v", len(node.GPUs), err, node.Problems)
				}
				if most := time.Duration(8-hanging)*cost + time.Duration(hanging)*callLimit; time.Since(began) > most {
					t.Errorf("it took %s, want %s at most", time.Since(began), most)
				}
			})
		})
	}
}

// untilAllAnswer returns when each of the site's eight cards has answered, and fails if one is said to hang
// before that, or if a child is replaced.
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

func TestNoWatcherIsEndedBeforeEachGPUHasAnsweredOnce(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "")
	s.change(func(_ *layout.Config, f *state.File) error { return f.SetAttachCost(2 * hangLimit) })
	w := watchSite(s, func(w *watcher) { w.wedged = 4 * hangLimit })
	w.untilAllAnswer()
	if t.Failed() {
		return
	}
	// From now on the limit is that of one card again.
	s.fault(state.Fault{Kind: state.FaultSlow, GPU: 3, DelayMS: 3600_000}, "nvmlDeviceGetRemappedRows", 0)
	c := w.condition(s.card(3), func(c device.Condition) bool { return c.Reach != device.ReachOK })
	if c.Reach != device.ReachWedged || !strings.Contains(c.Error, (4*hangLimit).String()) {
		t.Errorf("%+v", c)
	}
}

// A GPU that hangs from the start is said to hang, although others are opened slowly.
func TestAGPUThatHangsFromTheStartIsSaidToHang(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Container, "")
	s.change(func(_ *layout.Config, f *state.File) error { return f.SetAttachCost(hangLimit) })
	s.fault(state.Fault{Kind: state.FaultSlow, GPU: 5, DelayMS: 3600_000}, "nvmlDeviceGetHandleByPciBusId_v2", 0)
	w := watchSite(s, func(w *watcher) { w.wedged = 3 * hangLimit })
	w.await("that it hangs", func(s2 device.Signal) bool {
		if s2.Watcher != nil && !s2.Watcher.Up {
			t.Errorf("the child was replaced: %s", s2.Watcher.Error)
		}
		return s2.Condition != nil && s2.Condition.Card.PCIAddress == s.card(5).PCIAddress && s2.Condition.Reach == device.ReachWedged
	})
	w.condition(s.card(7), answers)
}

// The whole of it with the limits that hold on a real node.
func TestEightGPUsThatTakeThreeSecondsEachAreOffered(t *testing.T) {
	if testing.Short() {
		t.Skip("takes half a minute")
	}
	s := newSite(t, "dgx-h100", layout.Container, "")
	s.change(func(_ *layout.Config, f *state.File) error { return f.SetAttachCost(3 * time.Second) })
	w := watchSite(s, nil)
	node, err := s.scanBeside()
	if err != nil || len(node.GPUs) != 8 || len(node.Problems) > 0 {
		t.Fatalf("%d GPUs are offered (%v), problems %v", len(node.GPUs), err, node.Problems)
	}
	w.untilAllAnswer()
	// Whoever watches the GPUs keeps them open.
	began := time.Now()
	if node, err = s.scanBeside(); err != nil || len(node.GPUs) != 8 || time.Since(began) > 3*time.Second {
		t.Errorf("another scan took %s: %d GPUs (%v)", time.Since(began), len(node.GPUs), err)
	}
}

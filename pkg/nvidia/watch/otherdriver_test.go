package watch

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// bind binds a simulated card to a kernel driver. An empty name unbinds the card.
func bind(s nvidiatest.Site, c device.Card, driver string) {
	s.T.Helper()
	link := filepath.Join(s.Root, "sys", "bus", "pci", "devices", string(c.PCIAddress), "driver")
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.T.Fatal(err)
	}
	if driver == "" {
		return
	}
	if err := os.Symlink(filepath.Join("..", "..", "..", "bus", "pci", "drivers", driver), link); err != nil {
		s.T.Fatal(err)
	}
}

// unlisted makes NVML fail to return the simulated card with this index, as if the card were lost.
func unlisted(s nvidiatest.Site, index int32) {
	s.Fault(state.Fault{Kind: state.FaultFail, GPU: index, Error: uint32(nvml.ERROR_GPU_IS_LOST)}, "nvmlDeviceGetUUID", 0)
}

func TestWatchDropsCardOfAnotherDriver(t *testing.T) {
	s := nvidiatest.NewSite(t, "l40s-x2", layout.Container, "")
	w := watchSite(s, nil)
	w.awaitCondition(s.Card(1), answers)
	bind(s, s.Card(1), "vfio-pci")
	notOurs := func(c device.Condition) bool { return c.Reach == device.ReachNotOurs }
	w.awaitCondition(s.Card(1), notOurs)
	for range 3 { // conditions of the other card show that time passed
		w.await("a condition of the other card", func(signal device.Signal) bool {
			if c := signal.Condition; c != nil && c.Card.PCIAddress == s.Card(1).PCIAddress {
				t.Errorf("polled a card of another driver: %+v", c)
			}
			return signal.Condition != nil && signal.Condition.Card == s.Card(0)
		})
	}
	bind(s, s.Card(1), "nvidia")
	w.awaitCondition(s.Card(1), answers)
	bind(s, s.Card(1), "vfio-pci")
	w.awaitCondition(s.Card(1), notOurs)
	bind(s, s.Card(1), "")
	w.awaitCondition(s.Card(1), func(c device.Condition) bool { return c.Reach != device.ReachNotOurs })
}

func TestAnotherProcessTakesOverForLateBoundCard(t *testing.T) {
	s := nvidiatest.NewSite(t, "l40s-x2", layout.Container, "")
	unlisted(s, 1)
	bind(s, s.Card(1), "") // last, because changing the node restores the link
	w := watchSite(s, nil)
	lost := func(signal device.Signal) bool {
		c := signal.Condition
		return c != nil && c.Card.PCIAddress == s.Card(1).PCIAddress && c.Reach == device.ReachLost
	}
	for range 3 { // no restart while the card has no driver
		w.await("the lost card", func(signal device.Signal) bool {
			if signal.Watcher != nil && !signal.Watcher.Up {
				t.Errorf("%+v", signal.Watcher)
			}
			return lost(signal)
		})
	}
	bind(s, s.Card(1), "nvidia")
	w.awaitState(func(state device.WatcherState) bool { return state.ChangedGPU == s.Card(1).PCIAddress })
	s.Change(func(_ *layout.Config, f *state.File) error { return f.ClearFaults() })
	w.await("the returned card", func(signal device.Signal) bool {
		if signal.Watcher != nil && !signal.Watcher.Up {
			t.Errorf("the other card is not watched: %+v", signal.Watcher)
		}
		return signal.Condition != nil && signal.Condition.Card.PCIAddress == s.Card(1).PCIAddress && answers(*signal.Condition)
	})
}

func TestFailedReplacementKeepsTheWatch(t *testing.T) {
	s := nvidiatest.NewSite(t, "l40s-x2", layout.Container, "")
	record, started := recorded(t)
	w := watchSite(s, record)
	w.awaitCondition(s.Card(0), answers)
	s.Fault(state.Fault{Kind: state.FaultFail, GPU: state.AnyGPU, Error: uint32(nvml.ERROR_LIB_RM_VERSION_MISMATCH)}, "nvmlInit_v2", 0)
	bind(s, s.Card(1), "") // the kernel may wait until the watcher closes it
	w.awaitState(func(state device.WatcherState) bool { return state.ChangedGPU == s.Card(1).PCIAddress })
	for after := 0; after < 10; { // conditions after the start of the replacement
		w.await("a condition of the other card", func(signal device.Signal) bool {
			if signal.Watcher != nil && !signal.Watcher.Up {
				t.Errorf("the other card is not watched: %+v", signal.Watcher)
			}
			return signal.Condition != nil && signal.Condition.Card == s.Card(0) && answers(*signal.Condition)
		})
		if len(started()) > 1 {
			after++
		}
	}
	if n := len(started()); n != 2 {
		t.Errorf("%d processes were started, want the watcher and one replacement", n)
	}
}

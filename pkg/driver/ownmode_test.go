package driver

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

func TestAModeThatCannotBeTurnedOffIsTriedMoreAndMoreSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var tries []time.Duration
		looks, inUse := 0, errors.New("in use")
		m := &modes{changed: func() { looks++ }, turnOff: func(_ context.Context, g device.GPU) (bool, error) {
			if g.UUID == "free" {
				return true, nil
			}
			tries = append(tries, time.Since(began))
			return false, inUse
		}}
		gpus := []device.GPU{{PCIAddress: "0000:1b:00.0", UUID: "busy"}, {PCIAddress: "0000:1c:00.0", UUID: "free"}}
		for range 20 {
			if err := m.Off(t.Context(), gpus); !errors.Is(err, inUse) {
				t.Errorf("between tries nothing is said: %v", err)
			}
			time.Sleep(5 * time.Second) //nolint:forbidigo // synctest's time
		}
		if want := []time.Duration{0, 10 * time.Second, 30 * time.Second, 70 * time.Second}; !slices.Equal(tries, want) {
			t.Errorf("tried after %v", tries)
		}
		if looks != 20 {
			t.Errorf("the inventory looked %d times at what was turned off", looks)
		}
		inUse = nil
		time.Sleep(modeRetryMost) //nolint:forbidigo // synctest's time
		if err := m.Off(t.Context(), gpus); err != nil {
			t.Error(err)
		}
		if due, last := m.due(gpus[0].WholeName()); !due || last != nil {
			t.Errorf("due: %v, %v", due, last)
		}
	})
}

// modeHardware are GPUs in MIG mode, without instances. turnOff says what keeps one from leaving
// it.
type modeHardware struct {
	prepare.Partitions
	turnOff func(context.Context, device.Card) error

	mu  sync.Mutex
	off map[device.PCIAddress]bool
}

func (h *modeHardware) Look(_ context.Context, c device.Card) (device.CutState, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return device.CutState{MIG: device.MIG{Enabled: !h.off[c.PCIAddress]}}, nil
}

func (h *modeHardware) SetMode(ctx context.Context, c device.Card, on bool) (device.CutState, error) {
	if err := h.turnOff(ctx, c); err != nil || on {
		return device.CutState{}, err
	}
	h.mu.Lock()
	h.off[c.PCIAddress] = true
	h.mu.Unlock()
	return h.Look(ctx, c)
}

func (h *modeHardware) turnedOff() []device.PCIAddress {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Sorted(maps.Keys(h.off))
}

func inMIGMode() (nvidia.Node, error) {
	n, err := twoGPUs()
	for i := range n.GPUs {
		n.GPUs[i].MIG = &device.MIG{Enabled: true}
	}
	return n, err
}

const busyCard, freeCard device.PCIAddress = "0000:1b:00.0", "0000:43:00.0"

// busy is a card that something has open.
func busy(_ context.Context, c device.Card) error {
	if c.PCIAddress != busyCard {
		return nil
	}
	return &nvidia.CutError{Op: "turn off MIG mode", Code: nvidia.CodeInUse, Message: "in use", Processes: []nvidia.Process{{PID: 7, Name: "dcgm"}}}
}

// marked notes that cuts of ours turned on the mode of both GPUs in this boot.
func marked(t *testing.T, stateDir, bootID string) *checkpoint.Store {
	t.Helper()
	records, err := checkpoint.Open(stateDir, durable.NewWatched())
	if err != nil {
		t.Fatal(err)
	}
	for _, gpu := range []string{"gpu-0000-1b-00-0", "gpu-0000-43-00-0"} {
		if err := records.Mark(gpu, bootID); err != nil {
			t.Fatal(err)
		}
	}
	return records
}

func TestLeavingTurnsModesOff(t *testing.T) {
	for _, boot := range []string{"this", "earlier"} {
		t.Run(boot, func(t *testing.T) {
			n := newNode(t)
			n.cfg.MIGPolicy = "dynamic" // or the modes go off before
			hardware := &modeHardware{turnOff: busy, off: map[device.PCIAddress]bool{}}
			n.partitions = hardware
			n.say("driver", inMIGMode)
			id, err := durable.BootID(n.cfg.ProcRoot)
			if err != nil {
				t.Fatal(err)
			}
			if boot != "this" {
				id = boot
			}
			marked(t, n.cfg.StateDir(), id)
			n.start(t)
			n.register(t)
			eventually(t, "the GPUs are known", func() bool { return n.probe.isReady(t.Context()) == nil })
			if off := hardware.turnedOff(); len(off) > 0 {
				t.Fatalf("turned off before the uninstallation: %q", off)
			}
			if err := n.client.AppsV1().DaemonSets("gpu").Delete(t.Context(), "plugin", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			if err := n.stop(); err != nil {
				t.Fatal(err)
			}
			var want []device.PCIAddress
			var told []string
			if boot == "this" {
				want = []device.PCIAddress{freeCard}
				told = []string{"gpu-0000-1b-00-0", "dcgm", "nvidia-smi -i ADDRESS -mig 0"}
			}
			if off := hardware.turnedOff(); !slices.Equal(off, want) {
				t.Errorf("turned off: %q, want %q", off, want)
			}
			said := slices.DeleteFunc(n.said(t, "Node", "node"), func(e string) bool { return !strings.HasPrefix(e, "MIGModeStays: ") })
			if len(said) != min(len(told), 1) {
				t.Fatalf("Events at exit: %q", said)
			}
			for _, part := range told {
				if !strings.Contains(said[0], part) || strings.Contains(said[0], "gpu-0000-43-00-0") {
					t.Errorf("%q does not name %q alone", said[0], part)
				}
			}
			if _, err := os.Stat(n.cfg.PluginDir); !os.IsNotExist(err) {
				t.Errorf("the plugin directory is there: %v", err)
			}
			if files := n.cdiFiles(t); len(files) > 0 {
				t.Errorf("CDI files: %v", files)
			}
		})
	}
}

// markedDriver has what modesOff needs.
func markedDriver(t *testing.T, hardware prepare.Partitions) *Driver {
	t.Helper()
	dir := t.TempDir()
	locks, err := lock.NewSet(filepath.Join(dir, "locks"))
	if err != nil {
		t.Fatal(err)
	}
	return &Driver{
		client: fake.NewClientset(), release: newRelease(),
		events: &nodeEvents{node: &corev1.ObjectReference{Kind: "Node", Name: "node"}},
		preparer: prepare.New(prepare.Options{
			Hardware: &seenNode{device.MIGMode{Enabled: true}}, Records: marked(t, dir, "boot"), Locks: locks, BootID: "boot", Now: time.Now, Partitions: hardware,
		}),
	}
}

func TestLeavingWaitsTenSecondsForAGPUThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hardware := &modeHardware{turnOff: func(ctx context.Context, _ device.Card) error { <-ctx.Done(); return context.Cause(ctx) }}
		d := markedDriver(t, hardware)
		began := time.Now()
		d.modesOff(t.Context())
		if took := time.Since(began); took != modesLimit {
			t.Errorf("it took %s", took)
		}
		// The time was up, which keeps nothing from being said.
		if said := (&node{client: d.client.(*fake.Clientset)}).said(t, "Node", "node"); len(said) != 1 || !strings.HasPrefix(said[0], "MIGModeStays: ") {
			t.Errorf("Events: %q", said)
		}
	})
}

func TestLeavingOpensNoHardwareThatWasLetGoOf(t *testing.T) {
	hardware := &modeHardware{turnOff: busy, off: map[device.PCIAddress]bool{}}
	d := markedDriver(t, hardware)
	d.release.readiness = newReadiness(always{}, func() {})
	d.release.change("the driver is changed")
	hardware.turnOff = func(context.Context, device.Card) error { t.Error("it was opened"); return nil }
	d.modesOff(t.Context())
}

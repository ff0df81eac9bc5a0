package driver

import (
	"context"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// modeHardware fakes GPUs in MIG mode without MIG instances. If the function switchOff returns an
// error for a GPU, that GPU stays in MIG mode.
type modeHardware struct {
	steps.Partitions
	switchOff func(context.Context, device.Card) error

	mu  sync.Mutex
	off map[device.PCIAddress]bool
}

func (h *modeHardware) Look(_ context.Context, c device.Card) (device.CardState, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return device.CardState{MIG: device.MIG{Enabled: !h.off[c.PCIAddress]}}, nil
}

func (h *modeHardware) SetMode(ctx context.Context, c device.Card, on bool) (device.CardState, error) {
	if err := h.switchOff(ctx, c); err != nil || on {
		return device.CardState{}, err
	}
	h.mu.Lock()
	h.off[c.PCIAddress] = true
	h.mu.Unlock()
	return h.Look(ctx, c)
}

func (h *modeHardware) switchedOff() []device.PCIAddress {
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

const busyGPU, idleGPU device.PCIAddress = "0000:1b:00.0", "0000:43:00.0"

// failIfBusy is used as modeHardware's function switchOff. For busyGPU it returns the error of a
// GPU that a process has open.
func failIfBusy(_ context.Context, c device.Card) error {
	if c.PCIAddress != busyGPU {
		return nil
	}
	return &cut.Error{
		Op: "switch off MIG mode", Code: device.FailureInUse, Message: "in use",
		Processes: []nvidia.Process{{PID: 7, Name: "dcgm"}},
	}
}

// markMIGModes records in stateDir that the driver switched on MIG mode on both GPUs during the
// boot with the ID bootID.
func markMIGModes(t *testing.T, stateDir, bootID string) *checkpoint.Store {
	t.Helper()
	records, err := checkpoint.Open(stateDir, durable.OS{})
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

func TestUninstallSwitchesMIGModesOff(t *testing.T) {
	for _, boot := range []string{"this", "earlier"} {
		t.Run(boot, func(t *testing.T) {
			n := newNode(t)
			n.cfg.MIGPolicy = "dynamic" // with other policies the running plugin switches MIG mode off
			hardware := &modeHardware{switchOff: failIfBusy, off: map[device.PCIAddress]bool{}}
			n.partitions = hardware
			n.setHardware("driver", inMIGMode)
			id, err := durable.BootID(n.cfg.ProcRoot)
			if err != nil {
				t.Fatal(err)
			}
			if boot != "this" {
				id = boot
			}
			markMIGModes(t, n.cfg.StateDir(), id)
			n.start(t)
			n.register(t)
			eventually(t, "the GPUs are known", func() bool { return n.probe.isReady(t.Context()) == nil })
			if off := hardware.switchedOff(); len(off) > 0 {
				t.Fatalf("switched off before the uninstall: %q", off)
			}
			if err := n.client.AppsV1().DaemonSets("gpu").Delete(t.Context(), "plugin", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			if err := n.stop(); err != nil {
				t.Fatal(err)
			}
			var want []device.PCIAddress
			var parts []string
			if boot == "this" {
				want = []device.PCIAddress{idleGPU}
				parts = []string{"gpu-0000-1b-00-0", "dcgm", "nvidia-smi -i ADDRESS -mig 0"}
			}
			if off := hardware.switchedOff(); !slices.Equal(off, want) {
				t.Errorf("switched off: %q, want %q", off, want)
			}
			events := slices.DeleteFunc(n.events(t, "Node", "node"), func(e string) bool { return !strings.HasPrefix(e, "MIGModeStays: ") })
			if len(events) != min(len(parts), 1) {
				t.Fatalf("Events at exit: %q", events)
			}
			for _, part := range parts {
				if !strings.Contains(events[0], part) || strings.Contains(events[0], "gpu-0000-43-00-0") {
					t.Errorf("%q does not name %q alone", events[0], part)
				}
			}
			if _, err := os.Stat(n.cfg.PluginDir); !os.IsNotExist(err) {
				t.Errorf("the plugin directory still exists: %v", err)
			}
			if files := n.cdiFiles(t); len(files) > 0 {
				t.Errorf("CDI files: %v", files)
			}
		})
	}
}

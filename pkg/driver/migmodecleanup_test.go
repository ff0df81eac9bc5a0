package driver

import (
	"context"
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
	"github.com/gpu-dra-driver/gpu-dra-driver/test/migmodel"
)

// modeHardware is GPUs in MIG mode without MIG instances. A process has the GPU busyGPU open.
type modeHardware struct {
	migmodel.Partitions
	mu   sync.Mutex
	gpus []*migmodel.GPU
}

func newModeHardware(t *testing.T) *modeHardware {
	t.Helper()
	n, err := inMIGMode()
	if err != nil {
		t.Fatal(err)
	}
	h := &modeHardware{}
	for _, g := range n.GPUs {
		gpu := migmodel.New(migmodel.H100(), g.Card(), g.Minor)
		gpu.Enabled = true
		if g.PCIAddress == busyGPU {
			gpu.Open = []nvidia.Process{{PID: 7, Name: "dcgm"}}
		}
		h.gpus = append(h.gpus, gpu)
	}
	h.Call = func(_ context.Context, _ migmodel.Op, _ string, c device.Card, effect func(*migmodel.GPU) error) error {
		h.mu.Lock()
		defer h.mu.Unlock()
		g, err := migmodel.Find(h.gpus, c)
		if err != nil {
			return err
		}
		return effect(g)
	}
	return h
}

func (h *modeHardware) switchedOff() (off []device.PCIAddress) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, g := range h.gpus {
		if !g.Enabled {
			off = append(off, g.PCIAddress)
		}
	}
	return off
}

func inMIGMode() (nvidia.Node, error) {
	n, err := twoGPUs()
	for i := range n.GPUs {
		n.GPUs[i].MIG = &device.MIG{Enabled: true}
	}
	return n, err
}

const busyGPU, idleGPU device.PCIAddress = "0000:1b:00.0", "0000:43:00.0"

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
			n.cfg.Settings.MIG.Policy = device.PolicyDynamic // with other policies the running plugin switches MIG mode off
			hardware := newModeHardware(t)
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

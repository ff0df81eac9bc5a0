package health

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// lend lets a claim have the GPU for a virtual machine for an hour. Afterwards a scan finds back.
func (w *testMonitor) lend(back device.GPU) {
	w.Lend(map[device.PCIAddress]bool{address: true}, w.now)
	w.Expect([]device.GPU{gpu}, w.now) // the GPU is not bound yet
	w.advance(time.Second)
	w.Leave([]device.PCIAddress{address})
	w.advance(time.Hour)
	w.Lend(nil, w.now)
	w.Expect([]device.GPU{back}, w.now)
	w.Apply(device.Signal{Condition: &device.Condition{Card: back.Card(), Reach: device.ReachOK, At: w.now}}, w.now)
}

// asFound is the GPU before and, unless a virtual machine changes it, after a claim.
func asFound() device.GPU {
	g := gpu
	g.MIG = &device.MIG{Profiles: gpu.MIG.Profiles}
	g.Firmware = &device.Firmware{VBIOS: "96.00.74", ECC: "enabled"}
	return g
}

func TestGPUThatAVirtualMachineChangedIsUnhealthy(t *testing.T) {
	before := gpu
	defer func() { gpu = before }()
	gpu.Firmware = asFound().Firmware
	for _, c := range []struct {
		what string
		by   func(*device.GPU)
		code string // of the finding, or empty
		says string
	}{
		{"nothing", func(*device.GPU) {}, "", ""},
		{"unknown values", func(g *device.GPU) { g.Firmware = nil }, "", ""},
		{"VBIOS", func(g *device.GPU) { g.Firmware.VBIOS = "96.00.75" }, "changed-vbios", "VBIOS 96.00.75 instead of 96.00.74"},
		{"ECC", func(g *device.GPU) { g.Firmware.ECC = "disabled" }, "changed-ecc", "ECC mode disabled instead of enabled"},
		{"MIG mode", func(g *device.GPU) { g.MIG.Enabled = true }, "changed-mig", "MIG mode enabled instead of disabled"},
		{"MIG mode after a reset", func(g *device.GPU) { g.MIG.Pending = true }, "changed-mig", "MIG mode enabled instead of disabled"},
		{"another card", func(g *device.GPU) { g.UUID = "GPU-2" }, "changed-uuid", "UUID GPU-2 instead of GPU-1"},
	} {
		w := newTestMonitor(t, nil)
		back := asFound()
		c.by(&back)
		w.lend(back)
		v := w.View().Of(back, device.Name{GPU: gpuName})
		if c.code == "" {
			if v.State != Healthy {
				t.Errorf("%s: %s", c.what, v.Message())
			}
			continue
		}
		if v.State != Unhealthy || v.Causes[0].Code != c.code || !strings.Contains(v.Message(), c.says) {
			t.Errorf("%s: %s, %q, want %s, %q", c.what, v.State, v.Message(), c.code, c.says)
		}
	}
}

func TestChangedGPUStaysUnhealthyUntilItIsRestoredOrAccepted(t *testing.T) {
	before := gpu
	defer func() { gpu = before }()
	gpu.Firmware = asFound().Firmware
	changed := asFound()
	changed.Firmware.VBIOS = "96.00.75"
	end := map[string]func(w *testMonitor, s Store){
		"restored": func(w *testMonitor, _ Store) { w.Expect([]device.GPU{asFound()}, w.now) },
		"accepted": func(w *testMonitor, _ Store) {
			w.Clear(gpuName, "cleared by an admin", w.now)
			w.Expect([]device.GPU{changed}, w.now)
		},
	}
	for _, how := range slices.Sorted(maps.Keys(end)) {
		s, _ := newStore()
		w := newTestMonitor(t, nil)
		w.lend(changed)
		w.answerCounters(0, 100)
		w.answerCounters(0, 1) // a reset
		w.wantState(gpuName, Unhealthy)
		w = w.restart(s, nil)
		w.wantState(gpuName, Unhealthy)
		s.BootID = "boot-2"
		m := New(nil, w.now)
		if err := s.Load(m, w.now); err != nil {
			t.Fatal(err)
		}
		w.Monitor = m
		w.Expect([]device.GPU{changed}, w.now)
		w.wantState(gpuName, Unhealthy)
		end[how](w, s)
		w.wantState(gpuName, Healthy)
		w.Expect([]device.GPU{changed}, w.now) // by an admin
		w.wantState(gpuName, Healthy)
	}
}

func TestGPUChangedWhileNoVirtualMachineHasItIsHealthy(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.Expect([]device.GPU{asFound()}, w.now)
	changed := asFound()
	changed.Firmware.VBIOS, changed.MIG.Enabled = "96.00.75", true
	w.Leave([]device.PCIAddress{address}) // an admin bound it
	w.Expect([]device.GPU{changed}, w.now)
	w.wantState(gpuName, Healthy)
}

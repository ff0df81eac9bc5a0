// A claim for a virtual machine has the whole GPU, bound to VFIO. Afterwards the GPU is as before.

package prepare_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/busmodel"
)

const vfio0 = gpu0 + "-vfio"

// withBus adds a PCI bus to the node, on which every GPU has an audio function.
func withBus(w *world) *busmodel.Bus {
	bus := &busmodel.Bus{Drivers: []string{"nvidia", "snd_hda_intel", busmodel.VFIO}}
	for i := range w.snapshot.Node.GPUs {
		g := &w.snapshot.Node.GPUs[i]
		g.Passthrough = &device.Passthrough{VendorID: 0x10de}
		audio := device.PCIAddress(strings.TrimSuffix(string(g.PCIAddress), "0") + "1")
		bus.Functions = append(bus.Functions,
			&busmodel.Function{Address: g.PCIAddress, Driver: "nvidia", Native: "nvidia", Display: true},
			&busmodel.Function{Address: audio, Driver: "snd_hda_intel", Native: "snd_hda_intel"})
	}
	w.bus = bus
	return bus
}

// leaves lets a scan find that NVIDIA's driver does not have the GPU.
func (w *world) leaves(g *nvidia.GPU) {
	away := g.GPU
	away.UUID = ""
	w.snapshot.Node.Passthrough = append(w.snapshot.Node.Passthrough, away)
	w.snapshot.Node.GPUs = slices.DeleteFunc(slices.Clone(w.snapshot.Node.GPUs), func(o nvidia.GPU) bool {
		return o.PCIAddress == away.PCIAddress
	})
}

func drivers(b *busmodel.Bus) (all []string) {
	for _, f := range b.Functions[:2] { // those of the first GPU
		all = append(all, strings.TrimSpace(f.Driver+" "+f.Override))
	}
	return all
}

var (
	atHome = []string{"nvidia", "snd_hda_intel"}
	away   = []string{"vfio-pci vfio-pci", "vfio-pci vfio-pci"}
)

// only limits the claim's configuration to request r, so that it cannot be skipped.
func only(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	c.Status.Allocation.Devices.Config[0].Requests = []string{"r"}
	return c
}

func vfioConfig(c *resourceapi.ResourceClaim, iommu string) *resourceapi.ResourceClaim {
	return configured(c, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"VfioDeviceConfig","iommu":`+iommu+`}`)
}

func TestVirtualMachineGetsVFIONodesAlone(t *testing.T) {
	for _, c := range []struct {
		iommu string // of the configuration, empty without one
		want  string // device nodes
	}{
		{"", `[{"path":"/dev/vfio/0000:1b:00.0"}]`},
		{`{"backendPolicy":"LegacyOnly"}`, `[{"path":"/dev/vfio/0000:1b:00.0"}]`},
		{`{"enableAPIDevice":true}`, `[{"path":"/dev/vfio/0000:1b:00.0"},{"path":"/dev/vfio/vfio"}]`},
		{`{"backendPolicy":"PreferIommuFD"}`, `[{"path":"/dev/vfio/devices/0000:1b:00.0"}]`},
		{`{"backendPolicy":"PreferIommuFD","enableAPIDevice":true}`,
			`[{"path":"/dev/vfio/devices/0000:1b:00.0"},{"path":"/dev/iommu"}]`},
	} {
		w := newWorld(t)
		w.metadata = true
		bus := withBus(w)
		p := w.plugin(t)
		claim := newClaim("c", allocated("r", vfio0))
		if c.iommu != "" {
			claim = vfioConfig(claim, c.iommu)
		}
		got := mustPrepare(t, p, claim)
		wantIDs := []string{"k8s.gpu.nvidia.com/claim=uid-c-" + vfio0, "k8s.gpu.nvidia.com/claim=uid-c-metadata-r"}
		if ids := got[0].CDIDeviceIDs; !slices.Equal(ids, wantIDs) {
			t.Errorf("%s: CDI devices %q", c.iommu, ids)
		}
		want := `"containerEdits":{"env":["NVIDIA_VISIBLE_DEVICES=void"],"deviceNodes":` + c.want + `}`
		if spec := w.specs.of("uid-c"); !strings.Contains(spec, want) || w.specs.base != "" {
			t.Errorf("%s: spec %s, base %q, want %s", c.iommu, spec, w.specs.base, want)
		}
		_, each := described(w, "uid-c", "r")
		if *each[0][device.AttrPCIBusID].StringValue != "0000:1b:00.0" || *each[0]["type"].StringValue != "vfio" {
			t.Errorf("%s: metadata %v", c.iommu, each)
		}
		if !slices.Equal(drivers(bus), away) {
			t.Errorf("%s: bound to %q", c.iommu, drivers(bus))
		}
		if err := p.Unprepare(t.Context(), "uid-c"); err != nil || !slices.Equal(drivers(bus), atHome) || len(w.records()) != 0 {
			t.Errorf("%s: afterwards %q, %q, %v", c.iommu, drivers(bus), w.records(), err)
		}
	}
}

// NVIDIA's driver, loaded while a virtual machine has the GPU, does not take it from VFIO. At the
// end of the claim the driver gets it, however the claim ends, also if the plugin was restarted.
func TestGPUGoesToTheDriverThatWasLoadedMeanwhile(t *testing.T) {
	for _, failed := range []busmodel.Op{"", busmodel.Override, busmodel.Unbind, busmodel.Probe} {
		w := newWorld(t)
		bus := withBus(w)
		bus.Unload("nvidia")
		w.snapshot.Node.GPUs[0].UUID = "" // no scan has seen it
		w.leaves(&w.snapshot.Node.GPUs[0])
		w.snapshot.Node.GPUs = append(w.snapshot.Node.GPUs, nvidia.GPU{GPU: w.snapshot.Node.Passthrough[0]})
		mustPrepare(t, w.plugin(t), newClaim("c", allocated("r", vfio0)))
		bus.Load("nvidia")
		if !slices.Equal(drivers(bus), away) {
			t.Fatalf("loading a driver took %q", drivers(bus))
		}
		p := w.plugin(t) // a restart
		if failed != "" {
			bus.Write = func(op busmodel.Op, effect func() error) error {
				if op == failed {
					bus.Write = nil
					return errors.New("killed")
				}
				return effect()
			}
			if err := p.Unprepare(t.Context(), "uid-c"); err == nil {
				t.Errorf("no %q failed", failed)
			}
			p = w.plugin(t)
			if err := p.Reconcile(t.Context()); err != nil {
				t.Errorf("%q: %v", failed, err)
			}
		}
		if err := p.Unprepare(t.Context(), "uid-c"); err != nil || !slices.Equal(drivers(bus), atHome) || len(w.records()) != 0 {
			t.Errorf("%q: %q, %v", failed, drivers(bus), err)
		}
	}
}

// A scan opens every GPU that NVIDIA's driver has, so no scan may run between the claim's GPUs. The
// record stays until the inventory shows the GPUs, because another claim may wait for its removal.
func TestUnprepareWaitsForOneScanAfterAllGPUsAreBack(t *testing.T) {
	w := newWorld(t)
	withBus(w)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", allocated("r", vfio0), allocated("r", gpu1+"-vfio")))
	if len(w.rescans) != 0 {
		t.Errorf("preparing scans %d times", len(w.rescans))
	}
	if err := p.Unprepare(t.Context(), "uid-c"); err != nil {
		t.Fatal(err)
	}
	if want := []string{fmt.Sprint(1, atHome)}; !slices.Equal(w.rescans, want) {
		t.Errorf("scans with records and drivers %q, want %q", w.rescans, want)
	}
	mustPrepare(t, p, newClaim("d", allocated("r", gpu0)))
	if err := p.Unprepare(t.Context(), "uid-d"); err != nil || len(w.rescans) != 1 {
		t.Errorf("%v, %d scans", err, len(w.rescans))
	}
}

func TestPreparedPassthroughIsKept(t *testing.T) {
	w := newWorld(t)
	bus := withBus(w)
	c := newClaim("c", allocated("r", vfio0))
	mustPrepare(t, w.plugin(t), c)
	writes := 0
	bus.Write = func(_ busmodel.Op, effect func() error) error { writes++; return effect() }
	// NVIDIA's driver no longer has the card, and the node may have no such driver any more.
	w.leaves(&w.snapshot.Node.GPUs[0])
	w.snapshot.Ready = false
	spec := w.specs.of("uid-c")
	w.specs.clear()
	p := w.plugin(t)
	if err := p.Reconcile(t.Context()); err != nil || w.specs.of("uid-c") != spec {
		t.Errorf("recovered spec %s, %v, want %s", w.specs.of("uid-c"), err, spec)
	}
	mustPrepare(t, p, c)
	if err := p.Reconcile(t.Context()); err != nil || writes > 0 || !slices.Equal(drivers(bus), away) {
		t.Errorf("%d writes, %q, %v", writes, drivers(bus), err)
	}
	// The API device is another edit, and no reason to touch the card.
	mustPrepare(t, p, vfioConfig(c, `{"enableAPIDevice":true}`))
	if spec := w.specs.of("uid-c"); writes > 0 || !strings.Contains(spec, "/dev/vfio/vfio") {
		t.Errorf("%d writes, spec %s", writes, spec)
	}
	w.snapshot.Node.Passthrough[0].UUID = "GPU-other"
	if _, err := p.Prepare(t.Context(), c); err == nil || !strings.Contains(err.Error(), "the card was replaced") {
		t.Error(err)
	}
}

func TestPassthroughIsBoundAnewAfterAReboot(t *testing.T) {
	w := newWorld(t)
	bus := withBus(w)
	c := newClaim("c", allocated("r", vfio0))
	mustPrepare(t, w.plugin(t), c)
	w.reboot()
	for _, f := range bus.Functions {
		f.Driver, f.Override = f.Native, ""
	}
	p := w.plugin(t)
	mustPrepare(t, p, c)
	if !slices.Equal(drivers(bus), away) {
		t.Errorf("bound to %q", drivers(bus))
	}
	w.reboot()
	for _, f := range bus.Functions {
		f.Driver, f.Override = "other", "other" // an admin's, of this boot
	}
	if err := w.plugin(t).Unprepare(t.Context(), "uid-c"); err != nil || bus.Functions[0].Driver != "other" {
		t.Errorf("%q, %v", drivers(bus), err)
	}
}

func TestGPUThatAnAdminBoundIsNeverRebound(t *testing.T) {
	w := newWorld(t)
	bus := withBus(w)
	for _, f := range bus.Functions[:2] {
		f.Driver, f.Override = busmodel.VFIO, busmodel.VFIO
	}
	bus.Write = func(op busmodel.Op, _ func() error) error { t.Errorf("wrote: %s", op); return nil }
	w.snapshot.Node.GPUs[0].Passthrough.BoundByAdmin = true
	w.leaves(&w.snapshot.Node.GPUs[0])
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", allocated("r", vfio0)))
	if spec := w.specs.of("uid-c"); !strings.Contains(spec, `"/dev/vfio/0000:1b:00.0"`) {
		t.Error(spec)
	}
	if err := p.Unprepare(t.Context(), "uid-c"); err != nil {
		t.Error(err)
	}
	if _, err := p.Prepare(t.Context(), newClaim("d", allocated("r", gpu0))); cause.Of(err) != cause.Device {
		t.Errorf("a whole GPU without NVIDIA's driver: %v", err)
	}
}

// Two GPUs in one IOMMU group go to the same virtual machine. A claim that was allocated one of
// them earlier, or before the other was plugged in, gets neither, and its end touches neither.
func TestGPUsOfOneIOMMUGroupAreNotPrepared(t *testing.T) {
	for name, driver := range map[string]string{"NVIDIA's driver": "nvidia", "no driver": "", "bound by an admin": busmodel.VFIO} {
		w := newWorld(t)
		bus := withBus(w)
		for i, f := range []*busmodel.Function{bus.Functions[0], bus.Functions[2]} {
			f.Driver, f.Group = driver, 7
			w.snapshot.Node.GPUs[i].Passthrough.BoundByAdmin = driver == busmodel.VFIO
		}
		bus.Write = func(op busmodel.Op, _ func() error) error { t.Errorf("%s: wrote: %s", name, op); return nil }
		p := w.plugin(t)
		for claim, gpu := range map[string]string{"a": gpu0, "b": gpu1} {
			if _, err := p.Prepare(t.Context(), newClaim(claim, allocated("r", gpu+"-vfio"))); err == nil ||
				!strings.Contains(err.Error(), "another display controller") {
				t.Errorf("%s: %s: %v", name, gpu, err)
			}
		}
		for _, claim := range []types.UID{"uid-a", "uid-b"} {
			if err := p.Unprepare(t.Context(), claim); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if len(w.records()) != 0 {
			t.Errorf("%s: records %q", name, w.records())
		}
	}
}

// A record may name another GPU as a companion, which meanwhile belongs to another claim.
func TestEndOfAClaimLeavesOtherGPUsBound(t *testing.T) {
	w := newWorld(t)
	bus := withBus(w)
	bus.Functions[2].Display = false // as a driver that did not know better
	bus.Functions[0].Group, bus.Functions[2].Group = 7, 7
	bus.Functions[2].Driver = ""
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", allocated("r", vfio0)))
	bus.Functions[2].Display = true
	err := p.Unprepare(t.Context(), "uid-c")
	if err != nil || !slices.Equal(drivers(bus), atHome) || bus.Functions[2].Driver != busmodel.VFIO {
		t.Errorf("%q, the other GPU has %q, %v", drivers(bus), bus.Functions[2].Driver, err)
	}
}

func TestRefusedPassthrough(t *testing.T) {
	gpuConfig := `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"}`
	plain := newClaim("c", allocated("r", vfio0))
	impossible := func(w *world) { w.snapshot.Node.GPUs[0].Passthrough = nil }
	used := func(w *world) { w.bus.Functions[0].Used = true }
	for name, c := range map[string]struct {
		claim  *resourceapi.ResourceClaim
		before func(*world)
		want   string
		cause  cause.Cause
	}{
		"admin access":      {newClaim("c", admin("r", vfio0)), nil, "admin access", cause.Claim},
		"not possible":      {plain, impossible, "cannot be passed", cause.Device},
		"another kind":      {only(configured(newClaim("c", allocated("r", vfio0)), gpuConfig)), nil, "needs a VfioDeviceConfig", cause.Claim},
		"another device":    {only(vfioConfig(newClaim("c", allocated("r", gpu0)), `{}`)), nil, "is a VfioDeviceConfig", cause.Claim},
		"used by a process": {plain, used, "python (process 77)", cause.Held},
		"twice":             {newClaim("c", allocated("r", vfio0), allocated("s", gpu0)), nil, "cannot exist at the same time", cause.Claim},
	} {
		w := newWorld(t)
		bus := withBus(w)
		if c.before != nil {
			c.before(w)
		}
		_, err := w.plugin(t).Prepare(t.Context(), c.claim)
		if err == nil || !strings.Contains(err.Error(), c.want) || cause.Of(err) != c.cause {
			t.Errorf("%s: %v (%s), want %q", name, err, cause.Of(err), c.want)
		}
		if !slices.Equal(drivers(bus), atHome) || len(w.records()) != 0 {
			t.Errorf("%s: %q, records %q", name, drivers(bus), w.records())
		}
	}
}

// The node view adds such GPUs to the others.
func TestGPUWithoutNVIDIADriverIsForVirtualMachinesOnly(t *testing.T) {
	w := newWorld(t)
	bus := withBus(w)
	w.snapshot.Node.GPUs[0].UUID, w.snapshot.Node.GPUs[0].Edits.DeviceNodes = "", nil
	p := w.plugin(t)
	for _, r := range []result{allocated("r", gpu0), admin("r", gpu0)} {
		_, err := p.Prepare(t.Context(), newClaim("c", r))
		if cause.Of(err) != cause.Device || !strings.Contains(err.Error(), "only virtual machines") {
			t.Error(err)
		}
	}
	mustPrepare(t, p, newClaim("d", allocated("r", vfio0)))
	if !slices.Equal(drivers(bus), away) {
		t.Errorf("bound to %q", drivers(bus))
	}
}

// An admin's claim takes nothing, so a virtual machine may get one of its GPUs. The node view lists
// that GPU without device nodes then, and its number may be another GPU's.
func TestAdminAccessLosesAGPUToAVirtualMachine(t *testing.T) {
	w := newWorld(t)
	withBus(w)
	p := w.plugin(t)
	c := newClaim("c", admin("r", gpu0), admin("s", gpu1))
	mustPrepare(t, p, c)
	spec := w.specs.of("uid-c")
	listed := w.snapshot.Node.GPUs
	mustPrepare(t, p, newClaim("d", allocated("r", vfio0)))
	w.bindings = map[device.PCIAddress]string{"0000:1b:00.0": "vfio"}
	w.snapshot.Node.GPUs = slices.Clone(listed)
	w.snapshot.Node.GPUs[0].Edits.DeviceNodes = nil
	passes(t, p)
	if now := w.specs.of("uid-c"); strings.Contains(now, "/dev/nvidia0") || !strings.Contains(now, "/dev/nvidia1") {
		t.Errorf("while a virtual machine has the GPU: %s", now)
	}
	if _, err := p.Prepare(t.Context(), c); cause.Of(err) != cause.Device {
		t.Error(err)
	}
	mustUnprepare(t, p, "uid-d")
	w.bindings["0000:1b:00.0"], w.snapshot.Node.GPUs = "", listed
	passes(t, p)
	if now := w.specs.of("uid-c"); now != spec {
		t.Errorf("after it: %s, want %s", now, spec)
	}
}

func TestPassthroughAndOtherShapesExcludeEachOther(t *testing.T) {
	w := newWorld(t)
	withBus(w)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", allocated("r", vfio0)))
	if _, err := p.Prepare(t.Context(), newClaim("d", allocated("r", gpu0))); cause.Of(err) != cause.Held {
		t.Error(err)
	}
	mustPrepare(t, p, newClaim("e", allocated("r", gpu1)))
	if _, err := p.Prepare(t.Context(), newClaim("f", allocated("r", gpu1+"-vfio"))); cause.Of(err) != cause.Held {
		t.Error(err)
	}
}

func TestMIGModeIsOffBeforeTheGPULeaves(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	h.of(t, gpu0).Enabled = true
	w.scan()
	bus := withBus(w)
	bus.Write = func(_ busmodel.Op, effect func() error) error {
		if h.of(t, gpu0).Enabled {
			t.Error("the GPU is still in MIG mode")
		}
		return effect()
	}
	c := newClaim("c", allocated("r", vfio0))
	p := w.plugin(t)
	mustPrepare(t, p, c)
	h.takeCalls()
	mustPrepare(t, p, c) // the inventory still has the mode, but the card cannot be read
	if calls := h.takeCalls(); len(calls) > 0 {
		t.Errorf("asked NVIDIA's driver: %q", calls)
	}
}

// TestPassthroughSurvivesDeath kills the plugin before and after each write to the bus, and fails
// each write. Whatever happened, the claim can then be prepared, and unprepared.
func TestPassthroughSurvivesDeath(t *testing.T) {
	failed := errors.New("failed")
	for _, unprepare := range []bool{false, true} {
		for _, fault := range []string{"kill before", "kill after", "error", "no effect"} {
			for at := 1; ; at++ {
				name := fmt.Sprintf("unprepare: %v, %s at write %d", unprepare, fault, at)
				w := newWorld(t)
				bus := withBus(w)
				bus.Functions[0].Override = "nvidia"
				p := w.plugin(t)
				c := newClaim("c", allocated("r", vfio0))
				if unprepare {
					mustPrepare(t, p, c)
				}
				n, dead := 0, false
				bus.Write = func(_ busmodel.Op, effect func() error) error {
					n++
					switch {
					case dead:
						return failed
					case n != at:
						return effect()
					case fault == "no effect":
						return nil
					case fault == "kill after":
						_ = effect()
					}
					if fault != "error" {
						dead = true
						w.disk.StopAt(1)
					}
					return failed
				}
				if unprepare {
					_ = p.Unprepare(t.Context(), "uid-c")
				} else {
					_, _ = p.Prepare(t.Context(), c)
				}
				bus.Write = nil
				w.disk.Restart()
				p = w.plugin(t)
				if err := p.Reconcile(t.Context()); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				mustPrepare(t, p, c)
				if !slices.Equal(drivers(bus), away) {
					t.Errorf("%s: prepared as %q", name, drivers(bus))
				}
				if err := p.Unprepare(t.Context(), "uid-c"); err != nil || !slices.Equal(drivers(bus), []string{"nvidia nvidia", "snd_hda_intel"}) {
					t.Errorf("%s: left as %q, %v", name, drivers(bus), err)
				}
				if n < at {
					break
				}
			}
		}
	}
}

// Nothing tells to which driver the GPU of a lost record belongs, so an admin must know.
func TestLostRecordLeavesTheGPUOnVFIOAndSaysSo(t *testing.T) {
	w := newWorld(t)
	bus := withBus(w)
	mustPrepare(t, w.plugin(t), newClaim("c", allocated("r", vfio0)))
	w.disk.Put(recordFile(t, w, "uid-c"), []byte("{"))
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	if err := w.plugin(t).Unprepare(klog.NewContext(t.Context(), logger), "uid-c"); err != nil || !slices.Equal(drivers(bus), away) {
		t.Errorf("bound to %q, %v", drivers(bus), err)
	}
	said := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	if !strings.Contains(said, vfio0) || !strings.Contains(said, "driver_override") {
		t.Error(said)
	}
}

var _ steps.Binder = busmodel.Binder{}

package prepare_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/reconcile"
)

const (
	small0   = gpu0 + "-mig-19-0" // 1g.10gb at 0
	small1   = gpu0 + "-mig-19-1"
	large4   = gpu0 + "-mig-9-4" // 3g.40gb at 4
	large0   = gpu0 + "-mig-9-0"
	neighbor = gpu1 + "-mig-19-6"
	nothing  = ""
)

func TestPartitionIsCreatedAndRemovedWithItsClaim(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	got := mustPrepare(t, p, newClaim("c", allocated("r", large4)))
	if want := "k8s.gpu.nvidia.com/claim=uid-c-" + large4; got[0].CDIDeviceIDs[1] != want || got[0].DeviceName != large4 {
		t.Errorf("%+v", got)
	}
	in := h.of(t, gpu0).state().MIG.Instances
	if len(in) != 1 || in[0].ProfileID != 9 || in[0].Placement != (device.Placement{Start: 4, Size: 4}) || len(in[0].Compute) != 1 {
		t.Fatalf("the GPU has instances %+v", in)
	}
	for _, want := range []string{"/dev/nvidia0", "nvidia-cap10", "nvidia-cap11"} {
		if spec := w.specs.of("uid-c"); !strings.Contains(spec, want) {
			t.Errorf("the spec %s has no %s", spec, want)
		}
	}
	r, _, err := p.Records.Load("uid-c")
	if err != nil || r.Devices[0].MIGUUID != in[0].Compute[0].UUID {
		t.Errorf("%+v, %v", r.Devices, err)
	}
	if held, err := p.Usage(); err != nil || held != (ledger.Usage{Claims: 1, GPUs: 1, Partitions: 1}) {
		t.Error(held, err)
	}
	mustUnprepare(t, p, "uid-c")
	checkClean(t, w)
	if s := h.of(t, gpu0); len(s.instances) != 0 || !s.on {
		t.Errorf("left: %+v", s.state())
	}
}

func TestClaimWithSeveralPartitions(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	got := mustPrepare(t, p, newClaim("many", allocated("a", small0), allocated("b", large4), allocated("c", neighbor)))
	if len(got) != 3 {
		t.Error(got)
	}
	mustPrepare(t, p, newClaim("one", allocated("a", small1)))
	if n := len(h.of(t, gpu0).instances); n != 3 {
		t.Errorf("%s has %d instances", gpu0, n)
	}
	if spec := w.specs.of("uid-many"); strings.Count(spec, "nvidia-cap10") != 2 || !strings.Contains(spec, "nvidia-cap21") {
		t.Errorf("the spec is %s", spec)
	}
	if held, err := p.Usage(); err != nil || held != (ledger.Usage{Claims: 2, GPUs: 2, Partitions: 4}) {
		t.Error(held, err)
	}
	mustUnprepare(t, p, "uid-many")
	if in := h.of(t, gpu0).state().MIG.Instances; len(in) != 1 || in[0].Placement.Start != 1 {
		t.Errorf("another claim's instance is gone: %+v", in)
	}
	mustPrepare(t, p, newClaim("mixed", allocated("whole", gpu1), allocated("part", small0)))
	if h.of(t, gpu1).on {
		t.Error("a whole GPU is in MIG mode")
	}
}

func TestWholeGPUReadsHardwareOnlyIfMIGMayBeEnabled(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	c := newClaim("c", allocated("r", gpu0))
	mustPrepare(t, p, c)
	mustPrepare(t, p, c)
	mustUnprepare(t, p, "uid-c")
	if calls := h.takeCalls(); len(calls) != 0 {
		t.Errorf("hardware calls: %q", calls)
	}
	plain := writesOf(t, newWorld(t), c)
	if able := writesOf(t, w, c); able != plain {
		t.Errorf("%d writes, and %d where no GPU can be cut", able, plain)
	}

	mustPrepare(t, p, newClaim("part", allocated("r", small0)))
	mustUnprepare(t, p, "uid-part")
	h.takeCalls()
	// The inventory does not show that MIG mode is enabled. But a file on disk says that the driver
	// enabled it. So Prepare must read the hardware and disable the mode.
	mustPrepare(t, p, c)
	if calls := h.takeCalls(); !slices.Equal(calls, []string{"look", "set MIG mode false"}) || h.of(t, gpu0).on {
		t.Errorf("hardware calls: %q", calls)
	}
	r, _, err := p.Records.Load("uid-c")
	if err != nil || len(r.Steps) != 1 {
		t.Errorf("the previous version could not unprepare it: %+v, %v", r.Steps, err)
	}
	mustPrepare(t, p, c)
	mustUnprepare(t, p, "uid-c")
	mustPrepare(t, p, c)
	if calls := h.takeCalls(); len(calls) != 0 {
		t.Errorf("hardware calls although the mode is off: %q", calls)
	}
	mustUnprepare(t, p, "uid-c")

	// Now an admin has enabled MIG mode, and the inventory shows it. Prepare of the whole GPU must
	// disable it.
	h.of(t, gpu0).on = true
	w.scan()
	mustPrepare(t, p, c)
	if h.of(t, gpu0).on {
		t.Error("the GPU is in MIG mode")
	}
}

func writesOf(t *testing.T, w *world, c *resourceapi.ResourceClaim) int {
	t.Helper()
	p := w.plugin(t)
	w.disk.FailAt(1<<30, nil)
	mustPrepare(t, p, c)
	writes := w.disk.Writes()
	mustUnprepare(t, p, c.UID)
	return writes
}

func TestPartitionRefusals(t *testing.T) {
	share := `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"MPS"}}`
	for _, c := range []struct {
		name  string
		node  func(*testing.T, *world, *hardware)
		claim *resourceapi.ResourceClaim
		cause cause.Cause
		says  []string
	}{
		{"sharing", nil, configured(newClaim("c", allocated("r", small0)), share), cause.NotReady,
			[]string{"the claim needs MPS", "mps.enabled"}},
		{"two devices at one place", nil, newClaim("c", allocated("a", small0), allocated("b", large0)), cause.Claim,
			[]string{"requests a and b", small0, large0}},
		{"a GPU and its partition", nil, newClaim("c", allocated("a", gpu0), allocated("b", large0)), cause.Claim,
			[]string{"requests a and b", gpu0, large0}},
		{"an unknown profile", nil, newClaim("c", allocated("a", gpu0+"-mig-77-0")), cause.Device, []string{"profile 77"}},
		{"an invalid placement", nil, newClaim("c", allocated("a", gpu0+"-mig-9-1")), cause.Device, []string{"starts at 1"}},
		{"a missing GPU", nil, newClaim("c", allocated("a", "gpu-0000-ff-00-0-mig-9-0")), cause.Device,
			[]string{"not on this node", gpu0}},
		{"a mode that needs a reset", func(t *testing.T, w *world, h *hardware) {
			h.of(t, gpu0).fixed = true
			w.scan()
		}, newClaim("c", allocated("a", small0)), cause.Device, []string{small0, "only a GPU reset"}},
		{"a whole GPU whose mode needs a reset", func(t *testing.T, w *world, h *hardware) {
			h.of(t, gpu0).fixed, h.of(t, gpu0).on = true, true
			w.scan()
		}, newClaim("c", allocated("a", gpu0)), cause.Device, []string{gpu0, "only a GPU reset"}},
		{"a guest with read-only MIG", func(_ *testing.T, w *world, _ *hardware) {
			w.snapshot.Node.GPUs[0].MIG.ReadOnly = true
		}, newClaim("c", allocated("a", small0)), cause.Device, []string{small0, "cannot be changed"}},
		{"a GPU without MIG", func(_ *testing.T, w *world, _ *hardware) { w.snapshot.Node.GPUs[0].MIG = nil },
			newClaim("c", allocated("a", small0)), cause.Device, []string{"has no MIG"}},
		{"a GPU in use", func(t *testing.T, _ *world, h *hardware) {
			h.of(t, gpu0).open = []nvidia.Process{{PID: 4711, Name: "dcgm"}}
		}, newClaim("c", allocated("a", small0)), cause.Step, []string{small0, "dcgm", "4711"}},
		{"a whole GPU with foreign instances", func(t *testing.T, w *world, h *hardware) {
			h.createForeign(t, gpu0, 9, 4)
			w.scan()
		}, newClaim("c", allocated("a", gpu0)), cause.Device, []string{gpu0, "GPU instance 1", "4:4", "MIG-1"}},
		{"a taken place", func(t *testing.T, w *world, h *hardware) {
			h.createForeign(t, gpu0, 9, 0)
			w.scan()
		}, newClaim("c", allocated("a", small1)), cause.Device, []string{small1, "GPU instance 1", "0:4"}},
		{"a place taken since the last scan", func(t *testing.T, _ *world, h *hardware) {
			h.createForeign(t, gpu0, 19, 0)
		}, newClaim("c", allocated("a", small0)), cause.NotReady, []string{small0, "appeared", "GPU instance 1"}},
		{"admin access to a missing partition", nil, newClaim("c", admin("a", small0)), cause.Device,
			[]string{small0, "admin access does not create it"}},
		{"a compute instance of a missing partition", nil, newClaim("c", allocated("a", small0+"-ci-1")), cause.Device, []string{"is gone"}},
		{"a plugin without partitions", func(_ *testing.T, w *world, _ *hardware) { w.hardware = nil }, newClaim("c", allocated("a", small0)),
			cause.Step, []string{"whole GPUs only"}},
		{"a renumbered device node", func(t *testing.T, _ *world, h *hardware) { h.of(t, gpu0).minor = 5 },
			newClaim("c", allocated("a", small0)), cause.NotReady, []string{"/dev/nvidia5"}},
		{"a missing capability node", func(_ *testing.T, w *world, _ *hardware) {
			w.missing = map[string]error{"/dev/nvidia-caps/nvidia-cap11": errors.New("nvidia-cap11 is missing")}
		}, newClaim("c", allocated("a", small0)), cause.Device, []string{small0, "nvidia-cap11 is missing"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			h := withMIG(w)
			if c.node != nil {
				c.node(t, w, h)
			}
			before := len(h.of(t, gpu0).instances)
			_, err := w.plugin(t).Prepare(t.Context(), c.claim)
			if cause.Of(err) != c.cause {
				t.Fatalf("cause %q: %v", cause.Of(err), err)
			}
			for _, want := range append(c.says, "claim default/c") {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
			if len(err.Error()) > 1024 {
				t.Errorf("does not fit into an Event: %q", err)
			}
			checkClean(t, w)
			if after := len(h.of(t, gpu0).instances); after != before {
				t.Errorf("%d instances before, %d after", before, after)
			}
		})
	}
}

func TestConflictingDevicesAreRefusedByName(t *testing.T) {
	w := newWorld(t)
	withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("first", allocated("r", small0)))
	for _, want := range []string{gpu0, small0, large0} {
		_, err := p.Prepare(t.Context(), newClaim("second", allocated("r", want)))
		var held *prepare.InUseError
		if !errors.As(err, &held) || held.Conflict != small0 || !strings.Contains(err.Error(), "default/first") ||
			!strings.Contains(err.Error(), small0) {
			t.Errorf("%s: %v", want, err)
		}
	}
	mustPrepare(t, p, newClaim("second", allocated("r", small1), allocated("s", gpu1)))
	if _, err := p.Prepare(t.Context(), newClaim("third", allocated("r", neighbor))); cause.Of(err) != cause.Held ||
		!strings.Contains(err.Error(), "together with "+gpu1) {
		t.Error(err)
	}
}

func TestForeignInstanceIsUsedAndStays(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	theirs := h.createForeign(t, gpu0, 19, 0)
	w.scan()
	p := w.plugin(t)
	h.takeCalls()
	mustPrepare(t, p, newClaim("c", allocated("r", small0)))
	mustPrepare(t, p, newClaim("c", allocated("r", small0)))
	if r, _, err := p.Records.Load("uid-c"); err != nil || r.Devices[0].MIGUUID != theirs.Compute[0].UUID || len(r.Steps) != 1 {
		t.Errorf("%+v, %v", r, err)
	}
	if ours, err := p.OwnedInstances(gpu0, []device.Instance{theirs}); err != nil || len(ours) != 0 {
		t.Errorf("foreign instances taken for ours: %+v, %v", ours, err)
	}
	if err := p.Adopt(t.Context(), h.card(t, gpu0), gpu0); err != nil {
		t.Error(err)
	}
	mustUnprepare(t, p, "uid-c")
	checkClean(t, w)
	if len(h.of(t, gpu0).instances) != 1 {
		t.Fatal("the foreign instance was removed")
	}
	for _, call := range h.takeCalls() {
		if call != "look" {
			t.Errorf("hardware call %q", call)
		}
	}
	if err := p.Adopt(t.Context(), h.card(t, gpu0), gpu0); err != nil || len(h.of(t, gpu0).instances) != 0 {
		t.Errorf("after adoption: %v, %+v", err, h.of(t, gpu0).instances)
	}
}

func TestForeignComputeInstanceIsUsed(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	h.createForeign(t, gpu0, 9, 4)
	in := h.of(t, gpu0).instances[1]
	in.Compute = []device.ComputeInstance{{ID: 0, Name: "1c.3g.40gb", UUID: "MIG-a", Minor: 41},
		{ID: 1, Name: "2c.3g.40gb", UUID: "MIG-b", Minor: 42}}
	h.of(t, gpu0).instances[1] = in
	w.scan()
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", allocated("r", large4+"-ci-1")))
	if spec := w.specs.of("uid-c"); !strings.Contains(spec, "nvidia-cap42") || strings.Contains(spec, "nvidia-cap41") {
		t.Errorf("the spec is %s", spec)
	}
	mustPrepare(t, p, newClaim("d", allocated("r", large4+"-ci-0")))
	if _, err := p.Prepare(t.Context(), newClaim("e", allocated("r", large4))); cause.Of(err) != cause.Held {
		t.Error(err)
	}
	mustUnprepare(t, p, "uid-c")
	mustUnprepare(t, p, "uid-d")
	if _, err := p.Prepare(t.Context(), newClaim("e", allocated("r", large4))); cause.Of(err) != cause.Device ||
		!strings.Contains(err.Error(), "MIG-b") {
		t.Error(err)
	}
}

func TestAdminAccessNeverChangesPartitions(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("user", allocated("r", small0)))
	mustPrepare(t, p, newClaim("admin", admin("a", small0), admin("b", gpu0)))
	if spec := w.specs.of("uid-admin"); !strings.Contains(spec, "nvidia-cap11") {
		t.Errorf("the spec is %s", spec)
	}
	mustUnprepare(t, p, "uid-admin")
	if len(h.of(t, gpu0).instances) != 1 {
		t.Error("the foreign instance was removed")
	}
	mustPrepare(t, p, newClaim("admin", admin("a", small0)))
	mustUnprepare(t, p, "uid-user")
	w.scan()
	if lost := reconcile.LostDevices(p.Reconcile(t.Context())); len(lost) != 1 || lost[0].UID != "uid-admin" ||
		w.specs.of("uid-admin") != nothing {
		t.Errorf("%+v", lost)
	}
	mustUnprepare(t, p, "uid-admin")
	mustPrepare(t, p, newClaim("both", admin("a", small0), allocated("b", small0)))
	mustUnprepare(t, p, "uid-both")
	checkClean(t, w)
	if len(h.of(t, gpu0).instances) != 0 {
		t.Error("instances are left")
	}
}

func TestGPUInUseKeepsItsMIGMode(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("part", allocated("r", small0)))
	mustUnprepare(t, p, "uid-part")
	h.of(t, gpu0).open = []nvidia.Process{{PID: 4711, Name: "dcgm"}}
	c := newClaim("c", allocated("r", gpu0))
	if _, err := p.Prepare(t.Context(), c); cause.Of(err) != cause.Step || !strings.Contains(err.Error(), "dcgm") {
		t.Error(err)
	}
	checkClean(t, w)
	h.of(t, gpu0).open = nil
	mustPrepare(t, p, c)
	if h.of(t, gpu0).on {
		t.Error("the GPU is in MIG mode")
	}
}

func TestClaimWithMorePartitionsThanAFileNameFits(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	var results []result
	for _, gpu := range []string{gpu0, gpu1} {
		for start := range 6 {
			results = append(results, allocated(fmt.Sprint(gpu, start), fmt.Sprintf("%s-mig-19-%d", gpu, start)))
		}
	}
	mustPrepare(t, p, newClaim("large", results...))
	if r := w.records(); len(r) != 1 || r[0] != "uid-large_all.json" {
		t.Fatalf("the test needs another record: %q", r)
	}
	mustPrepare(t, p, newClaim("rest", allocated("r", neighbor)))
	if _, err := p.Prepare(t.Context(), newClaim("more", allocated("r", large4))); cause.Of(err) != cause.Held ||
		!strings.Contains(err.Error(), "-mig-19-4") {
		t.Error(err)
	}
	if held, err := p.Usage(); err != nil || held != (ledger.Usage{Claims: 2, GPUs: 2, Partitions: 13}) {
		t.Error(held, err)
	}
	ours, err := p.OwnedInstances(gpu1, h.of(t, gpu1).state().MIG.Instances)
	if err != nil || len(ours) != 7 {
		t.Errorf("%d are explained: %v", len(ours), err)
	}
	mustUnprepare(t, p, "uid-large")
	mustUnprepare(t, p, "uid-rest")
	checkClean(t, w)
}

func TestConcurrentClaimsOnOneGPU(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	claims := map[string]*resourceapi.ResourceClaim{}
	for _, gpu := range []string{gpu0, gpu1} {
		for start := range 7 {
			name := fmt.Sprintf("%s-%d", gpu, start)
			claims[name] = newClaim(name, allocated("r", fmt.Sprintf("%s-mig-19-%d", gpu, start)))
		}
	}
	var plugins []*plugin
	for range 2 { // as during an upgrade
		p := w.plugin(t)
		p.OnRead = func(_ context.Context, _, name string) (*resourceapi.ResourceClaim, error) { return claims[name], nil }
		plugins = append(plugins, p)
	}
	all := func(do func(*plugin, *resourceapi.ResourceClaim) error) {
		var wg sync.WaitGroup
		for _, p := range plugins {
			wg.Go(func() {
				if err := p.Reconcile(t.Context()); err != nil {
					t.Error(err)
				}
			})
			for _, c := range claims {
				wg.Go(func() {
					if err := do(p, c); err != nil {
						t.Error(err)
					}
				})
			}
		}
		wg.Wait()
	}
	all(func(p *plugin, c *resourceapi.ResourceClaim) error {
		_, err := p.Prepare(t.Context(), c)
		return err
	})
	for _, gpu := range []string{gpu0, gpu1} {
		if n := len(h.of(t, gpu).instances); n != 7 {
			t.Errorf("%s has %d instances", gpu, n)
		}
	}
	w.scan()
	checkRecordsMatchHardware(t, w, h, plugins[0], nil)
	all(func(p *plugin, c *resourceapi.ResourceClaim) error { return p.Unprepare(t.Context(), c.UID) })
	checkClean(t, w)
	for _, gpu := range []string{gpu0, gpu1} {
		if n := len(h.of(t, gpu).instances); n != 0 {
			t.Errorf("%s has %d instances", gpu, n)
		}
	}
}

// After a reboot an admin's tool may create its MIG instances only after the Pods start. Until then
// Prepare must return an error that the kubelet retries.
func TestPrepareWaitsForForeignInstanceAfterReboot(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	h.createForeign(t, gpu0, 19, 0)
	w.scan()
	c := newClaim("c", allocated("a", small0), allocated("b", neighbor))
	mustPrepare(t, w.plugin(t), c)
	w.reboot()
	p := w.plugin(t)
	for range 2 {
		if _, err := p.Prepare(t.Context(), c); cause.Of(err) != cause.NotReady || !strings.Contains(err.Error(), small0) ||
			!strings.Contains(err.Error(), "create it again") {
			t.Fatal(err)
		}
	}
	if n := len(h.of(t, gpu0).instances); n != 0 {
		t.Errorf("%d instances", n)
	}
	theirs := h.createForeign(t, gpu0, 19, 0)
	w.scan()
	mustPrepare(t, p, c)
	if ours, err := p.OwnedInstances(gpu0, []device.Instance{theirs}); err != nil || len(ours) != 0 {
		t.Errorf("foreign instances taken for ours: %v, %v", ours, err)
	}
	mustUnprepare(t, p, "uid-c")
	if len(h.of(t, gpu0).instances) != 1 || len(h.of(t, gpu1).instances) != 0 {
		t.Error("the foreign instance is gone, or ours is left")
	}
}

// A partition is created when its claim is prepared, removed with it, and created again when the
// hardware forgot it.

package prepare_test

import (
	"errors"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/reconcile"
)

func TestPartitionIsCreatedAndRemovedWithItsClaim(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	got := mustPrepare(t, p, newClaim("c", allocated("r", large4)))
	if want := "k8s.gpu.nvidia.com/claim=uid-c-" + large4; got[0].CDIDeviceIDs[1] != want || got[0].DeviceName != large4 {
		t.Errorf("%+v", got)
	}
	in := h.of(t, gpu0).State().MIG.Instances
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
	if s := h.of(t, gpu0); len(s.Instances) != 0 || !s.Enabled {
		t.Errorf("left: %+v", s.State())
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
	if n := len(h.of(t, gpu0).Instances); n != 3 {
		t.Errorf("%s has %d instances", gpu0, n)
	}
	if spec := w.specs.of("uid-many"); strings.Count(spec, "nvidia-cap10") != 2 || !strings.Contains(spec, "nvidia-cap21") {
		t.Errorf("the spec is %s", spec)
	}
	if held, err := p.Usage(); err != nil || held != (ledger.Usage{Claims: 2, GPUs: 2, Partitions: 4}) {
		t.Error(held, err)
	}
	mustUnprepare(t, p, "uid-many")
	if in := h.of(t, gpu0).State().MIG.Instances; len(in) != 1 || in[0].Placement.Start != 1 {
		t.Errorf("another claim's instance is gone: %+v", in)
	}
	mustPrepare(t, p, newClaim("mixed", allocated("whole", gpu1), allocated("part", small0)))
	if h.of(t, gpu1).Enabled {
		t.Error("a whole GPU is in MIG mode")
	}
}

func TestClaimWithMorePartitionsThanAFileNameFits(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepareLarge(t, w, p)
	mustPrepare(t, p, newClaim("rest", allocated("r", neighbor)))
	if _, err := p.Prepare(t.Context(), newClaim("more", allocated("r", large4))); cause.Of(err) != cause.Held ||
		!strings.Contains(err.Error(), "-mig-19-4") {
		t.Error(err)
	}
	if held, err := p.Usage(); err != nil || held != (ledger.Usage{Claims: 2, GPUs: 2, Partitions: 13}) {
		t.Error(held, err)
	}
	ours, err := p.OwnedInstances(gpu1, h.of(t, gpu1).State().MIG.Instances)
	if err != nil || len(ours) != 7 {
		t.Errorf("%d are explained: %v", len(ours), err)
	}
	mustUnprepare(t, p, "uid-large")
	mustUnprepare(t, p, "uid-rest")
	checkClean(t, w)
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
			h.of(t, gpu0).NeedsReset = true
			w.scan()
		}, newClaim("c", allocated("a", small0)), cause.Device, []string{small0, "only a GPU reset"}},
		{"a whole GPU whose mode needs a reset", func(t *testing.T, w *world, h *hardware) {
			h.of(t, gpu0).NeedsReset, h.of(t, gpu0).Enabled = true, true
			w.scan()
		}, newClaim("c", allocated("a", gpu0)), cause.Device, []string{gpu0, "only a GPU reset"}},
		{"a guest with read-only MIG", func(_ *testing.T, w *world, _ *hardware) {
			w.snapshot.Node.GPUs[0].MIG.ReadOnly = true
		}, newClaim("c", allocated("a", small0)), cause.Device, []string{small0, "cannot be changed"}},
		{"a GPU without MIG", func(_ *testing.T, w *world, _ *hardware) { w.snapshot.Node.GPUs[0].MIG = nil },
			newClaim("c", allocated("a", small0)), cause.Device, []string{"has no MIG"}},
		{"a GPU in use", func(t *testing.T, _ *world, h *hardware) {
			h.of(t, gpu0).Open = []nvidia.Process{{PID: 4711, Name: "dcgm"}}
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
		{"a renumbered device node", func(t *testing.T, _ *world, h *hardware) { h.of(t, gpu0).Minor = 5 },
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
			before := len(h.of(t, gpu0).Instances)
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
			if after := len(h.of(t, gpu0).Instances); after != before {
				t.Errorf("%d instances before, %d after", before, after)
			}
		})
	}
}

func TestGPUInUseKeepsItsMIGMode(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("part", allocated("r", small0)))
	mustUnprepare(t, p, "uid-part")
	h.of(t, gpu0).Open = []nvidia.Process{{PID: 4711, Name: "dcgm"}}
	c := newClaim("c", allocated("r", gpu0))
	if _, err := p.Prepare(t.Context(), c); cause.Of(err) != cause.Step || !strings.Contains(err.Error(), "dcgm") {
		t.Error(err)
	}
	checkClean(t, w)
	h.of(t, gpu0).Open = nil
	h.fault = func(int, bool) error {
		checkClean(t, w) // nothing of this has to be reverted, so no record is needed
		return nil
	}
	mustPrepare(t, p, c)
	if h.of(t, gpu0).Enabled {
		t.Error("the GPU is in MIG mode")
	}
}

func TestAdminAccessNeverChangesPartitions(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	p.OnMonitor = func() specs.ContainerEdits {
		return specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/monitor", Type: "c", Major: 1, Minor: 3}}}
	}
	mustPrepare(t, p, newClaim("user", allocated("r", small0)))
	mustPrepare(t, p, newClaim("admin", admin("a", small0), admin("b", gpu0)))
	if spec := w.specs.of("uid-admin"); !strings.Contains(spec, "nvidia-cap11") || !strings.Contains(spec, "/dev/monitor") {
		t.Errorf("the spec is %s", spec)
	}
	if spec := w.specs.of("uid-user"); strings.Contains(spec, "/dev/monitor") {
		t.Errorf("the spec without admin access is %s", spec)
	}
	mustUnprepare(t, p, "uid-admin")
	if len(h.of(t, gpu0).Instances) != 1 {
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
	checkClean(t, w)
	if len(h.of(t, gpu0).Instances) != 0 {
		t.Error("instances are left")
	}
}

func TestPartitionIsRecreatedAfterReboot(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	mustPrepare(t, w.plugin(t), several)
	w.reboot()
	p := w.plugin(t)
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if w.specs.of(several.UID) != "" {
		t.Errorf("the spec of the last boot was restored: %s", w.specs.of(several.UID))
	}
	mustPrepare(t, p, several)
	checkRecordsMatchHardware(t, w, h, p, nil)
	mustUnprepare(t, p, several.UID)
	checkClean(t, w)
}

// While the plugin recreates a partition, the claim must have no CDI spec, so that no container
// starts with the old devices.
func TestPartitionHasNoSpecWhileItIsRecreated(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, several)
	h.of(t, gpu0).RemoveInstances()
	h.takeCalls()
	without := 0
	h.fault = func(_ int, after bool) error {
		if w.specs.of("uid-c") == "" {
			without++
		} else if last := h.calls[len(h.calls)-1]; last != "query" {
			t.Errorf("%q (%v) while containers are given %s", last, after, w.specs.of("uid-c"))
		}
		return nil
	}
	mustPrepare(t, p, several)
	if without == 0 || w.specs.of("uid-c") == "" {
		t.Errorf("%d calls without a spec", without)
	}
}

func TestRecreatedPartitionIsReported(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	var reported []kubeletplugin.NamespacedObject
	p.OnChanged = func(c kubeletplugin.NamespacedObject) { reported = append(reported, c) }
	mustPrepare(t, p, newClaim("c", allocated("r", small0)))
	mustPrepare(t, p, newClaim("other", allocated("r", gpu1)))
	before := h.of(t, gpu0).State().MIG.Instances[0].Compute[0].UUID
	w.scan()
	if err := p.Reconcile(t.Context()); err != nil || len(reported) != 0 {
		t.Fatal(reported, err)
	}

	h.of(t, gpu0).RemoveInstances()
	w.scan()
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(reported) != 1 || reported[0].UID != "uid-c" || reported[0].Name != "c" || reported[0].Namespace == "" {
		t.Errorf("reported: %+v", reported)
	}
	given, err := p.PreparedDevices("uid-c")
	if now := h.of(t, gpu0).State().MIG.Instances[0].Compute[0].UUID; err != nil || now == before || given[0].MIGUUID != now ||
		given[0].Compute.UUID != now {
		t.Errorf("%+v, %v; the MIG device was %s and is %s", given, err, before, now)
	}
}

// A recreated partition may get the UUID that it had before. Then the driver must update the record
// but must not call OnChanged.
func TestRecreatedPartitionWithSameUUIDIsNotReported(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", allocated("r", small0)))
	before := h.of(t, gpu0).State().MIG.Instances[0].Compute[0].UUID
	h.of(t, gpu0).RemoveInstances()
	h.serial = 0
	w.scan()
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if now := h.of(t, gpu0).State().MIG.Instances[0].Compute[0].UUID; now != before {
		t.Fatalf("the MIG device was %s and is %s", before, now)
	}
	w.scan()
	h.takeCalls()
	for _, again := range []func() error{func() error { return p.Reconcile(t.Context()) },
		func() error { return w.plugin(t).Reconcile(t.Context()) }} {
		if err := again(); err != nil || len(h.takeCalls()) > 0 {
			t.Errorf("the partition is no longer the claim's: %v", err)
		}
	}
	if given, err := p.PreparedDevices("uid-c"); err != nil || given[0].Compute == nil || given[0].Compute.UUID != before {
		t.Errorf("%+v, %v", given, err)
	}
}

// Reconcile must report a device lost only if a retry cannot help, because users then delete the
// claim's Pods.
func TestPartitionIsLostOnlyOnPermanentErrors(t *testing.T) {
	for code, lost := range map[device.FailureCode]bool{
		device.FailureInUse: false, device.FailureTimeout: false, device.FailureDied: false, device.FailureOther: false,
		device.FailureNotSupported: true, device.FailureReset: true, device.FailureInsufficient: true,
	} {
		t.Run(string(code), func(t *testing.T) {
			w := newWorld(t)
			h := withMIG(w)
			p := w.plugin(t)
			mustPrepare(t, p, several)
			h.of(t, gpu0).RemoveInstances()
			w.scan()
			h.takeCalls()
			h.fault = func(_ int, after bool) error {
				if !after && strings.HasPrefix(h.calls[len(h.calls)-1], "create GPU instance") {
					return &nvidia.Error{Op: "a call", Code: code, Message: string(code)}
				}
				return nil
			}
			err := p.Reconcile(t.Context())
			if err == nil || (len(reconcile.LostDevices(err)) == 1) != lost || !strings.Contains(err.Error(), small0) {
				t.Errorf("lost: %v; %v", reconcile.LostDevices(err), err)
			}
			if spec := w.specs.of("uid-c"); spec != nothing {
				t.Errorf("a restarted container gets %s", spec)
			}
			h.fault = nil
			if err := p.Reconcile(t.Context()); err != nil {
				t.Error(err)
			}
			w.scan()
			checkRecordsMatchHardware(t, w, h, p, nil)
		})
	}
}

package prepare_test

import (
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestPreparedDevicesListsGPUsAndPartitions(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	foreign := h.createForeign(t, gpu0, 19, 6)
	w.scan()
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", allocated("whole", gpu1), allocated("made", small0), allocated("found", gpu0+"-mig-19-6")))
	h.takeCalls()

	given, err := p.PreparedDevices("uid-c")
	if err != nil || len(given) != 3 {
		t.Fatal(given, err)
	}
	if g := given[0]; g.Device.Device != gpu1 || g.GPUUUID == "" || g.MIGUUID != "" || g.Instance != nil || g.Compute != nil {
		t.Errorf("the whole GPU is %+v", g)
	}
	// The driver created the first partition after the last scan, so only the record has its instance.
	// An admin created the second, so only the inventory has its instance.
	there := h.of(t, gpu0).state().MIG.Instances
	for i, want := range []uint32{0, 6} {
		g := given[i+1]
		at := slices.IndexFunc(there, func(in device.Instance) bool { return in.Placement.Start == want })
		if g.Instance == nil || g.Compute == nil || g.Instance.ID != there[at].ID || g.Compute.UUID != there[at].Compute[0].UUID ||
			g.MIGUUID != g.Compute.UUID {
			t.Errorf("the partition at %d is %+v, want %+v", want, g, there[at])
		}
	}
	if given[2].Instance.ID != foreign.ID {
		t.Errorf("%+v, want an admin's instance %d", given[2], foreign.ID)
	}
	if asked := h.takeCalls(); len(asked) != 0 {
		t.Errorf("hardware calls: %v", asked)
	}

	mustUnprepare(t, p, "uid-c")
	for _, none := range []types.UID{"uid-c", "uid-unknown"} {
		if given, err := p.PreparedDevices(none); len(given) != 0 || err != nil {
			t.Errorf("claim %s has %+v, %v", none, given, err)
		}
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
	before := h.of(t, gpu0).state().MIG.Instances[0].Compute[0].UUID
	w.scan()
	if err := p.Reconcile(t.Context()); err != nil || len(reported) != 0 {
		t.Fatal(reported, err)
	}

	h.of(t, gpu0).reset()
	w.scan()
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(reported) != 1 || reported[0].UID != "uid-c" || reported[0].Name != "c" || reported[0].Namespace == "" {
		t.Errorf("reported: %+v", reported)
	}
	given, err := p.PreparedDevices("uid-c")
	if now := h.of(t, gpu0).state().MIG.Instances[0].Compute[0].UUID; err != nil || now == before || given[0].MIGUUID != now ||
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
	before := h.of(t, gpu0).state().MIG.Instances[0].Compute[0].UUID
	h.of(t, gpu0).reset()
	h.serial = 0
	w.scan()
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if now := h.of(t, gpu0).state().MIG.Instances[0].Compute[0].UUID; now != before {
		t.Fatalf("the MIG device was %s and is %s", before, now)
	}
	w.scan()
	h.takeCalls()
	for _, again := range []func() error{func() error { return p.Reconcile(t.Context()) },
		func() error { return w.plugin(t).RepairAllSpecs(t.Context()) }} {
		if err := again(); err != nil || len(h.takeCalls()) > 0 {
			t.Errorf("the partition is no longer the claim's: %v", err)
		}
	}
	if given, err := p.PreparedDevices("uid-c"); err != nil || given[0].Compute == nil || given[0].Compute.UUID != before {
		t.Errorf("%+v, %v", given, err)
	}
}

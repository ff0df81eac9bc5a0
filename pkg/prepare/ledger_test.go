// The records say which devices a claim has; no state stays in memory, and no hardware is read for
// it.

package prepare_test

import (
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"

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
	there := h.of(t, gpu0).State().MIG.Instances
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

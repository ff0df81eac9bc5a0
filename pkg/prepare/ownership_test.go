package prepare_test

import (
	"fmt"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/reconcile"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// If a record is unreadable and its file name does not list the devices, the driver must treat
// every MIG instance as that claim's.
func TestUnreadableRecordWithoutDevicesOwnsAll(t *testing.T) {
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
	w.disk.Put(recordFile(t, w, "uid-large"), []byte("{"))
	all, theirs, err := p.ForeignInstances(t.Context(), h.card(t, gpu0), gpu0)
	if err != nil || len(all) != 6 || len(theirs) != 0 {
		t.Errorf("%d instances, called an admin's: %s: %v", len(all), steps.DescribeInstances(theirs...), err)
	}
	if ours, err := p.OwnedInstances(gpu0, all); err != nil || len(ours) != 6 {
		t.Errorf("owned: %s: %v", steps.DescribeInstances(ours...), err)
	}
	if err := p.Adopt(t.Context(), h.card(t, gpu0), gpu0); err != nil || len(h.of(t, gpu0).instances) != 6 {
		t.Errorf("a claim's instances were removed, there are %d: %v", len(h.of(t, gpu0).instances), err)
	}
}

// A MIG UUID is computed from the card and the instances' IDs, which the GPU reuses. So a MIG
// device with the same UUID but another profile or placement must count as another device.
func TestSameUUIDWithOtherProfileIsAnotherDevice(t *testing.T) {
	for name, now := range map[string]struct {
		profile uint32
		at      device.Placement
	}{
		"another profile": {14, device.Placement{Start: 4, Size: 2}},
		"another place":   {9, device.Placement{Start: 0, Size: 4}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			h := withMIG(w)
			theirs := h.createForeign(t, gpu0, 9, 4)
			w.scan()
			p := w.plugin(t)
			c := newClaim("c", allocated("r", large4))
			mustPrepare(t, p, c)
			theirs.ProfileID, theirs.Placement = now.profile, now.at
			h.of(t, gpu0).instances[theirs.ID] = theirs
			w.scan()
			if given, err := p.PreparedDevices("uid-c"); err != nil || given[0].Instance != nil {
				t.Errorf("the claim's devices are %+v: %v", given, err)
			}
			if lost := reconcile.LostDevices(p.RepairAllSpecs(t.Context())); len(lost) != 1 {
				t.Errorf("%+v", lost)
			}
			_, err := p.Prepare(t.Context(), c)
			if lost := reconcile.LostDevices(err); len(lost) != 1 || lost[0].Device != large4 || w.specs.of("uid-c") != nothing {
				t.Errorf("%v; containers are given %s", err, w.specs.of("uid-c"))
			}
		})
	}
}

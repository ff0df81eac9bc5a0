package prepare

import (
	"fmt"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Of a claim whose record neither names its devices nor can be read, any instance may be.
func TestWhereAnUnreadableRecordNamesNoDevicesNothingIsSomeoneElses(t *testing.T) {
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
		t.Fatalf("the test is about another record: %q", r)
	}
	w.disk.Put(recordFile(t, w, "uid-large"), []byte("{"))
	all, theirs, err := p.Foreign(t.Context(), h.card(t, gpu0), gpu0)
	if err != nil || len(all) != 6 || len(theirs) != 0 {
		t.Errorf("%d instances, called an admin's: %s: %v", len(all), describe(theirs...), err)
	}
	if ours, err := p.Explained(gpu0, all); err != nil || len(ours) != 6 {
		t.Errorf("explained: %s: %v", describe(ours...), err)
	}
	if err := p.Adopt(t.Context(), h.card(t, gpu0), gpu0); err != nil || len(h.of(t, gpu0).instances) != 6 {
		t.Errorf("a claim's instances were removed, there are %d: %v", len(h.of(t, gpu0).instances), err)
	}
}

// A MIG UUID follows from the card and the instances' IDs, which are used again.
func TestAnotherProfileWithTheSameUUIDIsNotTheDeviceThatTheClaimUses(t *testing.T) {
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
			theirs := h.someoneElse(t, gpu0, 9, 4)
			w.scan()
			p := w.plugin(t)
			c := newClaim("c", allocated("r", large4))
			mustPrepare(t, p, c)
			theirs.ProfileID, theirs.Placement = now.profile, now.at
			h.of(t, gpu0).instances[theirs.ID] = theirs
			w.scan()
			if given, err := p.Given("uid-c"); err != nil || given[0].Instance != nil {
				t.Errorf("the claim is said to have %+v: %v", given, err)
			}
			if lost := Lost(p.Mend(t.Context())); len(lost) != 1 {
				t.Errorf("%+v", lost)
			}
			_, err := p.Prepare(t.Context(), c)
			if lost := Lost(err); len(lost) != 1 || lost[0].Device != large4 || w.specs.of("uid-c") != nothing {
				t.Errorf("%v; containers are given %s", err, w.specs.of("uid-c"))
			}
		})
	}
}

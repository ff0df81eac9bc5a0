package prepare

import (
	"fmt"
	"testing"
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

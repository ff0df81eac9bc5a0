package prepare_test

import (
	"math"
	"testing"
)

// Claims share the disk, so Prepare must make no more writes than these. Saving a record takes
// three writes: the file, its rename and the directory sync.
func TestPrepareWritesNoMoreThanNeeded(t *testing.T) {
	const save, baseSpec, spec, marked = 3, 1, 1, 3
	// A repeated Prepare only syncs a directory. The fake disk counts that as a write, although a real
	// disk that is up to date writes nothing.
	const settled = 1
	w := newWorld(t)
	withMIG(w)
	p := w.plugin(t)
	for _, c := range []struct {
		what, device string
		writes       int
	}{
		{"a whole GPU: the record once all is there", gpu1, save},
		{"a GPU's first partition: the plan, MIG mode is on, the instance is there, all is there", small0, marked + 4*save},
		{"a further partition: the plan, the instance is there, all is there", gpu0 + "-mig-19-1", 3 * save},
	} {
		w.disk.StopAt(math.MaxInt)
		mustPrepare(t, p, newClaim(c.device, allocated("r", c.device)))
		if got := w.disk.Writes() - baseSpec - spec; got != c.writes {
			t.Errorf("%s: %d writes to the disk, and %d are needed", c.what, got, c.writes)
		}
		w.disk.StopAt(math.MaxInt)
		mustPrepare(t, p, newClaim(c.device, allocated("r", c.device)))
		if got := w.disk.Writes() - baseSpec - spec; got != settled {
			t.Errorf("%s: %d writes when it is prepared once more", c.what, got-settled)
		}
	}
}

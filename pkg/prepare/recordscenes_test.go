// These scenes prepare one claim of each kind on a fake node. testdata/records has what each of
// them leaves in the node's state directory.

package prepare_test

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// recordScene is a claim, and a node with what the claim needs before it is prepared.
type recordScene struct {
	name  string
	claim *resourceapi.ResourceClaim
	on    func(t *testing.T, w *world)
}

func recordScenes() []recordScene {
	bare := func(*testing.T, *world) {}
	mig := func(_ *testing.T, w *world) { withMPS(w) }
	return []recordScene{
		{"whole", newClaim("c", allocated("a", gpu0), admin("b", gpu1)), bare},
		{"described", newClaim("c", allocated("a", gpu0)), func(_ *testing.T, w *world) { w.metadata = true }},
		{"machine", newClaim("c", allocated("a", gpu0+"-vfio")), func(_ *testing.T, w *world) { withBus(w) }},
		{"partitions", newClaim("c", allocated("a", small0), allocated("b", neighbor)), mig},
		{"partition-of-an-admin", newClaim("c", allocated("a", large4)), func(t *testing.T, w *world) {
			t.Helper()
			withMPS(w).createForeign(t, gpu0, 9, 4)
			w.scan()
		}},
		{"compute-instance", newClaim("c", allocated("a", large4+"-ci-1")), func(t *testing.T, w *world) {
			t.Helper()
			h := withMPS(w)
			in := h.createForeign(t, gpu0, 9, 4)
			in.Compute = []device.ComputeInstance{{ID: 0, Name: "1c.3g.40gb", UUID: "MIG-a", Minor: 41},
				{ID: 1, Name: "2c.3g.40gb", UUID: "MIG-b", Minor: 42}}
			h.of(t, gpu0).Instances[in.ID] = in
			w.scan()
		}},
		{"time-slice", sliced, mig},
		{"MPS", grouped, mig},
		{"fraction", part1, mig},
		{"fraction-of-a-partition", migPart1, mig},
	}
}

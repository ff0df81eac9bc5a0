package prepare

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
)

// Repair describes something that the driver found broken and repaired.
type Repair struct {
	// Kind is the value of the metric's label, for example "leftover-spec".
	Kind string
	// What says in words what the driver did.
	//
	// Object is what was repaired: a claim (namespace/name or UID), the ID of an MPS daemon, or the
	// key of a shared setting.
	What, Object string
}

// reportRepair logs the repair and calls OnRepaired.
func (p *Preparer) reportRepair(ctx context.Context, r Repair) {
	klog.FromContext(ctx).Info(r.What, "repair", r.Kind, "object", r.Object)
	p.OnRepaired(r)
}

// reportInterrupted reports that the driver undid what an interrupted call for the claim had left
// on the node.
func (p *Preparer) reportInterrupted(ctx context.Context, r checkpoint.Record) {
	what := "Rolled back interrupted preparation"
	if r.State == checkpoint.Reverting {
		what = "Finished interrupted unpreparation"
	}
	p.reportRepair(ctx, Repair{"interrupted-claim", what, r.Namespace + "/" + r.Name})
}

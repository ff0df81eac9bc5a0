package prepare

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
)

// Repair is one thing that was found out of order and put in order.
type Repair struct {
	// Kind is one word for the metrics.
	Kind string
	// What was done, and to what: a claim as namespace/name or by its UID, a daemon, what claims share.
	What, Object string
}

// repaired says once what was put in order: in the log, and to whoever counts.
func (p *Preparer) repaired(ctx context.Context, r Repair) {
	klog.FromContext(ctx).Info(r.What, "repair", r.Kind, "object", r.Object)
	p.Repaired(r)
}

// interrupted is told when what a call left unfinished is reverted.
func (p *Preparer) interrupted(ctx context.Context, r checkpoint.Record) {
	what := "Reverted a preparation that was interrupted"
	if r.State == checkpoint.Reverting {
		what = "Gave back in whole what was given back in part"
	}
	p.repaired(ctx, Repair{"interrupted-claim", what, r.Namespace + "/" + r.Name})
}

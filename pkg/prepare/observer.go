package prepare

import (
	"context"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
)

// Observer learns what happens to claims. Its methods may be called concurrently and must not
// block.
type Observer interface {
	// Unprepared is called under the claim's lock whenever a claim was unprepared. That includes the
	// case that Prepare reverts an earlier preparation of the claim.
	Unprepared(uid types.UID)
	// Repaired is called for each repair.
	Repaired(r Repair)
	// Skipped is called for each claim whose devices Reconcile could not examine, for example because
	// a call for the claim was running. The claim's reported health then stays as it was.
	Skipped(uid types.UID)
	// Changed is called for each prepared claim whose device got another UUID, because the driver
	// recreated its partition.
	Changed(ctx context.Context, claim kubeletplugin.NamespacedObject)
}

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

// Report logs the repair and tells the observer.
func (r Repair) Report(ctx context.Context, o Observer) {
	klog.FromContext(ctx).Info(r.What, "repair", r.Kind, "object", r.Object)
	o.Repaired(r)
}

// Package claimstatus tells users which devices their prepared claims have, and which of them are
// lost.
//
// A [Reporter] writes the claim's status.devices: each device's UUIDs, its MIG placement and the
// condition Ready. It writes a quarter of a second after the kubelet's call and retries for about a
// minute. Then it gives up: the status serves monitoring, and no claim depends on it.
//
// The Reporter also knows the devices that prepared claims have lost, for example because a GPU was
// replaced. Reconciliation finds them. The Reporter shows them in the claim's status and in an
// Event on the claim, and lists them for the kubelet's health stream. A lost device belongs to its
// claim: it is forgotten when the claim is unprepared or prepared again.
//
// No method waits for the API server, except [Reporter.Run]. The package decides nothing about
// claims and touches no hardware.
package claimstatus

import (
	"context"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/reconcile"
)

// Claims lists this node's prepared claims and their devices.
type Claims interface {
	PreparedClaims() ([]kubeletplugin.NamespacedObject, error)
	PreparedDevices(claim types.UID) ([]ledger.PreparedDevice, error)
}

// Events writes warnings on claims. It must not block.
type Events interface {
	WarnClaim(claim kubeletplugin.NamespacedObject, reason, message string)
}

// Reporter reports the devices of prepared claims.
type Reporter struct {
	lostDevices

	queue  *queue // nil if statuses are not written
	events Events
}

// New returns a Reporter. If client is nil, the Reporter writes no statuses. The client must not be
// the one that Prepare uses, because bursts of status writes would use up its request rate. failed
// is called with a cause after each failed write, and must not block.
func New(client kubernetes.Interface, events Events, failed func(cause string)) *Reporter {
	r := &Reporter{lostDevices: lostDevices{changed: make(chan struct{})}, events: events}
	if client != nil {
		r.queue = newQueue(client, failed)
	}
	return r
}

// Run writes statuses until the context ends. It first queues a write for every prepared claim,
// because a plugin that was killed may not have written them.
func (r *Reporter) Run(ctx context.Context, claims Claims) {
	if r.queue == nil {
		return
	}
	prepared, err := claims.PreparedClaims()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Failed to list prepared claims; their statuses may be out of date")
	}
	for _, c := range prepared {
		r.queue.Restore(ctx, c)
	}
	r.queue.Run(ctx, claims)
}

// Prepared says that the claim has all its devices. It forgets devices that the claim had lost.
func (r *Reporter) Prepared(ctx context.Context, c *resourceapi.ResourceClaim) {
	r.endClaim(c.UID)
	r.queue.Prepared(ctx, c)
}

// Changed says that devices of a prepared claim have changed, or have come back.
func (r *Reporter) Changed(ctx context.Context, c kubeletplugin.NamespacedObject) {
	r.queue.Changed(ctx, c)
}

// Unprepared forgets the claim: its lost devices and its pending status write. The caller holds the
// claim's lock, so the claim's next Prepare comes later.
func (r *Reporter) Unprepared(claim types.UID) {
	r.endClaim(claim)
	r.queue.Forget(claim)
}

// EndComparison reports what a comparison found. err is the error of
// [reconcile.Reconciler.Reconcile].
func (r *Reporter) EndComparison(ctx context.Context, err error) {
	undetermined := func(claim types.UID) bool { return reconcile.Undetermined(err, claim) }
	r.endComparison(lossesIn(err), undetermined,
		func(l loss) {
			r.queue.Lost(ctx, l)
			r.events.WarnClaim(l.claim, "DeviceLost", l.message)
		},
		func(l loss) { r.queue.Changed(ctx, l.claim) })
}

// Package claimstatus tells users which devices their prepared claims have, and which of them are
// lost.
//
// A [Reporter] writes the claim's status.devices: each device's UUIDs, its MIG placement and the
// condition Ready. After each change of a claim it compares the claim with its record and with what
// it has lost, a quarter of a second after the kubelet's call. It retries for about a minute. Then
// it gives up: the status serves monitoring, and no claim depends on it.
//
// The Reporter also knows the devices that prepared claims have lost, for example because an admin
// created another MIG instance in a partition's place. Reconciliation finds them. The Reporter
// shows them in the claim's status and in an Event on the claim, and lists them for the kubelet's
// health stream. A lost device belongs to its claim: it is forgotten when the claim is unprepared
// or prepared again.
//
// No method waits for the API server, except [Reporter.Run]. The package decides nothing about
// claims and touches no hardware.
package claimstatus

import (
	"context"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
)

// Claims lists this node's prepared claims and their devices.
type Claims interface {
	PreparedClaims() ([]checkpoint.Record, error)
	PreparedDevices(claim types.UID) ([]ledger.PreparedDevice, error)
}

// writeDelay is the pause between a kubelet call and the status write. A node that gets eight Pods
// at once needs its CPU for the kubelet's calls first.
const writeDelay = 250 * time.Millisecond

// Reporter reports the devices of prepared claims.
type Reporter struct {
	client    kubernetes.Interface // nil if statuses are not written
	event     func(claim kubeletplugin.NamespacedObject, reason events.Reason, message string)
	onFailure func(cause string)
	// queue has the claims whose status may be out of date.
	queue workqueue.TypedRateLimitingInterface[kubeletplugin.NamespacedObject]

	mu sync.Mutex
	// read has the statuses of claims that Prepare has just read, so that the first write of a status
	// does not read the claim again. A large cluster prepares many claims at once.
	read    map[types.UID][]resourceapi.AllocatedDeviceStatus
	changed chan struct{} // closed when a claim loses a device or has it again
	// lost has the devices that prepared claims have lost, each with a message for the claim's users.
	lost map[lostDevice]string
	// ended has the claims that were prepared or unprepared since the comparison in progress began, so
	// its result does not apply to them. It is nil while no comparison is in progress.
	ended map[types.UID]bool
}

// New returns a Reporter. If client is nil, the Reporter writes no statuses. The client must not be
// the one that Prepare uses, because bursts of status writes would use up its request rate. event
// writes an Event on a claim. failed is called with a cause after each failed write. Both must not
// block.
func New(
	client kubernetes.Interface,
	event func(claim kubeletplugin.NamespacedObject, reason events.Reason, message string), failed func(cause string),
) *Reporter {
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[kubeletplugin.NamespacedObject](minPause, maxPause)
	return &Reporter{
		client: client, event: event, onFailure: failed, queue: workqueue.NewTypedRateLimitingQueue(limiter),
		changed: make(chan struct{}), lost: map[lostDevice]string{}, read: map[types.UID][]resourceapi.AllocatedDeviceStatus{},
	}
}

// Prepared says that the claim has all its devices. It forgets devices that the claim had lost.
func (r *Reporter) Prepared(c *resourceapi.ResourceClaim) {
	r.ForgetLost(c.UID)
	if r.client != nil {
		r.mu.Lock()
		r.read[c.UID] = c.Status.Devices
		r.mu.Unlock()
	}
	name := types.NamespacedName{Namespace: c.Namespace, Name: c.Name}
	r.enqueue(kubeletplugin.NamespacedObject{NamespacedName: name, UID: c.UID})
}

// Changed says that devices of a prepared claim have changed.
func (r *Reporter) Changed(_ context.Context, c kubeletplugin.NamespacedObject) { r.enqueue(c) }

// ForgetLost forgets the claim's lost devices, because the claim was unprepared. The caller holds
// the claim's lock, so the claim's next Prepare comes later.
func (r *Reporter) ForgetLost(claim types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended != nil {
		r.ended[claim] = true
	}
	delete(r.read, claim)
	for key := range r.lost {
		if key.claim.UID == claim {
			delete(r.lost, key)
			r.notify()
		}
	}
}

// enqueue lets Run write the claim's status after writeDelay.
func (r *Reporter) enqueue(c kubeletplugin.NamespacedObject) {
	if r.client != nil {
		r.queue.AddAfter(c, writeDelay)
	}
}

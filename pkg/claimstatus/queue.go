package claimstatus

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	// writeDelay is the pause between a kubelet call and the status write. A node that gets eight Pods
	// at once needs its CPU for the kubelet's calls first.
	writeDelay   = 250 * time.Millisecond
	maxTries     = 9 // the pauses between the tries add up to 64 s
	minPause     = 250 * time.Millisecond
	maxPause     = 30 * time.Second
	writeTimeout = 10 * time.Second // limit of one try
	// maxPending is how many claims can wait for a status write while the API server does not answer.
	// No node has nearly as many claims.
	maxPending = 1024
)

// queue has the pending status writes. A claim has at most one, which includes all earlier changes
// of its status. A nil queue does nothing. No method blocks, except Run.
type queue struct {
	client    kubernetes.Interface
	onFailure func(cause string)
	claims    workqueue.TypedRateLimitingInterface[types.UID]

	mu      sync.Mutex
	pending map[types.UID]*update
}

// update is the pending status write of one claim.
type update struct {
	claim kubeletplugin.NamespacedObject
	// current has this driver's entries in the claim's status. needsRead means that they may be out of
	// date, so the claim must be read from the API server before the write.
	current   []resourceapi.AllocatedDeviceStatus
	needsRead bool
	// lookUp means that the new entries describe the devices in the claim's checkpoint record.
	// Otherwise they are those in current.
	lookUp bool
	// lost has devices whose entries must say that the claim has lost them.
	lost []loss
}

func newQueue(client kubernetes.Interface, failed func(cause string)) *queue {
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[types.UID](minPause, maxPause)
	return &queue{
		client: client, onFailure: failed, claims: workqueue.NewTypedRateLimitingQueue(limiter), pending: map[types.UID]*update{}}
}

// Prepared queues a write that says that the claim's devices are ready.
func (q *queue) Prepared(ctx context.Context, c *resourceapi.ResourceClaim) {
	name := types.NamespacedName{Namespace: c.Namespace, Name: c.Name}
	q.add(ctx, kubeletplugin.NamespacedObject{NamespacedName: name, UID: c.UID}, func(u *update) {
		u.current, u.lookUp, u.lost = ownEntries(c), true, nil
	})
}

// Changed queues a write for a prepared claim whose devices have changed.
func (q *queue) Changed(ctx context.Context, c kubeletplugin.NamespacedObject) {
	q.add(ctx, c, func(u *update) { u.needsRead, u.lookUp, u.lost = true, true, nil })
}

// Restore queues a write for a claim that was prepared before the plugin started. A comparison may
// already have queued a lost device of the claim, which stays.
func (q *queue) Restore(ctx context.Context, c kubeletplugin.NamespacedObject) {
	q.add(ctx, c, func(u *update) { u.needsRead, u.lookUp = true, true })
}

// Lost queues a write that says that a prepared claim has lost a device.
func (q *queue) Lost(ctx context.Context, l loss) {
	q.add(ctx, l.claim, func(u *update) {
		u.lost = slices.DeleteFunc(u.lost, func(o loss) bool { return o.device == l.device })
		u.lost = append(u.lost, l)
		u.needsRead = u.needsRead || !u.lookUp
	})
}

// Forget drops the claim's pending write.
func (q *queue) Forget(claim types.UID) {
	if q == nil {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.pending, claim)
}

// add calls change to modify the claim's pending write, or a new one, and queues it. A new one is
// dropped if maxPending claims are waiting already.
func (q *queue) add(ctx context.Context, c kubeletplugin.NamespacedObject, change func(*update)) {
	if q == nil {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	before := q.pending[c.UID]
	if before == nil && len(q.pending) >= maxPending {
		q.onFailure("queue-full")
		klog.FromContext(ctx).Info("Dropped status write for claim: too many status writes are pending", "claim", c.NamespacedName)
		return
	}
	// change modifies a copy, because a write of the original may be in progress.
	u := update{claim: c}
	if before != nil {
		u = *before
		u.lost = slices.Clone(u.lost)
	}
	change(&u)
	q.pending[c.UID] = &u
	q.claims.AddAfter(c.UID, writeDelay)
}

// Run makes the pending writes until the context ends.
func (q *queue) Run(ctx context.Context, claims Claims) {
	stop := context.AfterFunc(ctx, q.claims.ShutDown)
	defer stop()
	for {
		claim, ended := q.claims.Get()
		if ended {
			return
		}
		q.process(ctx, claims, claim)
		q.claims.Done(claim)
	}
}

// process makes one attempt at the claim's pending write. If the attempt fails, it queues a retry.
// After the last retry it drops the write.
func (q *queue) process(ctx context.Context, claims Claims, claim types.UID) {
	pending, now := q.begin(claim)
	if pending == nil {
		q.claims.Forget(claim)
		return
	}
	logger := klog.FromContext(ctx).WithValues("claim", now.claim.NamespacedName, "claimUID", claim)
	wanted, err := q.write(ctx, claims, now)
	if ctx.Err() != nil {
		return
	}
	if err != nil && wanted {
		q.onFailure(errorCause(err))
		if q.claims.NumRequeues(claim)+1 < maxTries {
			logger.V(2).Info("Failed to write claim status; retrying", "err", err)
			q.claims.AddRateLimited(claim)
			return
		}
		logger.Error(err, "Failed to write claim status; giving up")
	}
	if !wanted {
		logger.V(4).Info("Skipped claim status: nothing to write", "err", err)
	}
	q.claims.Forget(claim)
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pending[claim] == pending { // otherwise a newer write is pending
		delete(q.pending, claim)
	}
}

// begin returns the claim's pending write, or nil, and a copy of it for one attempt. Any later
// attempt must read the claim first, because this one may change its status.
func (q *queue) begin(claim types.UID) (pending *update, now update) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if pending = q.pending[claim]; pending != nil {
		now = *pending
		pending.needsRead = true
	}
	return pending, now
}

// write makes one attempt to write the claim's status. wanted is false if the claim was deleted or
// deallocated, or if its status is already as wanted.
func (q *queue) write(ctx context.Context, claims Claims, u update) (wanted bool, _ error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	api := q.client.ResourceV1().ResourceClaims(u.claim.Namespace)
	if u.needsRead {
		c, err := api.Get(ctx, u.claim.Name, metav1.GetOptions{})
		if err != nil {
			return !apierrors.IsNotFound(err), fmt.Errorf("read the claim: %w", err)
		}
		if c.UID != u.claim.UID || c.Status.Allocation == nil {
			return false, nil
		}
		u.current = ownEntries(c)
	}
	entries, err := u.entries(claims, metav1.Now())
	if err != nil {
		return true, err
	}
	if len(entries) == 0 || upToDate(u.current, entries) {
		return false, nil
	}
	status := resourceapply.ResourceClaimStatus()
	for _, e := range entries {
		status.WithDevices(applyConfiguration(e))
	}
	// The UID makes the API server refuse the write if the claim was deleted and a new claim has its
	// name.
	apply := resourceapply.ResourceClaim(u.claim.Name, u.claim.Namespace).WithUID(u.claim.UID).WithStatus(status)
	_, err = api.ApplyStatus(ctx, apply, metav1.ApplyOptions{FieldManager: device.DriverName, Force: true})
	if err != nil {
		return !apierrors.IsNotFound(err), fmt.Errorf("apply status.devices: %w", err)
	}
	return true, nil
}

// errorCause returns the label of the error in the metric of failed status writes.
func errorCause(err error) string {
	if reason := apierrors.ReasonForError(err); reason != metav1.StatusReasonUnknown {
		return string(reason)
	}
	return "other"
}

package driver

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
	metav1apply "k8s.io/client-go/applyconfigurations/meta/v1"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
)

// What is written about a claim is written within about a minute or not at all: it is for monitoring, and the claim is served without it.
const (
	// statusDelay keeps what is written out of the calls that come with the one it is about: a node that gets eight Pods at once would take the processor for it
	// from those that are not answered yet.
	statusDelay     = 250 * time.Millisecond
	statusTries     = 9 // the pauses between them add up to 64 s
	statusPause     = 250 * time.Millisecond
	statusPauseMost = 30 * time.Second
	statusTimeout   = 10 * time.Second // of one call to the API server
	// statusClaims bounds for how many claims something may wait to be written: far more than a node has, while the API server does not answer.
	statusClaims = 1024
)

// claimStatus tells users and monitoring what a claim got: for each of its devices of this driver an entry in the claim's status.devices, with the
// UUIDs and the condition Ready.
//
// It writes beside the kubelet's calls, never within them, and a moment later: what it is told is queued, one change a claim, the newest wins. What fails is tried again for
// a while, counted, and then given up with a line in the log; no claim depends on it. Entries of other drivers are left alone: server-side apply owns
// only what this driver applied.
//
// A nil claimStatus is one that is switched off: it neither reads nor writes anything.
type claimStatus struct {
	client kubernetes.Interface
	failed func(cause string)
	queue  workqueue.TypedRateLimitingInterface[types.UID]

	mu      sync.Mutex
	pending map[types.UID]*statusChange
}

// statusChange is what is to be written about one claim.
type statusChange struct {
	claim kubeletplugin.NamespacedObject
	// said is what the claim's status said of our devices, when it was last read.
	said []resourceapi.AllocatedDeviceStatus
	// read says that said is to be read again before anything is written, begun that this change, or one whose place it took, may have been written.
	read, begun bool
	// given says which devices the claim has; nil if they are those that were said.
	given func() ([]givenDevice, error)
	lost  []lostDevice
}

type lostDevice struct{ device, reason, message string }

// newClaimStatus makes the writer; nothing is written until [claimStatus.Run]. The client is best one of its own: with the driver's, a burst of writes
// would take from the rate of requests that Prepare needs. failed is told of each attempt that failed.
func newClaimStatus(client kubernetes.Interface, failed func(cause string)) *claimStatus {
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[types.UID](statusPause, statusPauseMost)
	return &claimStatus{client: client, failed: failed, queue: workqueue.NewTypedRateLimitingQueue(limiter), pending: map[types.UID]*statusChange{}}
}

// Prepared has it written that the claim's devices are ready. given says, when it is written, which devices of this driver the claim has. It does not
// block.
func (s *claimStatus) Prepared(ctx context.Context, c *resourceapi.ResourceClaim, given func() ([]givenDevice, error)) {
	name := types.NamespacedName{Namespace: c.Namespace, Name: c.Name}
	s.change(ctx, kubeletplugin.NamespacedObject{NamespacedName: name, UID: c.UID}, func(change *statusChange) {
		// What may be being written is what the claim says by now, and not what the caller has read.
		change.said, change.given, change.read, change.lost = ours(c), given, change.begun, nil
	})
}

// Changed has it written what the devices of a prepared claim are now, which were others before. It does not block.
func (s *claimStatus) Changed(ctx context.Context, c kubeletplugin.NamespacedObject, given func() ([]givenDevice, error)) {
	s.change(ctx, c, func(change *statusChange) {
		change.given, change.read, change.lost = given, true, nil
	})
}

// Lost has it written that a device of a prepared claim is not there any more. The reason is one word in CamelCase. It does not block.
func (s *claimStatus) Lost(ctx context.Context, c kubeletplugin.NamespacedObject, device, reason, message string) {
	s.change(ctx, c, func(change *statusChange) {
		change.lost = slices.DeleteFunc(change.lost, func(l lostDevice) bool { return l.device == device })
		change.lost = append(change.lost, lostDevice{device, reason, message})
		change.read = change.read || change.given == nil
	})
}

// Forget drops what was not written yet, of a claim that has been given back.
func (s *claimStatus) Forget(claim types.UID) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pending, claim)
}

// change queues what apply makes of what waits for the claim already.
func (s *claimStatus) change(ctx context.Context, c kubeletplugin.NamespacedObject, apply func(change *statusChange)) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.pending[c.UID]
	if before == nil && len(s.pending) >= statusClaims {
		s.failed("queue-full")
		klog.FromContext(ctx).Info("Too much waits to be written about claims: their status will not say which devices they have", "claim", c.NamespacedName)
		return
	}
	// A copy: the one before may be being written.
	change := statusChange{claim: c}
	if before != nil {
		change = *before
		change.lost = slices.Clone(change.lost)
	}
	apply(&change)
	s.pending[c.UID] = &change
	s.queue.AddAfter(c.UID, statusDelay)
}

// Run writes until the context ends.
func (s *claimStatus) Run(ctx context.Context) {
	if s == nil {
		return
	}
	stop := context.AfterFunc(ctx, s.queue.ShutDown)
	defer stop()
	for {
		claim, ended := s.queue.Get()
		if ended {
			return
		}
		s.next(ctx, claim)
		s.queue.Done(claim)
	}
}

// next writes what waits for one claim, and decides what becomes of it.
func (s *claimStatus) next(ctx context.Context, claim types.UID) {
	s.mu.Lock()
	change := s.pending[claim]
	if change != nil {
		change.begun = true
	}
	s.mu.Unlock()
	if change == nil {
		s.queue.Forget(claim)
		return
	}
	logger := klog.FromContext(ctx).WithValues("claim", change.claim.NamespacedName, "claimUID", claim)
	wanted, err := s.write(ctx, *change)
	if ctx.Err() != nil {
		return
	}
	if err != nil && wanted {
		s.failed(causeOfStatus(err))
		if s.queue.NumRequeues(claim)+1 < statusTries {
			logger.V(2).Info("Could not write into the claim's status; trying again", "err", err)
			s.readAgain(claim, change)
			s.queue.AddRateLimited(claim)
			return
		}
		logger.Error(err, "Could not write into the claim's status: it does not say which devices the claim has")
	}
	if !wanted {
		logger.V(4).Info("There is nothing to write into the claim's status (any more)", "err", err)
	}
	s.queue.Forget(claim)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending[claim] == change { // else a newer one waits in the queue
		delete(s.pending, claim)
	}
}

// readAgain has the claim read before the next attempt, unless something newer waits.
func (s *claimStatus) readAgain(claim types.UID, failed *statusChange) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending[claim] == failed {
		again := *failed
		again.read = true
		s.pending[claim] = &again
	}
}

// write makes one attempt. wanted is false if there is no such claim any more, or nothing that could be said of it.
func (s *claimStatus) write(ctx context.Context, change statusChange) (wanted bool, _ error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	claims := s.client.ResourceV1().ResourceClaims(change.claim.Namespace)
	if change.read {
		c, err := claims.Get(ctx, change.claim.Name, metav1.GetOptions{})
		if err != nil {
			return !apierrors.IsNotFound(err), fmt.Errorf("read the claim: %w", err)
		}
		if c.UID != change.claim.UID || c.Status.Allocation == nil {
			return false, nil
		}
		change.said = ours(c)
	}
	entries, err := change.entries(metav1.Now())
	if err != nil {
		return true, err
	}
	if len(entries) == 0 || saysAlready(change.said, entries) {
		return false, nil
	}
	status := resourceapply.ResourceClaimStatus()
	for _, e := range entries {
		status.WithDevices(applied(e))
	}
	// The UID keeps a new claim of the same name from being written to.
	apply := resourceapply.ResourceClaim(change.claim.Name, change.claim.Namespace).WithUID(change.claim.UID).WithStatus(status)
	_, err = claims.ApplyStatus(ctx, apply, metav1.ApplyOptions{FieldManager: DriverName, Force: true})
	if err != nil {
		return !apierrors.IsNotFound(err), fmt.Errorf("apply status.devices: %w", err)
	}
	return true, nil
}

// causeOfStatus sorts errors for the metrics.
func causeOfStatus(err error) string {
	if reason := apierrors.ReasonForError(err); reason != metav1.StatusReasonUnknown {
		return string(reason)
	}
	return "other"
}

// applied is an entry in the form of server-side apply.
func applied(e resourceapi.AllocatedDeviceStatus) *resourceapply.AllocatedDeviceStatusApplyConfiguration {
	a := resourceapply.AllocatedDeviceStatus().WithDriver(e.Driver).WithPool(e.Pool).WithDevice(e.Device)
	if e.ShareID != nil {
		a.WithShareID(*e.ShareID)
	}
	if e.Data != nil {
		a.WithData(*e.Data)
	}
	for _, c := range e.Conditions {
		condition := metav1apply.Condition().WithType(c.Type).WithStatus(c.Status).WithReason(c.Reason).WithMessage(c.Message).WithLastTransitionTime(c.LastTransitionTime)
		a.WithConditions(condition)
	}
	return a
}

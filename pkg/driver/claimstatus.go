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

// The driver retries a write to a claim's status for about a minute, then drops it. The status
// serves monitoring only: the claim works without it.
const (
	// statusDelay is the pause between a kubelet call and the status write. A node that gets eight
	// Pods at once needs its CPU for the kubelet's calls first.
	statusDelay    = 250 * time.Millisecond
	statusTries    = 9 // the pauses between the tries add up to 64 s
	statusMinPause = 250 * time.Millisecond
	statusMaxPause = 30 * time.Second
	statusTimeout  = 10 * time.Second // limit of one try
	// maxPendingStatus is how many claims can wait for a status write while the API server does not
	// answer. No node has nearly as many claims.
	maxPendingStatus = 1024
)

// claimStatus writes the UUID and the condition Ready of each device to the claim's status.devices,
// soon after the kubelet's calls. A claim has at most one pending change, which includes all
// earlier ones. A nil claimStatus neither reads nor writes anything.
type claimStatus struct {
	client    kubernetes.Interface
	onFailure func(cause string)
	queue     workqueue.TypedRateLimitingInterface[types.UID]

	mu      sync.Mutex
	pending map[types.UID]*statusChange
}

// statusChange is a pending write for one claim.
type statusChange struct {
	claim kubeletplugin.NamespacedObject
	// current has this driver's entries in the claim's status, as of the last read of the claim.
	current []resourceapi.AllocatedDeviceStatus
	// needsRead means that the claim must be read from the API server before the write. mayBeWritten
	// means that an attempt to write this change, or an earlier one that this change includes, has
	// begun.
	needsRead, mayBeWritten bool
	// devices returns the claim's devices for the new entries. If it is nil, the write starts from the
	// entries in current.
	devices func() ([]statusDevice, error)
	lost    []statusLoss
}

type statusLoss struct{ device, reason, message string }

// newClaimStatus returns a writer that starts with [claimStatus.Run]. The client must not be the
// one that Prepare uses, because bursts of status writes would use up its request rate. failed is
// called after each failed attempt.
func newClaimStatus(client kubernetes.Interface, failed func(cause string)) *claimStatus {
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[types.UID](statusMinPause, statusMaxPause)
	return &claimStatus{
		client: client, onFailure: failed, queue: workqueue.NewTypedRateLimitingQueue(limiter), pending: map[types.UID]*statusChange{}}
}

// Prepared queues a status write that says that the claim's devices are ready. devices is called at
// the time of the write and returns the claim's devices of this driver. Prepared does not block.
func (s *claimStatus) Prepared(ctx context.Context, c *resourceapi.ResourceClaim, devices func() ([]statusDevice, error)) {
	name := types.NamespacedName{Namespace: c.Namespace, Name: c.Name}
	s.change(ctx, kubeletplugin.NamespacedObject{NamespacedName: name, UID: c.UID}, func(change *statusChange) {
		// The API server may have stored an earlier change that is missing in c, so the claim must be
		// read again.
		change.current, change.devices, change.needsRead, change.lost = ownEntries(c), devices, change.mayBeWritten, nil
	})
}

// Changed queues a status write for a prepared claim whose devices have changed. It does not block.
func (s *claimStatus) Changed(ctx context.Context, c kubeletplugin.NamespacedObject, devices func() ([]statusDevice, error)) {
	s.change(ctx, c, func(change *statusChange) {
		change.devices, change.needsRead, change.lost = devices, true, nil
	})
}

// Lost queues a status write that says that a prepared claim lost the device. reason is one
// CamelCase word, for the condition Ready. Lost does not block.
func (s *claimStatus) Lost(ctx context.Context, c kubeletplugin.NamespacedObject, device, reason, message string) {
	s.change(ctx, c, func(change *statusChange) {
		change.lost = slices.DeleteFunc(change.lost, func(l statusLoss) bool { return l.device == device })
		change.lost = append(change.lost, statusLoss{device, reason, message})
		change.needsRead = change.needsRead || change.devices == nil
	})
}

// Forget drops the pending write of a claim that was released.
func (s *claimStatus) Forget(claim types.UID) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pending, claim)
}

// change calls apply to modify the claim's pending change, or a new one if none is pending, and
// queues the write. A new one is dropped if maxPendingStatus claims are waiting already.
func (s *claimStatus) change(ctx context.Context, c kubeletplugin.NamespacedObject, apply func(change *statusChange)) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.pending[c.UID]
	if before == nil && len(s.pending) >= maxPendingStatus {
		s.onFailure("queue-full")
		klog.FromContext(ctx).Info("Dropped status write for claim: too many status writes are pending", "claim", c.NamespacedName)
		return
	}
	// apply modifies a copy of the pending change, because a write of the original may be in progress.
	change := statusChange{claim: c}
	if before != nil {
		change = *before
		change.lost = slices.Clone(change.lost)
	}
	apply(&change)
	s.pending[c.UID] = &change
	s.queue.AddAfter(c.UID, statusDelay)
}

// Run writes pending changes until the context ends.
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
		s.process(ctx, claim)
		s.queue.Done(claim)
	}
}

// process makes one attempt to write the claim's pending change. If the attempt fails, it queues a
// retry. After the last retry it drops the change.
func (s *claimStatus) process(ctx context.Context, claim types.UID) {
	s.mu.Lock()
	change := s.pending[claim]
	if change != nil {
		change.mayBeWritten = true
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
		s.onFailure(statusErrorCause(err))
		if s.queue.NumRequeues(claim)+1 < statusTries {
			logger.V(2).Info("Failed to write claim status; retrying", "err", err)
			s.readAgain(claim, change)
			s.queue.AddRateLimited(claim)
			return
		}
		logger.Error(err, "Failed to write claim status; giving up")
	}
	if !wanted {
		logger.V(4).Info("Skipped claim status: nothing to write", "err", err)
	}
	s.queue.Forget(claim)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending[claim] == change { // otherwise a newer change is queued
		delete(s.pending, claim)
	}
}

// readAgain makes the next attempt to write the failed change read the claim from the API server
// first. It does nothing if a newer change has replaced the failed one.
func (s *claimStatus) readAgain(claim types.UID, failed *statusChange) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending[claim] == failed {
		again := *failed
		again.needsRead = true
		s.pending[claim] = &again
	}
}

// write makes one attempt to write the change. wanted is false if the claim was deleted or
// deallocated, or if its status is already as wanted.
func (s *claimStatus) write(ctx context.Context, change statusChange) (wanted bool, _ error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	claims := s.client.ResourceV1().ResourceClaims(change.claim.Namespace)
	if change.needsRead {
		c, err := claims.Get(ctx, change.claim.Name, metav1.GetOptions{})
		if err != nil {
			return !apierrors.IsNotFound(err), fmt.Errorf("read the claim: %w", err)
		}
		if c.UID != change.claim.UID || c.Status.Allocation == nil {
			return false, nil
		}
		change.current = ownEntries(c)
	}
	entries, err := change.entries(metav1.Now())
	if err != nil {
		return true, err
	}
	if len(entries) == 0 || upToDate(change.current, entries) {
		return false, nil
	}
	status := resourceapply.ResourceClaimStatus()
	for _, e := range entries {
		status.WithDevices(applyConfiguration(e))
	}
	// The UID makes the API server refuse the write if the claim was deleted and a new claim has its
	// name.
	apply := resourceapply.ResourceClaim(change.claim.Name, change.claim.Namespace).WithUID(change.claim.UID).WithStatus(status)
	_, err = claims.ApplyStatus(ctx, apply, metav1.ApplyOptions{FieldManager: DriverName, Force: true})
	if err != nil {
		return !apierrors.IsNotFound(err), fmt.Errorf("apply status.devices: %w", err)
	}
	return true, nil
}

// statusErrorCause returns the label of the error in the metric of failed status writes.
func statusErrorCause(err error) string {
	if reason := apierrors.ReasonForError(err); reason != metav1.StatusReasonUnknown {
		return string(reason)
	}
	return "other"
}

// applyConfiguration converts the status entry e to the type that server-side apply takes.
func applyConfiguration(e resourceapi.AllocatedDeviceStatus) *resourceapply.AllocatedDeviceStatusApplyConfiguration {
	a := resourceapply.AllocatedDeviceStatus().WithDriver(e.Driver).WithPool(e.Pool).WithDevice(e.Device)
	if e.ShareID != nil {
		a.WithShareID(*e.ShareID)
	}
	if e.Data != nil {
		a.WithData(*e.Data)
	}
	for _, c := range e.Conditions {
		condition := metav1apply.Condition().WithType(c.Type).WithStatus(c.Status).WithReason(c.Reason).
			WithMessage(c.Message).WithLastTransitionTime(c.LastTransitionTime)
		a.WithConditions(condition)
	}
	return a
}

package claimstatus

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	maxTries     = 9 // the pauses between the tries add up to 64 s
	minPause     = 250 * time.Millisecond
	maxPause     = 30 * time.Second
	writeTimeout = 10 * time.Second // limit of one try
)

// Run writes statuses until the context ends. It first queues a write for every prepared claim,
// because a plugin that was killed may not have written them.
func (r *Reporter) Run(ctx context.Context, claims Claims) {
	if r.client == nil {
		return
	}
	stop := context.AfterFunc(ctx, r.queue.ShutDown)
	defer stop()
	prepared, err := claims.PreparedClaims()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Failed to list prepared claims; their statuses may be out of date")
	}
	for _, c := range prepared {
		name := types.NamespacedName{Namespace: c.Namespace, Name: c.Name}
		r.enqueue(kubeletplugin.NamespacedObject{NamespacedName: name, UID: c.ClaimUID})
	}
	for {
		c, ended := r.queue.Get()
		if ended {
			return
		}
		r.process(ctx, claims, c)
		r.queue.Done(c)
	}
}

// process makes one attempt to write the claim's status. If the attempt fails, it queues a retry.
// After the last retry it gives up.
func (r *Reporter) process(ctx context.Context, claims Claims, c kubeletplugin.NamespacedObject) {
	err := r.write(ctx, claims, c)
	if err == nil || ctx.Err() != nil {
		r.queue.Forget(c)
		return
	}
	r.onFailure(errorCause(err))
	logger := klog.FromContext(ctx).WithValues("claim", c.NamespacedName, "claimUID", c.UID)
	if r.queue.NumRequeues(c)+1 < maxTries {
		logger.V(2).Info("Failed to write claim status; retrying", "err", err)
		r.queue.AddRateLimited(c)
		return
	}
	logger.Error(err, "Failed to write claim status; giving up")
	r.queue.Forget(c)
}

// write makes one attempt to write the claim's status. It writes nothing if the claim is not
// prepared, was deleted or deallocated, or if its status is already as wanted.
func (r *Reporter) write(ctx context.Context, claims Claims, c kubeletplugin.NamespacedObject) error {
	devices, err := claims.PreparedDevices(c.UID)
	if err != nil {
		return fmt.Errorf("look up the claim's devices: %w", err)
	}
	if len(devices) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	api := r.client.ResourceV1().ResourceClaims(c.Namespace)
	current, known := r.takeRead(c.UID)
	if !known {
		claim, err := api.Get(ctx, c.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return fmt.Errorf("read the claim: %w", err)
		case claim.UID != c.UID || claim.Status.Allocation == nil:
			return nil
		}
		current = claim.Status.Devices
	}
	entries, changed, err := updateEntries(ownEntries(current), devices, r.lostBy(c.UID), metav1.Now())
	if err != nil || !changed {
		return err
	}
	patch, err := json.Marshal(map[string]any{
		"apiVersion": resourceapi.SchemeGroupVersion.String(), "kind": "ResourceClaim",
		// The UID makes the API server refuse the write if the claim was deleted and a new claim has its
		// name.
		"metadata": map[string]any{"name": c.Name, "namespace": c.Namespace, "uid": c.UID},
		"status":   map[string]any{"devices": entries},
	})
	if err != nil {
		return fmt.Errorf("encode status.devices: %w", err)
	}
	options := metav1.PatchOptions{FieldManager: device.DriverName, Force: ptr.To(true)}
	_, err = api.Patch(ctx, c.Name, types.ApplyPatchType, patch, options, "status")
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("apply status.devices: %w", err)
	}
	return nil
}

// takeRead returns the claim's status.devices if Prepare has just read it. Only the first write
// gets it, because later it may be out of date.
func (r *Reporter) takeRead(claim types.UID) (current []resourceapi.AllocatedDeviceStatus, known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	current, known = r.read[claim]
	delete(r.read, claim)
	return current, known
}

// ownEntries returns this driver's entries in a claim's status.devices.
func ownEntries(all []resourceapi.AllocatedDeviceStatus) []resourceapi.AllocatedDeviceStatus {
	return slices.DeleteFunc(slices.Clone(all), func(e resourceapi.AllocatedDeviceStatus) bool {
		return e.Driver != device.DriverName
	})
}

// errorCause returns the label of the error in the metric of failed status writes.
func errorCause(err error) string {
	if reason := apierrors.ReasonForError(err); reason != metav1.StatusReasonUnknown {
		return string(reason)
	}
	return "other"
}

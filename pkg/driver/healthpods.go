package driver

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
)

// podsTimeout limits the time to read one claim and to find its Pods.
const podsTimeout = 10 * time.Second

// reportToPods writes Events about queued health changes on the Pods whose devices are affected. It
// runs until the context ends.
func (d *Driver) reportToPods(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-d.healthReport.wake:
		}
		changes := d.healthReport.take()
		if d.newerLeads.Load() || len(changes) == 0 {
			continue
		}
		entries, err := d.preparer.Records.List()
		if err != nil {
			klog.FromContext(ctx).Error(err, "Failed to list prepared claims; their Pods get no health Events")
			continue
		}
		known := d.knownGPUs()
		for _, e := range entries {
			if err := d.reportToClaim(ctx, e, d.noticesFor(known, e, changes)); err != nil {
				klog.FromContext(ctx).V(2).Info("Failed to write health Events for claim", "claim", e.ClaimUID, "err", err)
			}
		}
	}
}

// noticesFor returns the Events to write about those health changes that affect a device of the
// claim with the checkpoint record e. The result is empty if none does.
func (d *Driver) noticesFor(known knownGPUs, e checkpoint.Entry, changes []health.Change) (notices notices) {
	for _, c := range changes {
		held := affectedDevice(c, known.gpu(c.Card), e.Devices)
		if held == "" {
			continue
		}
		kind, reason, message := corev1.EventTypeWarning, "GPU"+c.Finding.State.String(), unhealthyMessage(c)
		switch {
		case c.Finding.State == health.Healthy:
			reason, message = "GPUReport", fmt.Sprintf("%s: %s", c.Finding.Reason, c.Finding.Action)
		case c.Over:
			kind = corev1.EventTypeNormal
			reason, message = d.recoveryEvent(known, c)
		}
		notices.add(c, kind, reason, held+": "+message)
	}
	return notices
}

// affectedDevice returns the first of the device names in held that the change affects, or "" if it
// affects none. gpu is the GPU that the change is about.
func affectedDevice(c health.Change, gpu device.GPU, held []string) string {
	for _, name := range held {
		if n, ok := device.ParseName(name); ok && n.GPU == gpu.WholeName() && c.Affects(gpu, n) {
			return name
		}
	}
	return ""
}

// reportToClaim writes the notices as Events on each consumer of the claim.
func (d *Driver) reportToClaim(ctx context.Context, e checkpoint.Entry, notices notices) error {
	if len(notices) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, podsTimeout)
	defer cancel()
	r, found, err := d.preparer.Records.Load(e.ClaimUID)
	if err != nil || !found {
		return err
	}
	claim, err := d.client.ResourceV1().ResourceClaims(r.Namespace).Get(ctx, r.Name, metav1.GetOptions{})
	if err != nil || claim.UID != e.ClaimUID {
		return err
	}
	for _, object := range consumers(claim) {
		for _, n := range notices {
			d.events.AboutGPU(object, n.gpu, n.kind, n.reason, n.String())
		}
	}
	return nil
}

// consumers returns references to the Pods and PodGroups that the claim is reserved for. If any
// consumer is not a Pod, it adds the claim itself: the Pods of a PodGroup, for example, cannot be
// found without permission to list Pods.
func consumers(c *resourceapi.ResourceClaim) []*corev1.ObjectReference {
	var objects []*corev1.ObjectReference
	onlyPods := true
	for _, consumer := range c.Status.ReservedFor {
		resource := schema.GroupResource{Group: consumer.APIGroup, Resource: consumer.Resource}
		onlyPods = onlyPods && resource == corev1.Resource("pods")
		if kind, known := consumerKinds[resource]; known {
			version, kind := kind.ToAPIVersionAndKind()
			objects = append(objects, &corev1.ObjectReference{
				APIVersion: version, Kind: kind, Namespace: c.Namespace, Name: consumer.Name, UID: consumer.UID,
			})
		}
	}
	if !onlyPods {
		objects = append(objects, events.ClaimReference(c))
	}
	return objects
}

// consumerKinds are the kinds of objects that a claim can be reserved for: Pods, and PodGroups
// (KEP-5729). Kubernetes 1.36 serves PodGroups in another API version. For Events the version does
// not matter.
var consumerKinds = map[schema.GroupResource]schema.GroupVersionKind{
	corev1.Resource("pods"):                 corev1.SchemeGroupVersion.WithKind("Pod"),
	schedulingv1beta1.Resource("podgroups"): schedulingv1beta1.SchemeGroupVersion.WithKind("PodGroup"),
}

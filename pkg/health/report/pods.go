package report

import (
	"context"
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
)

// podsTimeout limits the time to read one claim and to find its Pods.
const podsTimeout = 10 * time.Second

// Run writes Events about queued changes on the Pods whose devices are affected. It runs until the
// context ends.
func (r *Reporter) Run(ctx context.Context) {
	for {
		var changes []change
		select {
		case <-ctx.Done():
			return
		case changes = <-r.pending:
		}
		if r.newerLeads() {
			continue
		}
		entries, err := r.records.List()
		if err != nil {
			klog.FromContext(ctx).Error(err, "Failed to list prepared claims; their Pods get no health Events")
			continue
		}
		for _, e := range entries {
			if err := r.reportToClaim(ctx, e, noticesFor(e, changes)); err != nil {
				klog.FromContext(ctx).V(2).Info("Failed to write health Events for claim", "claim", e.ClaimUID, "err", err)
			}
		}
	}
}

// noticesFor returns what to say about those changes that affect a device of the claim with the
// checkpoint record e. The result is empty if none does.
func noticesFor(e checkpoint.Entry, changes []change) (notices notices) {
	for _, c := range changes {
		if held := c.firstAffected(e.Devices); held != "" {
			notices.add(c, held+": "+c.message)
		}
	}
	return notices
}

// firstAffected returns the first of the device names that the change affects, or "" if it affects
// none.
func (c change) firstAffected(devices []string) string {
	for _, name := range devices {
		if n, ok := device.ParseName(name); ok && n.GPU == c.gpu.WholeName() && c.Affects(c.gpu, n) {
			return name
		}
	}
	return ""
}

// reportToClaim writes the notices as Events on each consumer of the claim.
func (r *Reporter) reportToClaim(ctx context.Context, e checkpoint.Entry, notices notices) error {
	if len(notices) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, podsTimeout)
	defer cancel()
	record, found, err := r.records.Load(e.ClaimUID)
	if err != nil || !found {
		return err
	}
	claim, err := r.client.ResourceV1().ResourceClaims(record.Namespace).Get(ctx, record.Name, metav1.GetOptions{})
	if err != nil || claim.UID != e.ClaimUID {
		return err
	}
	for _, object := range consumers(claim) {
		notices.write(r.events, object)
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

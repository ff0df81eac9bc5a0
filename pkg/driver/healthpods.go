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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
)

// podsTimeout bounds looking up the Pods of one claim.
const podsTimeout = 10 * time.Second

// tellPods writes Events on the Pods that hold what changed, until the context ends.
func (d *Driver) tellPods(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-d.healthTold.wake:
		}
		changes := d.healthTold.take()
		if d.superseded.Load() || len(changes) == 0 {
			continue
		}
		entries, err := d.preparer.Records.List()
		if err != nil {
			klog.FromContext(ctx).Error(err, "Could not tell any Pod how the devices are that it holds")
			continue
		}
		known := d.cards()
		for _, e := range entries {
			if err := d.tellClaim(ctx, e, d.noticesFor(known, e, changes)); err != nil {
				klog.FromContext(ctx).V(2).Info("Could not tell the Pods of a claim how its devices are", "claim", e.ClaimUID, "err", err)
			}
		}
	}
}

// noticesFor are about the changes that reach a device of the claim.
func (d *Driver) noticesFor(known cards, e checkpoint.Entry, changes []health.Change) (notices notices) {
	for _, c := range changes {
		held := reached(c, known.of(c.Card), e.Devices)
		if held == "" {
			continue
		}
		kind, reason, message := corev1.EventTypeWarning, "GPU"+c.Finding.State.String(), illMessage(c)
		switch {
		case c.Finding.State == health.Healthy:
			reason, message = "GPUReport", fmt.Sprintf("%s: %s", c.Finding.Reason, c.Finding.Action)
		case c.Over:
			kind = corev1.EventTypeNormal
			reason, message = d.recovered(known, c)
		}
		notices.add(c, kind, reason, held+": "+message)
	}
	return notices
}

// reached is the first of the devices that the change reaches.
func reached(c health.Change, gpu device.GPU, held []string) string {
	for _, name := range held {
		if n, ok := device.ParseName(name); ok && n.GPU == gpu.WholeName() && c.Affected(gpu, n) {
			return name
		}
	}
	return ""
}

// tellClaim writes Events on the Pods of a claim.
func (d *Driver) tellClaim(ctx context.Context, e checkpoint.Entry, notices notices) error {
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
			d.events.health(object, n)
		}
	}
	return nil
}

// consumers are the objects that show their users how a claim's devices are: those for which it is
// reserved. Only a Pod is named there itself. For all others the claim is one more of the objects:
// the Pods of a PodGroup, say, cannot be known without the right to list Pods.
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
		objects = append(objects, claimReference(c))
	}
	return objects
}

// consumerKinds are the kinds of what a claim can be reserved for: Pods, and PodGroups (KEP-5729).
// Kubernetes 1.36 serves PodGroups in another version of their group, which matters to no reader of
// Events.
var consumerKinds = map[schema.GroupResource]schema.GroupVersionKind{
	corev1.Resource("pods"):                 corev1.SchemeGroupVersion.WithKind("Pod"),
	schedulingv1beta1.Resource("podgroups"): schedulingv1beta1.SchemeGroupVersion.WithKind("PodGroup"),
}

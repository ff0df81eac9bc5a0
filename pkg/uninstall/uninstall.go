// Package uninstall removes the driver from the cluster and from its nodes.
//
// [Run] is the work of the chart's pre-delete hook: it deletes the plugin's DaemonSet, and refuses
// while claims hold devices. [Cleaner] is the work of each plugin that ends because its DaemonSet
// was deleted: it removes from its node what the driver made there, unless a claim is prepared or
// another plugin instance runs. [InstanceLock] tells the instances of a node about each other.
//
// The package deletes no claims and no Pods.
package uninstall

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// ClaimsHeldError is returned if the driver cannot be uninstalled because claims are allocated its
// devices. Claims has the claims' names.
type ClaimsHeldError struct{ Claims []string }

func (e *ClaimsHeldError) Error() string {
	const shown = 10
	list := e.Claims
	more := ""
	if len(list) > shown {
		more = fmt.Sprintf(" and %d more", len(list)-shown)
		list = list[:shown]
	}
	return fmt.Sprintf("%d ResourceClaims hold devices of %s: %s%s. Nothing was removed."+
		" To uninstall, delete their Pods and claims and uninstall again."+
		" To keep the release, which helm has marked as uninstalling, run helm rollback to its last revision."+
		" To uninstall now and leave on the nodes what running Pods need, use --no-hooks",
		len(e.Claims), device.DriverName, strings.Join(list, ", "), more)
}

// Run deletes the DaemonSet and waits until its Pods are gone. If claims are allocated
// devices of this driver, it fails unless force is set. Each Pod cleans up its node if no claim is
// prepared there. The Pods need their service account for that, so the caller must delete the rest
// of the installation afterwards.
func Run(ctx context.Context, client kubernetes.Interface, namespace, daemonSet string, force bool) error {
	held, err := heldClaims(ctx, client)
	if err != nil {
		return err
	}
	logger := klog.FromContext(ctx)
	if len(held) > 0 {
		refusal := &ClaimsHeldError{Claims: held}
		if !force {
			return refusal
		}
		logger.Info("Uninstalling although claims hold devices; files that their Pods need stay on the nodes", "claims", held)
	}
	daemonSets := client.AppsV1().DaemonSets(namespace)
	err = daemonSets.Delete(ctx, daemonSet, metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationForeground)})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete DaemonSet %s/%s: %w", namespace, daemonSet, err)
	}
	logger.Info("Waiting for the plugin's Pods to finish", "daemonSet", klog.KRef(namespace, daemonSet))
	err = wait.PollUntilContextCancel(ctx, 500*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		_, err := daemonSets.Get(ctx, daemonSet, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return true, nil
		}
		return false, nil // after other errors, ask again until the context ends
	})
	if err != nil {
		return fmt.Errorf("wait until DaemonSet %s/%s and its Pods are gone: %w%s",
			namespace, daemonSet, err, remainingPods(context.WithoutCancel(ctx), client, namespace, daemonSet))
	}
	return nil
}

// remainingPods returns a text about the DaemonSet's Pods that still exist, with their nodes. A Pod
// on an unreachable node exists until an admin deletes the Node.
func remainingPods(ctx context.Context, client kubernetes.Interface, namespace, daemonSet string) string {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	pods, err := client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Sprintf(" (failed to list the remaining Pods: %v)", err)
	}
	var left []string
	for i := range pods.Items {
		p := &pods.Items[i]
		if owner := metav1.GetControllerOf(p); owner != nil && owner.Kind == "DaemonSet" && owner.Name == daemonSet {
			left = append(left, fmt.Sprintf("%s on node %s", p.Name, p.Spec.NodeName))
		}
	}
	if len(left) == 0 {
		return ""
	}
	return fmt.Sprintf("; remaining Pods: %s. If a node is gone for good, delete its Node object and uninstall again",
		strings.Join(left, ", "))
}

func heldClaims(ctx context.Context, client kubernetes.Interface) ([]string, error) {
	var held []string
	pages := pager.New(func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
		return client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, opts)
	})
	err := pages.EachListItem(ctx, metav1.ListOptions{}, func(o runtime.Object) error {
		if c, ok := o.(*resourceapi.ResourceClaim); ok && holdsOurDevices(c) {
			held = append(held, klog.KObj(c).String())
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list ResourceClaims: %w", err)
	}
	return held, nil
}

func holdsOurDevices(c *resourceapi.ResourceClaim) bool {
	return c.Status.Allocation != nil &&
		slices.ContainsFunc(c.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
			return r.Driver == device.DriverName
		})
}

package driver

import (
	"context"
	"fmt"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

// ClaimsHeldError refuses an uninstallation while claims hold devices of ours.
type ClaimsHeldError struct{ Claims []string }

func (e *ClaimsHeldError) Error() string {
	const shown = 10
	list := e.Claims
	more := ""
	if len(list) > shown {
		more = fmt.Sprintf(" and %d more", len(list)-shown)
		list = list[:shown]
	}
	return fmt.Sprintf("%d ResourceClaims hold devices of %s: %s%s. Nothing was removed. Delete their Pods and claims and uninstall again; or keep the release, which helm has noted as uninstalling, with helm rollback to its last revision; or uninstall with --no-hooks, which leaves on the nodes what running Pods need",
		len(e.Claims), DriverName, strings.Join(list, ", "), more)
}

// Uninstall removes the DaemonSet in an orderly way: it refuses while claims hold devices (unless forced), then deletes the DaemonSet in the foreground
// and waits until its Pods are gone. Each of them, seeing its DaemonSet deleted and no claim held, removes what it made on its node; that needs the
// service account, so the caller deletes the rest of the installation only afterwards.
func Uninstall(ctx context.Context, client kubernetes.Interface, namespace, daemonSet string, force bool) error {
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
		logger.Info("Uninstalling although claims hold devices; the nodes keep what their Pods need", "claims", held)
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
		return false, nil // any other error is worth another try until the deadline
	})
	if err != nil {
		return fmt.Errorf("wait until DaemonSet %s/%s and its Pods are gone: %w%s", namespace, daemonSet, err, remaining(context.WithoutCancel(ctx), client, namespace, daemonSet))
	}
	return nil
}

// remaining names the DaemonSet's Pods that do not end, and where: a Pod on a node that does not answer stays until someone says that the node is gone.
func remaining(ctx context.Context, client kubernetes.Interface, namespace, daemonSet string) string {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	pods, err := client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Sprintf(" (which Pods are left cannot be told: %v)", err)
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
	return fmt.Sprintf("; left are %s: if a node is gone for good, delete its Node object, and uninstall again", strings.Join(left, ", "))
}

func heldClaims(ctx context.Context, client kubernetes.Interface) ([]string, error) {
	var held []string
	opts := metav1.ListOptions{Limit: 500}
	for {
		list, err := client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, opts)
		if err != nil {
			return nil, fmt.Errorf("list ResourceClaims: %w", err)
		}
		for i := range list.Items {
			if holdsOurs(&list.Items[i]) {
				held = append(held, klog.KObj(&list.Items[i]).String())
			}
		}
		if opts.Continue = list.Continue; opts.Continue == "" {
			return held, nil
		}
	}
}

func holdsOurs(c *resourceapi.ResourceClaim) bool {
	if c.Status.Allocation == nil {
		return false
	}
	for _, r := range c.Status.Allocation.Devices.Results {
		if r.Driver == DriverName {
			return true
		}
	}
	return false
}

package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/node"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

const (
	namespace      = "bench"
	publishTimeout = 30 * time.Second
)

// clientFor has the same limits and the same encoding as the plugin's, so that the floor's GET is the plugin's.
func clientFor(c *cluster.Cluster) (kubernetes.Interface, error) {
	config, err := c.RESTConfig()
	if err != nil {
		return nil, err
	}
	config.QPS, config.Burst = 1000, 1000
	return kubernetes.NewForConfig(config)
}

// prepareNamespace makes one in which claims may look at devices that others hold: that is how many can be held on eight GPUs.
func (b *bench) prepareNamespace(ctx context.Context) error {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace, Labels: map[string]string{resourceapi.DRAAdminNamespaceLabelKey: "true"}}}
	_, err := b.client.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{})
	return err
}

// claim is one that has been allocated a device of the node, as the scheduler would.
func (b *bench) claim(ctx context.Context, n *node.Node, name, device string, admin bool) (*resourceapi.ResourceClaim, error) {
	exactly := &resourceapi.ExactDeviceRequest{DeviceClassName: driver.DriverName}
	result := resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: driver.DriverName, Pool: n.Name, Device: device}
	if admin {
		exactly.AdminAccess, result.AdminAccess = ptr.To(true), ptr.To(true)
	}
	claims := b.client.ResourceV1().ResourceClaims(namespace)
	c := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace},
		Spec:       resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: exactly}}}},
	}
	c, err := claims.Create(ctx, c, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("create claim %s: %w", name, err)
	}
	// Not for a Pod: there is none, and the controller of claims would take a Pod's reservation away again.
	c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{APIGroup: "bench", Resource: "runs", Name: name, UID: c.UID}}
	c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{result}}}
	if c, err = claims.UpdateStatus(ctx, c, metav1.UpdateOptions{}); err != nil {
		return nil, fmt.Errorf("allocate claim %s: %w", name, err)
	}
	return c, nil
}

// slicesOf are the node's, as the API server has them, by name.
func (b *bench) slicesOf(ctx context.Context, n *node.Node) (map[string]resourceapi.ResourceSlice, error) {
	list, err := b.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + n.Name})
	if err != nil {
		return nil, err
	}
	slices := map[string]resourceapi.ResourceSlice{}
	for _, s := range list.Items {
		slices[s.Name] = s
	}
	return slices, nil
}

// published waits until the node's pool is complete.
func (b *bench) published(ctx context.Context, n *node.Node) error {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	for {
		slices, err := b.slicesOf(ctx, n)
		if err == nil && isComplete(slices) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until node %s has published its devices: %w (its plugin's output: %s)", n.Name, ctx.Err(), n.Log)
		case <-time.After(pause):
		}
	}
}

// requests are what the API server has answered so far about a resource, by verb. Dry runs are not counted: they store nothing.
func (b *bench) requests(ctx context.Context, resource string) (map[string]int, error) {
	raw, err := b.client.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the API server's metrics: %w", err)
	}
	counts := map[string]int{}
	for line := range strings.Lines(string(raw)) {
		labels, ok := strings.CutPrefix(line, "apiserver_request_total{")
		if !ok || !strings.Contains(labels, `resource="`+resource+`"`) || !strings.Contains(labels, `dry_run=""`) {
			continue
		}
		_, verb, _ := strings.Cut(labels, `verb="`)
		verb, _, _ = strings.Cut(verb, `"`)
		_, value, _ := strings.Cut(labels, "} ")
		n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if err != nil {
			return nil, fmt.Errorf("read the API server's metrics: %q: %w", line, err)
		}
		counts[verb] += int(n)
	}
	return counts, nil
}

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

// clientFor returns a client with the plugin's rate limits and encoding. With it a GET by the
// benchmark's own minimal Prepare (see type floor) costs the same as a GET by the plugin.
func clientFor(c *cluster.Cluster) (kubernetes.Interface, error) {
	config, err := c.RESTConfig()
	if err != nil {
		return nil, err
	}
	config.QPS, config.Burst = 1000, 1000
	return kubernetes.NewForConfig(config)
}

// prepareNamespace creates a namespace that allows admin access. With admin access, many claims can
// use the same eight GPUs.
func (b *bench) prepareNamespace(ctx context.Context) error {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: namespace, Labels: map[string]string{resourceapi.DRAAdminNamespaceLabelKey: "true"},
	}}
	_, err := b.client.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{})
	return err
}

// claim creates a claim and allocates the device to it, as the scheduler would. admin requests
// admin access.
func (b *bench) claim(ctx context.Context, n *node.Node, name, device string, admin bool) (*resourceapi.ResourceClaim, error) {
	exactly := &resourceapi.ExactDeviceRequest{DeviceClassName: driver.DriverName}
	result := resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: driver.DriverName, Pool: n.Name, Device: device}
	if admin {
		exactly.AdminAccess, result.AdminAccess = ptr.To(true), ptr.To(true)
	}
	claims := b.client.ResourceV1().ResourceClaims(namespace)
	c := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: exactly}},
		}},
	}
	c, err := claims.Create(ctx, c, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("create claim %s: %w", name, err)
	}
	// The claim is reserved for an object that is no Pod. The claim controller removes reservations
	// for Pods that do not exist.
	c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{APIGroup: "bench", Resource: "runs", Name: name, UID: c.UID}}
	c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{result},
	}}
	if c, err = claims.UpdateStatus(ctx, c, metav1.UpdateOptions{}); err != nil {
		return nil, fmt.Errorf("allocate claim %s: %w", name, err)
	}
	return c, nil
}

// slicesOf returns the node's ResourceSlices by name, as the API server has them.
func (b *bench) slicesOf(ctx context.Context, n *node.Node) (map[string]resourceapi.ResourceSlice, error) {
	list, err := b.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{
		FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + n.Name,
	})
	if err != nil {
		return nil, err
	}
	slices := map[string]resourceapi.ResourceSlice{}
	for _, s := range list.Items {
		slices[s.Name] = s
	}
	return slices, nil
}

// published waits until all slices of the node's pool are in the API server.
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

// requests returns, by verb, how many requests for a resource the API server has answered since its
// start. It leaves out dry runs, because they store nothing.
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

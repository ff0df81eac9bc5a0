package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/report"
)

// workers is how many requests are under way while objects are made.
const workers = 16

// measure goes through layouts and sizes; nodes of one size grow into those of the next.
func (s *scale) measure(ctx context.Context) error {
	for _, of := range []struct {
		layout  string
		classes []string
	}{{wholeOnly, []string{wholeClass}}, {static, []string{migClass}}, {everyShape, []string{wholeClass, migClass}}} {
		there := 0
		for _, size := range s.nodes {
			if err := s.grow(ctx, s.layout[of.layout], there, size); err != nil {
				return err
			}
			there = size
			for _, class := range of.classes {
				if err := s.allocate(ctx, key{of.layout, class, size}); err != nil {
					return err
				}
			}
		}
		// Claims keep what they were allocated; without its node it is in nobody's way.
		if err := s.client.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
			return err
		}
		if err := s.client.CoreV1().Nodes().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
			return err
		}
		s.generation++
	}
	return nil
}

// nodeName is another one for each layout: nobody's cache mixes them up.
func (s *scale) nodeName(i int) string { return fmt.Sprintf("n%d-%04d", s.generation, i) }

func (s *scale) grow(ctx context.Context, l layout, from, to int) error {
	fmt.Fprintf(os.Stderr, "making nodes %d to %d\n", from, to)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(workers)
	room := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1000"), corev1.ResourceMemory: resource.MustParse("1Ti"), corev1.ResourcePods: resource.MustParse("10000")}
	for i := from; i < to; i++ {
		group.Go(func() error {
			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: s.nodeName(i)}, Status: corev1.NodeStatus{
				Capacity: room, Allocatable: room, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
			}}
			if _, err := s.client.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{}); err != nil {
				return err
			}
			// The API server taints a new Node as not ready, and nobody here would take that away.
			noTaints := []byte(`{"spec": {"taints": null}}`)
			if _, err := s.client.CoreV1().Nodes().Patch(ctx, n.Name, types.MergePatchType, noTaints, metav1.PatchOptions{}); err != nil {
				return err
			}
			return s.publish(ctx, n.Name, l)
		})
	}
	return group.Wait()
}

// allocate makes claims and a Pod for each, and takes the time from the first Pod that is bound to the last. How long each had to wait is of no interest:
// they all come at once.
func (s *scale) allocate(ctx context.Context, k key) error {
	ns, err := s.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "scale-"}}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Minute)
	defer cancel()
	binds := make(chan string, 4*s.claims)
	if err := s.follow(ctx, ns.Name, binds); err != nil {
		return err
	}
	group, making := errgroup.WithContext(ctx)
	group.SetLimit(workers)
	go func() {
		for i := range s.claims {
			group.Go(func() error { return s.claim(making, ns.Name, fmt.Sprintf("claim-%d", i), k.class) })
		}
	}()
	var first, last time.Time
	bound := map[string]bool{}
	for len(bound) < s.claims {
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d of %d Pods are bound: %w", len(bound), s.claims, ctx.Err())
		case <-making.Done():
			if err := group.Wait(); err != nil {
				return err
			}
		case pod := <-binds:
			if !bound[pod] {
				bound[pod] = true
				last = time.Now()
				if first.IsZero() {
					first = last
				}
			}
		}
	}
	took := last.Sub(first)
	each := took / time.Duration(max(s.claims-1, 1))
	s.rates[k] = float64(s.claims-1) / took.Seconds()
	s.report.Add(fmt.Sprintf("a claim of %s, %d nodes", k.class, k.nodes), k.layout, &report.Samples{All: []time.Duration{each}})
	fmt.Fprintf(os.Stderr, "%s, %d nodes, %s: %.1f claims a second\n", k.layout, k.nodes, k.class, s.rates[k])
	return nil
}

// follow tells of the Pods that are bound, some more than once.
func (s *scale) follow(ctx context.Context, namespace string, binds chan<- string) error {
	factory := informers.NewSharedInformerFactoryWithOptions(s.client, 0, informers.WithNamespace(namespace))
	pods := factory.Core().V1().Pods().Informer()
	see := func(object any) {
		if pod, ok := object.(*corev1.Pod); ok && pod.Spec.NodeName != "" {
			select {
			case binds <- pod.Name:
			case <-ctx.Done():
			}
		}
	}
	_, err := pods.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: see, UpdateFunc: func(_, now any) { see(now) }})
	factory.StartWithContext(ctx)
	return err
}

// claim makes a claim and its Pod.
func (s *scale) claim(ctx context.Context, namespace, name, class string) error {
	request := &resourceapi.ExactDeviceRequest{DeviceClassName: class}
	if class == migClass {
		request.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.attributes['gpu.nvidia.com'].profile == '%s'", smallest),
		}}}
	}
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.ResourceClaimSpec{
		Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: request}}},
	}}
	if _, err := s.client.ResourceV1().ResourceClaims(namespace).Create(ctx, c, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create claim %s: %w", name, err)
	}
	off := false
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{
		AutomountServiceAccountToken: &off,
		ResourceClaims:               []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &name}},
		Containers:                   []corev1.Container{{Name: "c", Image: "none", Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpu"}}}}},
	}}
	for {
		_, err := s.client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{})
		if err == nil {
			return nil
		}
		// A new namespace has no ServiceAccount for a moment.
		select {
		case <-ctx.Done():
			return fmt.Errorf("create Pod %s: %w", name, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

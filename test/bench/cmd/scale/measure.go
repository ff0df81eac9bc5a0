package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/report"
)

// workers is how many requests are under way while objects are made.
const workers = 16

// measure goes through layouts and sizes; nodes of one size grow into those of the next.
func (s *scale) measure(ctx context.Context) error {
	for i, layout := range s.layouts {
		if i > 0 {
			if err := s.clear(ctx); err != nil {
				return err
			}
		}
		if err := s.measureLayout(ctx, layout); err != nil {
			return err
		}
	}
	return nil
}

// clear removes nodes and slices. Claims keep what they were allocated; without its node it is in nobody's way. Thousands of slices take the API server longer than
// it gives itself for one request.
func (s *scale) clear(ctx context.Context) error {
	err := wait.PollUntilContextTimeout(ctx, time.Second, 10*time.Minute, true, func(ctx context.Context) (bool, error) {
		err := s.client.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
		if apierrors.IsTimeout(err) || apierrors.IsServerTimeout(err) {
			return false, nil
		}
		return err == nil, err
	})
	if err != nil {
		return fmt.Errorf("remove the slices: %w", err)
	}
	s.generation++
	return s.client.CoreV1().Nodes().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
}

// measureLayout ends with the size at which claims of all classes took too long.
func (s *scale) measureLayout(ctx context.Context, layout string) error {
	there, classes := 0, slices.Clone(classesOf[layout])
	for _, size := range s.nodes {
		if len(classes) == 0 {
			return nil
		}
		if err := s.grow(ctx, s.layout[layout], there, size); err != nil {
			return err
		}
		there = size
		if err := s.settle(ctx); err != nil {
			return err
		}
		for _, class := range slices.Clone(classes) {
			inTime, err := s.allocate(ctx, key{s.scheduler, layout, class, size})
			if err != nil {
				return err
			}
			if !inTime {
				classes = slices.DeleteFunc(classes, func(c string) bool { return c == class })
			}
		}
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
// they all come at once. It says whether all were bound in time.
func (s *scale) allocate(ctx context.Context, k key) (inTime bool, err error) {
	ns, err := s.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "scale-"}}, metav1.CreateOptions{})
	if err != nil {
		return false, err
	}
	all := ctx
	ctx, cancel := context.WithTimeout(ctx, s.limit)
	defer cancel()
	binds := make(chan string, 4*s.claims)
	if err := s.follow(ctx, ns.Name, binds); err != nil {
		return false, err
	}
	group, making := errgroup.WithContext(ctx)
	group.SetLimit(workers)
	group.Go(func() error {
		for i := range s.claims {
			group.Go(func() error { return s.claim(making, ns.Name, fmt.Sprintf("claim-%d", i), k.class) })
		}
		return nil
	})
	profiled := s.profile(all, k)
	before, err := s.processorTime(all)
	if err != nil {
		return false, err
	}
	first, last, bound, err := s.bound(ctx, making, binds)
	if err != nil {
		return false, errors.Join(err, group.Wait())
	}
	after, err := s.processorTime(all)
	if err := errors.Join(err, <-profiled); err != nil {
		return false, err
	}
	if inTime = bound == s.claims; !inTime {
		last = time.Now()
		_ = group.Wait() // those that the end of the time has stopped say so
		if err := s.client.CoreV1().Pods(ns.Name).DeleteCollection(all, metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
			return false, err
		}
	}
	if bound < 2 {
		fmt.Fprintf(os.Stderr, "%s, %s, %d nodes, %s: %d claims in %s\n", k.scheduler, k.layout, k.nodes, k.class, bound, s.limit)
		return inTime, nil
	}
	took := last.Sub(first)
	c := cost{perSecond: float64(bound-1) / took.Seconds(), processor: (after - before) / time.Duration(bound)}
	s.costs[k] = c
	work, by := fmt.Sprintf("a claim of %s, %d nodes", k.class, k.nodes), k.scheduler+", "+k.layout
	s.report.Add(work, by, &report.Samples{All: []time.Duration{took / time.Duration(bound-1)}})
	s.report.Add(work+": the scheduler's processor", by, &report.Samples{All: []time.Duration{c.processor}})
	fmt.Fprintf(os.Stderr, "%s, %s, %d nodes, %s: %.1f claims a second, %d of %d, %s of the scheduler's processor each\n",
		k.scheduler, k.layout, k.nodes, k.class, c.perSecond, bound, s.claims, c.processor)
	return inTime, nil
}

// bound counts Pods until all are bound or the time is over.
func (s *scale) bound(ctx, making context.Context, binds <-chan string) (first, last time.Time, _ int, err error) {
	seen := map[string]bool{}
	made := making.Done()
	for len(seen) < s.claims {
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return first, last, len(seen), nil
			}
			return first, last, len(seen), ctx.Err()
		case <-made: // before the time is over, only by a mistake
			if made = nil; ctx.Err() == nil {
				return first, last, len(seen), context.Cause(making)
			}
		case pod := <-binds:
			if !seen[pod] {
				seen[pod] = true
				last = time.Now()
				if first.IsZero() {
					first = last
				}
			}
		}
	}
	return first, last, len(seen), nil
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

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
)

// workers is how many objects are created in parallel.
const workers = 16

// poolLabel is the label that says whether a node is an additional node with policy layout.pool.
// Its values are partitionsPool and wholePool.
const (
	poolLabel      = "pool"
	partitionsPool = "partitions"
	wholePool      = "whole"
)

// measure measures each layout (see type layout) in every round. Each round begins with another
// layout, because objects accumulate in the cluster and slow down the later ones.
func (s *scale) measure(ctx context.Context) error {
	for round := range s.rounds {
		for i := range s.layouts {
			if s.generation > 0 {
				if err := s.clear(ctx); err != nil {
					return err
				}
			}
			s.generation++
			if err := s.measureLayout(ctx, s.layouts[(round+i)%len(s.layouts)]); err != nil {
				return err
			}
		}
	}
	return nil
}

// clear removes all nodes and slices. It leaves the claims, whose allocations do no harm without
// the nodes. The API server limits the time of a request, so clear may need several.
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
	return s.client.CoreV1().Nodes().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
}

// measureLayout creates nodes with layout l until there are as many as the first of s.nodes,
// measures the layout's claims, and goes on with the next number. It leaves out kinds of claims
// that exceeded the time limit with fewer nodes.
func (s *scale) measureLayout(ctx context.Context, l layout) error {
	there, claims := 0, slices.Clone(l.claims)
	for _, size := range s.nodes {
		if len(claims) == 0 || l.name == dynamic && size > s.mostDynamic {
			return nil
		}
		if err := s.grow(ctx, l, there, l.total(size)); err != nil {
			return err
		}
		there = l.total(size)
		if err := s.settle(ctx); err != nil {
			return err
		}
		for _, c := range slices.Clone(claims) {
			inTime, err := s.allocate(ctx, key{s.version, l.name, c.name, size}, c)
			if err != nil {
				return err
			}
			if !inTime {
				claims = slices.DeleteFunc(claims, func(late claim) bool { return late == c })
			}
		}
	}
	return nil
}

// nodeName returns the name of node number i in the current layout. Names differ between layouts,
// so that no cache confuses their nodes.
func (s *scale) nodeName(i int) string { return fmt.Sprintf("n%d-%04d", s.generation, i) }

func (s *scale) grow(ctx context.Context, l layout, from, to int) error {
	fmt.Fprintf(os.Stderr, "%s, %s: making nodes %d to %d\n", s.version, l.name, from, to)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(workers)
	room := corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("1000"), corev1.ResourceMemory: resource.MustParse("1Ti"),
		corev1.ResourcePods: resource.MustParse("10000"),
	}
	for i := from; i < to; i++ {
		group.Go(func() error {
			pool, policy := wholePool, l.policy
			if l.inPool(i) {
				pool, policy = partitionsPool, l.pool
			}
			n := &corev1.Node{
				ObjectMeta: metav1.ObjectMeta{Name: s.nodeName(i), Labels: map[string]string{poolLabel: pool}},
				Status: corev1.NodeStatus{
					Capacity: room, Allocatable: room, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
				},
			}
			if _, err := s.client.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{}); err != nil {
				return err
			}
			// The API server taints a new Node as not ready, and no controller here would remove the taint.
			noTaints := []byte(`{"spec": {"taints": null}}`)
			if _, err := s.client.CoreV1().Nodes().Patch(ctx, n.Name, types.MergePatchType, noTaints, metav1.PatchOptions{}); err != nil {
				return err
			}
			return s.publish(ctx, n.Name, s.published[policy])
		})
	}
	return group.Wait()
}

// allocate creates s.claims claims of kind c, each with a Pod. It measures the time from the first
// bound Pod to the last. inTime is false if not all Pods were bound within the time limit.
func (s *scale) allocate(ctx context.Context, k key, c claim) (inTime bool, err error) {
	ns, err := s.client.CoreV1().Namespaces().Create(ctx,
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "scale-"}}, metav1.CreateOptions{})
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
			group.Go(func() error { return s.claim(making, ns.Name, fmt.Sprintf("claim-%d", i), c) })
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
		_ = group.Wait() // its errors do not count: the time limit canceled its requests
		if err := s.client.CoreV1().Pods(ns.Name).DeleteCollection(all, metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
			return false, err
		}
	}
	if bound < 2 {
		fmt.Fprintf(os.Stderr, "%s, %s, %d nodes, %s: %d claims in %s\n", k.kubernetes, k.layout, k.nodes, k.claim, bound, s.limit)
		return inTime, nil
	}
	if s.costs[k] == nil {
		s.costs[k] = &costs{}
	}
	elapsed, processor := last.Sub(first)/time.Duration(bound-1), (after-before)/time.Duration(bound)
	s.costs[k].elapsed.All = append(s.costs[k].elapsed.All, elapsed)
	s.costs[k].processor.All = append(s.costs[k].processor.All, processor)
	fmt.Fprintf(os.Stderr, "%s, %s, %d nodes, %s: %.1f claims a second, %d of %d, %s of the scheduler's processor each\n",
		k.kubernetes, k.layout, k.nodes, k.claim, 1/elapsed.Seconds(), bound, s.claims, processor)
	return inTime, nil
}

// bound waits until all Pods are bound or ctx ends. It returns the times of the first and the last
// bound Pod, and the number of bound Pods. binds delivers the Pods' names.
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
		case <-made: // before the end of the time only on an error
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

// follow watches the namespace and sends the name of each bound Pod to the channel binds. It may
// send a name more than once.
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

// claim creates a claim of the kind that the parameter wanted describes, and a Pod that uses the
// claim.
func (s *scale) claim(ctx context.Context, namespace, name string, wanted claim) error {
	request := &resourceapi.ExactDeviceRequest{DeviceClassName: wanted.class}
	if wanted.profile != "" {
		request.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.attributes['gpu.nvidia.com'].profile == '%s'", wanted.profile),
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
		Containers: []corev1.Container{{
			Name: "c", Image: "none",
			Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpu"}}},
		}},
	}}
	if wanted.avoidsPool {
		pod.Spec.NodeSelector = map[string]string{poolLabel: wholePool}
	}
	for {
		_, err := s.client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{})
		if err == nil {
			return nil
		}
		// Creating a Pod fails until the new namespace has its default ServiceAccount, so try again.
		select {
		case <-ctx.Done():
			return fmt.Errorf("create Pod %s: %w", name, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/node"
)

// These are the names of two layouts (see type layout): the one with which others are compared, and
// the one that runs on fewer nodes.
const (
	whole   = "whole"
	dynamic = "dynamic"
)

// These are the device classes that the chart installs.
const (
	wholeClass = "gpu.nvidia.com"
	migClass   = "mig.nvidia.com"
)

// layout is one way to set up the nodes of a cluster: which devices they publish, and which kinds
// of claims are measured there.
type layout struct {
	name string
	// policy is the MIG policy of the plugins on the nodes. If pool is not empty, the layout has a
	// tenth as many additional nodes, and pool is their MIG policy.
	policy, pool string
	claims       []claim
	// limited is set when the rate of allocations of whole GPUs must be at least leastRate in this
	// layout. The benchmark reports a goal for it.
	limited bool
}

// claim is one kind of claim. All claims of a measurement are of the same kind.
type claim struct {
	name, class, profile string
	// avoidsPool gives the claim's Pod a node selector that excludes the additional nodes with policy
	// layout.pool.
	avoidsPool bool
}

var (
	aGPU        = claim{name: "a GPU", class: wholeClass}
	outsidePool = claim{name: "a GPU outside the pool", class: wholeClass, avoidsPool: true}
	aPartition  = claim{name: "1g.10gb", class: migClass, profile: "1g.10gb"}
)

var layouts = []layout{
	{name: whole, policy: "off", claims: []claim{aGPU}},
	{name: "default", policy: "static", claims: []claim{aGPU}, limited: true},
	{
		name: "mixed", policy: "static", pool: "{policy: dynamic, profiles: [1g.10gb, 3g.40gb]}",
		claims: []claim{aGPU, outsidePool}, limited: true,
	},
	{name: dynamic, policy: "dynamic", claims: []claim{aGPU, aPartition}},
}

// Of each poolOf nodes, one is an additional node with policy layout.pool.
const poolOf = 11

// total returns the number of nodes including the additional ones. size is the number without them.
func (l layout) total(size int) int {
	if l.pool == "" {
		return size
	}
	return size + size/(poolOf-1)
}

// inPool reports whether node number i is an additional node with policy layout.pool. These nodes
// are spread evenly among the others.
func (l layout) inPool(i int) bool { return l.pool != "" && i%poolOf == poolOf-1 }

// model has the specs of the ResourceSlices that a plugin publishes for one node, in their order.
type model []resourceapi.ResourceSliceSpec

func (s *scale) classes(ctx context.Context) error {
	for class, kind := range map[string]string{wholeClass: "gpu", migClass: "mig"} {
		_, err := s.client.ResourceV1().DeviceClasses().Create(ctx, &resourceapi.DeviceClass{
			ObjectMeta: metav1.ObjectMeta{Name: class},
			Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
				Expression: fmt.Sprintf("device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == '%s'", kind),
			}}}},
		}, metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("create the DeviceClass %s: %w", class, err)
		}
	}
	return nil
}

// models runs the plugin under each MIG policy, and stores the slices that it publishes in
// s.published.
func (s *scale) models(ctx context.Context, o node.Options) error {
	s.published = map[string]model{}
	for _, l := range s.layouts {
		for _, policy := range []string{l.policy, l.pool} {
			if _, known := s.published[policy]; known || policy == "" {
				continue
			}
			o.Name, o.MIGPolicy = fmt.Sprintf("model%d", len(s.published)), policy
			o.CDIRoot = filepath.Join(o.Folder, o.Name+"-cdi")
			m, err := s.ask(ctx, o)
			if err != nil {
				return fmt.Errorf("ask the plugin what it publishes under the policy %s: %w", policy, err)
			}
			s.published[policy] = m
			fmt.Fprintf(os.Stderr, "%s, policy %s: %s\n", s.version, policy, m)
		}
	}
	return nil
}

func (m model) String() string {
	devices, stored := 0, 0
	for _, spec := range m {
		devices += len(spec.Devices)
		stored += (&resourceapi.ResourceSlice{Spec: spec}).Size()
	}
	return fmt.Sprintf("%d slices, %d devices, %d KB a node as the API server stores them", len(m), devices, stored/1000)
}

// ask runs the plugin on a node until it has published all slices of its pool, and returns them. It
// removes the node and the slices again.
func (s *scale) ask(ctx context.Context, o node.Options) (model, error) {
	n, err := node.New(ctx, o)
	if err != nil {
		return nil, err
	}
	p, err := n.Start(ctx)
	if err != nil {
		return nil, err
	}
	all, err := s.complete(ctx, o.Name)
	if err := errors.Join(err, p.Stop(), s.client.CoreV1().Nodes().Delete(ctx, o.Name, metav1.DeleteOptions{})); err != nil {
		return nil, err
	}
	of := metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + o.Name}
	return all, s.client.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, of)
}

// complete waits until all slices of the node's pool are published, and returns their specs.
func (s *scale) complete(ctx context.Context, name string) (model, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		list, err := s.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{
			FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + name,
		})
		if err != nil {
			return nil, err
		}
		var all model
		for _, slice := range list.Items { // ordered by name, which begins with the position in the pool
			all = append(all, slice.Spec)
		}
		if len(all) > 0 && int64(len(all)) == all[0].Pool.ResourceSliceCount {
			return all, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the slices of node %s: %w", name, ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// publish creates the slices of model m for the node, with the names that the plugin would give
// them.
func (s *scale) publish(ctx context.Context, name string, m model) error {
	for i, spec := range m {
		spec.Driver, spec.NodeName = driver.DriverName, &name
		spec.Pool = resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: int64(len(m))}
		slice := &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%05x-%s-%s", i, driver.DriverName, name)}, Spec: spec,
		}
		_, err := s.client.ResourceV1().ResourceSlices().Create(ctx, slice, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("publish the slices of node %s: %w", name, err)
		}
	}
	return nil
}

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/node"
)

// What a node publishes.
const (
	everyShape = "every shape"
	wholeOnly  = "whole GPUs only"
	static     = "56 static MIG devices"
)

// The classes, as the chart has them.
const (
	wholeClass = "gpu.nvidia.com"
	migClass   = "mig.nvidia.com"

	smallest = "1g.10gb"
)

// classesOf says for which classes claims are made on nodes of a layout.
var classesOf = map[string][]string{wholeOnly: {wholeClass}, static: {migClass}, everyShape: {wholeClass, migClass}}

// layout is the slices of one node, in their order.
type layout []resourceapi.ResourceSliceSpec

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

// models asks the plugin what it publishes. Static devices are those of the smallest profile, which nothing excludes from each other.
func (s *scale) models(ctx context.Context, o node.Options) error {
	s.layout = map[string]layout{}
	for name, policy := range map[string]string{everyShape: "dynamic", wholeOnly: "static"} {
		o.Name, o.MIGPolicy = strings.ReplaceAll(name, " ", "-")+"-model", policy
		o.Name = strings.ToLower(o.Name)
		o.CDIRoot = filepath.Join(o.Folder, o.Name+"-cdi")
		var err error
		if s.layout[name], err = s.published(ctx, o); err != nil {
			return err
		}
	}
	var one resourceapi.ResourceSliceSpec
	for _, slice := range s.layout[everyShape] {
		for _, d := range slice.Devices {
			if profile := d.Attributes["profile"].StringValue; profile == nil || *profile != smallest {
				continue
			}
			d.ConsumesCounters = nil
			one.Devices = append(one.Devices, d)
		}
	}
	s.layout[static] = layout{one}
	for name, slices := range s.layout {
		devices, stored := 0, 0
		for _, spec := range slices {
			devices += len(spec.Devices)
			stored += (&resourceapi.ResourceSlice{Spec: spec}).Size()
		}
		fmt.Fprintf(os.Stderr, "%s: %d slices, %d devices, %d KB a node as the API server stores them\n", name, len(slices), devices, stored/1000)
	}
	return nil
}

func (s *scale) published(ctx context.Context, o node.Options) (layout, error) {
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

// complete waits for the node's whole pool.
func (s *scale) complete(ctx context.Context, name string) (layout, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		list, err := s.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + name})
		if err != nil {
			return nil, err
		}
		var all layout
		for _, slice := range list.Items { // by name, which begins with the place in the pool
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

// publish gives a node the layout's slices, named as the plugin names them.
func (s *scale) publish(ctx context.Context, name string, l layout) error {
	for i, spec := range l {
		spec.Driver, spec.NodeName = driver.DriverName, &name
		spec.Pool = resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: int64(len(l))}
		slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%05x-%s-%s", i, driver.DriverName, name)}, Spec: spec}
		_, err := s.client.ResourceV1().ResourceSlices().Create(ctx, slice, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("publish the slices of node %s: %w", name, err)
		}
	}
	return nil
}

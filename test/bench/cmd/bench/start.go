package main

import (
	"context"
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/node"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/report"
)

// start measures two times: from the start of the plugin's process until the plugin is registered,
// and until its devices are published. The API server has no slices of the node before.
func (b *bench) start(ctx context.Context) error {
	rounds := max(b.samples/40, 2)
	for _, s := range b.subjects {
		twice, err := b.newNode(ctx, s.node.Name+"-16", s.node.Binary, 2*gpus)
		if err != nil {
			return err
		}
		if err := s.Stop(); err != nil {
			return err
		}
		var registered, eight, sixteen report.Samples
		for range rounds {
			for _, n := range []*node.Node{s.node, twice} {
				known, published, err := b.startOnce(ctx, n)
				if err != nil {
					return err
				}
				if n == twice {
					sixteen.All = append(sixteen.All, published)
				} else {
					registered.All, eight.All = append(registered.All, known), append(eight.All, published)
				}
			}
		}
		if s.Plugin, err = s.node.Start(ctx); err != nil {
			return err
		}
		b.report.Add("start to registered, 8 GPUs", s.title, &registered)
		of := b.report.Add("start to published, 8 GPUs", s.title, &eight)
		row := b.report.Add("start to published, 16 GPUs", s.title, &sixteen).Compare(of)
		b.report.AtMost("start to registered and published, 8×H100 with all shapes, p50", s.title, of.P50, 400, "ms")
		b.report.AtMost("start with 16 GPUs to 8, p50", s.title, row.Ratio50, 2, "×")
	}
	return nil
}

// startOnce starts the plugin on a node without slices and stops it again. registered and published
// are the times since its start.
func (b *bench) startOnce(ctx context.Context, n *node.Node) (registered, published time.Duration, _ error) {
	api := b.client.ResourceV1().ResourceSlices()
	of := metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + n.Name}
	if err := api.DeleteCollection(ctx, metav1.DeleteOptions{}, of); err != nil {
		return 0, 0, err
	}
	gone, err := api.List(ctx, of)
	if err != nil {
		return 0, 0, err
	}
	of.ResourceVersion = gone.ResourceVersion
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	changes, err := api.Watch(ctx, of)
	if err != nil {
		return 0, 0, err
	}
	defer changes.Stop()
	complete := make(chan time.Time, 1)
	go func() {
		there := map[string]resourceapi.ResourceSlice{}
		for e := range changes.ResultChan() {
			slice, ok := e.Object.(*resourceapi.ResourceSlice)
			if !ok || e.Type == watch.Deleted {
				continue
			}
			there[slice.Name] = *slice
			if isComplete(there) {
				complete <- time.Now()
				return
			}
		}
	}()
	p, err := n.Start(ctx)
	if err != nil {
		return 0, 0, err
	}
	select {
	case at := <-complete:
		published = max(at.Sub(p.Begin), p.Registered)
	case <-ctx.Done():
		err = fmt.Errorf("wait until node %s has published its devices: %w (its plugin's output: %s)", n.Name, ctx.Err(), n.Log)
	}
	if stopped := p.Stop(); err == nil {
		err = stopped
	}
	return p.Registered, published, err
}

// isComplete reports whether slices has as many ResourceSlices as each of them names for its pool,
// with at least one device.
func isComplete(slices map[string]resourceapi.ResourceSlice) bool {
	devices := 0
	for _, s := range slices {
		if s.Spec.Pool.ResourceSliceCount != int64(len(slices)) {
			return false
		}
		devices += len(s.Spec.Devices)
	}
	return devices > 0
}

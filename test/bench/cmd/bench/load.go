package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/report"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// settleTimeout limits how long the benchmark waits for work that the plugin does after it has
// answered a call.
const settleTimeout = 30 * time.Second

// written waits until the status of each claim lists its devices. The plugin writes the status
// after it has answered Prepare.
func (b *bench) written(ctx context.Context, claims ...*resourceapi.ResourceClaim) error {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	wanted := map[string]bool{}
	for _, c := range claims {
		wanted[c.Name] = true
	}
	for {
		list, err := b.client.ResourceV1().ResourceClaims(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, c := range list.Items {
			if len(c.Status.Devices) > 0 {
				delete(wanted, c.Name)
			}
		}
		if len(wanted) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d claims have no devices in their status: %w", len(wanted), ctx.Err())
		case <-time.After(5 * pause):
		}
	}
}

// load counts the requests that the plugin sends to the API server. The counts are the same on a
// slow and on a fast machine.
func (b *bench) load(ctx context.Context) error {
	for _, s := range b.subjects {
		if err := b.loadOfClaims(ctx, s); err != nil {
			return err
		}
		if err := b.loadOfSlices(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) loadOfClaims(ctx context.Context, s *subject) error {
	var ignored report.Samples
	before, err := b.requests(ctx, "resourceclaims")
	if err != nil {
		return err
	}
	prepare := func(c *resourceapi.ResourceClaim) error { return s.Prepare(ctx, c) }
	if err := errors.Join(atOnce(s.claims, &ignored, prepare), b.written(ctx, s.claims...)); err != nil {
		return err
	}
	after, err := b.requests(ctx, "resourceclaims")
	if err != nil {
		return err
	}
	if err := atOnce(s.claims, &ignored, prepare); err != nil {
		return err
	}
	<-time.After(25 * pause) // time for requests that the plugin must not make
	again, err := b.requests(ctx, "resourceclaims")
	if err != nil {
		return err
	}
	unchanged := b.report.AtMost("writes of claims that were prepared again", s.title, float64(writes(again)-writes(after)), 0, "writes")
	gets := b.report.AtMost("reads of claims for a Prepare", s.title, float64(after["GET"]-before["GET"])/gpus, 1, "GETs")
	repeated := b.report.AtMost("reads of claims for a repeated Prepare", s.title, float64(again["GET"]-after["GET"])/gpus, 1, "GETs")
	unchanged.Timed, gets.Timed, repeated.Timed = false, false, false
	return atOnce(s.claims, &ignored, func(c *resourceapi.ResourceClaim) error { return s.Unprepare(ctx, c) })
}

// loadOfSlices restarts the plugin and reports how many slices it writes, which should be none. It
// then makes one GPU report an error, and reports whether the plugin writes each slice with a
// changed taint once.
func (b *bench) loadOfSlices(ctx context.Context, s *subject) error {
	before, err := b.requests(ctx, "resourceslices")
	if err != nil {
		return err
	}
	if err := s.Stop(); err != nil {
		return err
	}
	if s.Plugin, err = s.node.Start(ctx); err != nil {
		return err
	}
	<-time.After(100 * pause) // time for requests that the plugin must not make
	restarted, err := b.requests(ctx, "resourceslices")
	if err != nil {
		return err
	}
	is, err := b.slicesOf(ctx, s.node)
	if err != nil {
		return err
	}
	const doubleBitError = 48
	if err := s.node.Change(func(f *state.File) error { return f.XID(0, doubleBitError) }); err != nil {
		return err
	}
	changed, err := b.changed(ctx, s, is)
	if err != nil {
		return err
	}
	after, err := b.requests(ctx, "resourceslices")
	if err != nil {
		return err
	}
	none := b.report.AtMost("writes of slices after a restart", s.title, float64(writes(restarted)-writes(before)), 0, "writes")
	one := b.report.AtMost("writes for each slice in which a GPU's taint changed", s.title,
		float64(writes(after)-writes(restarted))/float64(changed), 1, "writes")
	none.Timed, one.Timed = false, false
	// Reset the GPU. The plugin's next scan then removes the taint.
	return s.node.Change(func(f *state.File) error { return f.Reset(0, true) })
}

// changed waits until all devices of the first GPU have a taint. It returns how many of the node's
// slices differ from those in before.
func (b *bench) changed(ctx context.Context, s *subject, before map[string]resourceapi.ResourceSlice) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	for {
		now, err := b.slicesOf(ctx, s.node)
		if err != nil {
			return 0, err
		}
		changed, well := 0, 0
		for name, slice := range now {
			if slice.ResourceVersion != before[name].ResourceVersion {
				changed++
			}
			for _, d := range slice.Spec.Devices {
				of := d.Name == s.node.Devices[0] || len(d.ConsumesCounters) > 0 && d.ConsumesCounters[0].CounterSet == s.node.Devices[0]
				if of && len(d.Taints) == 0 {
					well++
				}
			}
		}
		if changed > 0 && well == 0 {
			return changed, nil
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("%d devices of a GPU with an error have no taint: %w", well, ctx.Err())
		case <-time.After(5 * pause):
		}
	}
}

// writes sums the requests whose verbs change something.
func writes(counts map[string]int) int {
	sum := 0
	for _, verb := range []string{"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"} {
		sum += counts[verb]
	}
	return sum
}

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/report"
)

// pause is how long the benchmark waits after an answer, so that the plugin can finish its work for
// that call, such as writing the claim's status.
const pause = 20 * time.Millisecond

// settled is how long the benchmark waits after many calls, so that the plugin can finish the work
// that it delays until no more calls arrive.
const settled = 400 * time.Millisecond

// cycle prepares and unprepares the claim, and adds the durations to prepares and unprepares.
func (s *subject) cycle(ctx context.Context, c *resourceapi.ResourceClaim, prepares, unprepares *report.Samples) error {
	if err := prepares.Time(func() error { return s.Prepare(ctx, c) }); err != nil {
		return err
	}
	<-time.After(pause)
	err := unprepares.Time(func() error { return s.Unprepare(ctx, c) })
	<-time.After(pause)
	return err
}

// single measures Prepare and Unprepare of one whole GPU at a time, alternating with the floor.
func (b *bench) single(ctx context.Context) error {
	prepares, unprepares := make([]report.Samples, len(b.subjects)), make([]report.Samples, len(b.subjects))
	for i := range b.samples {
		if err := b.floor.once(ctx); err != nil {
			return err
		}
		for j, s := range b.subjects {
			if err := s.cycle(ctx, s.claims[i%gpus], &prepares[j], &unprepares[j]); err != nil {
				return err
			}
		}
	}
	floorPrepare := b.report.Add("Prepare", "floor", &b.floor.prepares)
	floorUnprepare := b.report.Add("Unprepare", "floor", &b.floor.unprepares)
	for j, s := range b.subjects {
		row := b.report.Add("Prepare", s.title, &prepares[j]).Compare(floorPrepare)
		b.report.AtMost("whole-GPU Prepare, one at a time, p50", s.title, row.Ratio50, 1.5, "× floor")
		b.report.AtMost("whole-GPU Prepare, one at a time, p99", s.title, row.Ratio99, 3, "× floor")
		row = b.report.Add("Unprepare", s.title, &unprepares[j]).Compare(floorUnprepare)
		b.report.AtMost("Unprepare, one at a time, p50", s.title, row.Ratio50, 1.5, "× floor")
	}
	return nil
}

// repeated measures Prepare of a claim that is already prepared, alternating with a mere read of
// the claim.
func (b *bench) repeated(ctx context.Context) error {
	var get report.Samples
	again := make([]report.Samples, len(b.subjects))
	for _, s := range b.subjects {
		if err := s.Prepare(ctx, s.claims[0]); err != nil {
			return err
		}
	}
	<-time.After(pause)
	for range b.samples {
		err := get.Time(func() error { return b.floor.read(ctx) })
		for j, s := range b.subjects {
			err = errors.Join(err, again[j].Time(func() error { return s.Prepare(ctx, s.claims[0]) }))
		}
		if err != nil {
			return err
		}
		<-time.After(pause / 4)
	}
	floor := b.report.Add("read of a claim", "floor", &get)
	for j, s := range b.subjects {
		row := b.report.Add("repeated Prepare", s.title, &again[j]).Compare(floor)
		b.report.AtMost("repeated Prepare beyond the read of the claim, p50", s.title, row.P50-floor.P50, 1, "ms")
		if err := s.Unprepare(ctx, s.claims[0]); err != nil {
			return err
		}
	}
	return nil
}

// atOnce runs work for all claims at the same moment. It adds each duration, and the total time, to
// samples.
func atOnce(claims []*resourceapi.ResourceClaim, samples *report.Samples, work func(*resourceapi.ResourceClaim) error) error {
	each, errs := make([]report.Samples, len(claims)), make([]error, len(claims))
	var all sync.WaitGroup
	begin := time.Now()
	for i, c := range claims {
		all.Go(func() { errs[i] = each[i].Time(func() error { return work(c) }) })
	}
	all.Wait()
	samples.Within += time.Since(begin)
	for _, s := range each {
		samples.All = append(samples.All, s.All...)
	}
	return errors.Join(errs...)
}

// parallel measures eight simultaneous claims for eight GPUs. It alternates with one claim at a
// time, with eight simultaneous Prepares of the floor, and with eight simultaneous reads of a
// claim.
func (b *bench) parallel(ctx context.Context) error {
	var get, floor report.Samples
	one, all, back := make([]report.Samples, len(b.subjects)), make([]report.Samples, len(b.subjects)), make([]report.Samples, len(b.subjects))
	var ignored report.Samples
	floors := map[string]*floorFiles{}
	for i, c := range b.subjects[0].claims {
		floors[c.Name] = b.floor.files(fmt.Sprint(i))
	}
	processor, busy := make([]time.Duration, len(b.subjects)), make([]processors, len(b.subjects))
	// The benchmark's own garbage collection would affect the 99th percentile. It is off, and the loop
	// collects garbage between the rounds.
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	// Each round gives eight samples, so half as many rounds give enough for percentiles.
	for range max(b.samples/2, 3) {
		runtime.GC()
		<-time.After(pause)
		err := atOnce(b.subjects[0].claims, &get, func(*resourceapi.ResourceClaim) error { return b.floor.read(ctx) })
		<-time.After(pause)
		err = errors.Join(err, atOnce(b.subjects[0].claims, &floor, func(c *resourceapi.ResourceClaim) error {
			return b.floor.prepare(ctx, floors[c.Name])
		}))
		<-time.After(pause)
		for j, s := range b.subjects {
			// The first call after a long pause is slow, and only the first program's pause is short.
			err = errors.Join(err, s.cycle(ctx, s.claims[0], &ignored, &ignored))
			before := s.CPU()
			err = errors.Join(err, s.cycle(ctx, s.claims[0], &one[j], &ignored))
			err = errors.Join(err, busy[j].while(func() error {
				return atOnce(s.claims, &all[j], func(c *resourceapi.ResourceClaim) error { return s.Prepare(ctx, c) })
			}))
			<-time.After(settled)
			err = errors.Join(err, atOnce(s.claims, &back[j], func(c *resourceapi.ResourceClaim) error { return s.Unprepare(ctx, c) }))
			<-time.After(settled)
			processor[j] += s.CPU() - before
		}
		if err != nil {
			return err
		}
	}
	b.report.Add("read of a claim, 8 at once", "floor", &get)
	floorRow := b.report.Add("Prepare, 8 at once", "floor", &floor)
	for j, s := range b.subjects {
		each := processor[j] / time.Duration(len(one[j].All)+len(all[j].All))
		fmt.Fprintf(os.Stderr, "processor time of %s for a Prepare, its Unprepare and the work after them: %s\n",
			s.title, each.Round(10*time.Microsecond))
		fmt.Fprintf(os.Stderr, "use of the processors during eight at once of %s: %s\n", s.title, &busy[j])
		alone := b.report.Add("Prepare of one claim, alternating with 8 at once", s.title, &one[j])
		row := b.report.Add("Prepare, 8 at once", s.title, &all[j]).Compare(floorRow)
		b.report.Add("Unprepare, 8 at once", s.title, &back[j])
		b.report.AtMost("8 at once on 8 GPUs: p99 to p50 of one", s.title, row.P99/alone.P50, 4, "×")
		b.report.AtLeast("8 at once on 8 GPUs: throughput to one at a time", s.title, row.PerSecond/alone.PerSecond, 3, "×")
		b.report.AtLeast("8 at once on 8 GPUs: throughput to that of disk and API", s.title,
			row.PerSecond/floorRow.PerSecond, 1/1.5, "×")
	}
	return nil
}

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/report"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// hardware changes the simulated driver. lock says whether the driver creates one GPU instance at a
// time on the whole node, or one at a time on each GPU. takes is how long a creation takes on GPU
// number gpu, or on every GPU if gpu is state.AnyGPU.
func (s *subject) hardware(lock uint32, gpu int32, takes time.Duration) error {
	return s.node.Change(func(f *state.File) error {
		err := errors.Join(f.ClearFaults(), f.SetCutLock(lock))
		if takes == 0 {
			return err
		}
		slow := state.Fault{Kind: state.FaultSlow, GPU: gpu, DelayMS: uint64(takes.Milliseconds())} //nolint:gosec // not negative
		return errors.Join(err, f.AddFault(slow, "nvmlDeviceCreateGpuInstanceWithPlacement", 0))
	})
}

// hanging measures Prepare of a whole GPU while the driver hangs on another GPU, and without that,
// alternately.
func (b *bench) hanging(ctx context.Context) error {
	hang, rounds, samples := 5*time.Second, 3, max(b.samples/4, 5)
	if b.quick {
		hang, rounds = time.Second, 1
	}
	for _, s := range b.subjects {
		var alone, meanwhile, ignored report.Samples
		partition, err := b.claim(ctx, s.node, s.node.Name+"-hangs", s.node.Devices[1]+"-mig-19-0", false)
		if err != nil {
			return err
		}
		if err := s.hardware(state.CutLockDriver, 1, hang); err != nil {
			return err
		}
		for range rounds {
			hung := make(chan error, 1)
			go func() { hung <- s.Prepare(ctx, partition) }()
			<-time.After(10 * pause) // until Prepare has written the record and waits for the GPU
			for begin := time.Now(); time.Since(begin) < hang-time.Second/2; {
				if err := s.cycle(ctx, s.claims[0], &meanwhile, &ignored); err != nil {
					return err
				}
			}
			if err := errors.Join(<-hung, s.Unprepare(ctx, partition)); err != nil {
				return err
			}
			<-time.After(10 * pause)
			for range samples {
				if err := s.cycle(ctx, s.claims[0], &alone, &ignored); err != nil {
					return err
				}
			}
		}
		if err := errors.Join(s.hardware(state.CutLockDriver, 0, 0), s.disableMIG(ctx, s.claims[1:2])); err != nil {
			return err
		}
		of := b.report.Add("Prepare alone", s.title, &alone)
		row := b.report.Add("Prepare, another GPU hangs", s.title, &meanwhile).Compare(of)
		b.report.AtMost("Prepare while another GPU hangs, p50", s.title, row.Ratio50, 1.2, "× alone")
	}
	return nil
}

// disableMIG makes the plugin disable the MIG mode of the claims' GPUs, by preparing and
// unpreparing claims for whole GPUs.
func (s *subject) disableMIG(ctx context.Context, claims []*resourceapi.ResourceClaim) error {
	for _, c := range claims {
		if err := errors.Join(s.Prepare(ctx, c), s.Unprepare(ctx, c)); err != nil {
			return err
		}
	}
	return nil
}

// partitions measures 56 simultaneous claims for partitions. The simulated driver creates one GPU
// instance at a time first on the whole node, then on each GPU.
func (b *bench) partitions(ctx context.Context) error {
	takes, rounds := 200*time.Millisecond, 2
	if b.quick {
		takes, rounds = 20*time.Millisecond, 1
	}
	for _, s := range b.subjects {
		var claims []*resourceapi.ResourceClaim
		for place := range 7 {
			for i, d := range s.node.Devices {
				c, err := b.claim(ctx, s.node, fmt.Sprintf("%s-part-%d-%d", s.node.Name, i, place), fmt.Sprintf("%s-mig-19-%d", d, place), false)
				if err != nil {
					return err
				}
				claims = append(claims, c)
			}
		}
		var serial, side, alone []time.Duration
		for i := range rounds {
			took, err := s.prepareAll(ctx, state.CutLockDriver, takes, claims)
			serial = append(serial, took)
			if err != nil {
				return err
			}
			var ofOne []*resourceapi.ResourceClaim
			for j := i % gpus; j < len(claims); j += gpus {
				ofOne = append(ofOne, claims[j])
			}
			if took, err = s.prepareAll(ctx, state.CutLockGPU, takes, ofOne); err != nil {
				return err
			}
			alone = append(alone, took)
			if took, err = s.prepareAll(ctx, state.CutLockGPU, takes, claims); err != nil {
				return err
			}
			side = append(side, took)
		}
		if err := s.hardware(state.CutLockDriver, 0, 0); err != nil {
			return err
		}
		b.report.Add("56 MIG claims at once, driver-wide lock, all of them", s.title, &report.Samples{All: serial})
		b.report.Add("7 MIG claims of one GPU at once, all of them", s.title, &report.Samples{All: alone})
		b.report.Add("56 MIG claims at once, a lock per GPU, all of them", s.title, &report.Samples{All: side})
		b.report.AtMost("56 MIG claims at once, driver-wide lock", s.title,
			float64(slices.Min(serial))/float64(takes*56), 1.1, "× sum of the creations")
		b.report.AtMost("56 MIG claims at once, locks per GPU", s.title,
			float64(slices.Min(side))/float64(slices.Min(alone)), 1.3, "× one GPU alone")
	}
	return nil
}

// prepareAll prepares all claims at once and then unprepares them. It returns the time from the
// first Prepare's start to the last one's end. lock and takes are as in hardware.
func (s *subject) prepareAll(ctx context.Context, lock uint32, takes time.Duration, claims []*resourceapi.ResourceClaim,
) (time.Duration, error) {
	if err := s.hardware(lock, state.AnyGPU, takes); err != nil {
		return 0, err
	}
	var samples, ignored report.Samples
	err := atOnce(claims, &samples, func(c *resourceapi.ResourceClaim) error { return s.Prepare(ctx, c) })
	if err != nil {
		return 0, err
	}
	err = atOnce(claims, &ignored, func(c *resourceapi.ResourceClaim) error { return s.Unprepare(ctx, c) })
	if err == nil {
		err = s.disableMIG(ctx, s.claims)
	}
	return samples.Within, err
}

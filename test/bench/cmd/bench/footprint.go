package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/report"
)

const megabyte = 1 << 20

// manyClaims measures Prepare on a node with 500 prepared claims and on an empty node, alternately.
func (b *bench) manyClaims(ctx context.Context) error {
	count := 500
	if b.quick {
		count = 20
	}
	for i, empty := range b.subjects[:len(b.subjects):len(b.subjects)] {
		if err := b.subject(ctx, fmt.Sprintf("full-%d", i), empty.title, empty.node.Binary); err != nil {
			return err
		}
		full := b.subjects[len(b.subjects)-1]
		err := b.fill(ctx, full, count)
		if err == nil {
			err = b.compareManyClaims(ctx, count, empty, full)
		}
		b.subjects = b.subjects[:len(b.subjects)-1]
		if err := errors.Join(err, full.Stop()); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) fill(ctx context.Context, s *subject, count int) error {
	var claims []*resourceapi.ResourceClaim
	for i := range count {
		c, err := b.claim(ctx, s.node, fmt.Sprintf("%s-looks-%d", s.node.Name, i), s.node.Devices[i%gpus], true)
		if err != nil {
			return err
		}
		if err := s.Prepare(ctx, c); err != nil {
			return err
		}
		claims = append(claims, c)
	}
	return b.written(ctx, claims...)
}

func (b *bench) compareManyClaims(ctx context.Context, count int, empty, full *subject) error {
	var prepare, unprepare, prepareFull, unprepareFull, container, containerFull report.Samples
	for i := range b.samples {
		err := errors.Join(
			empty.cycle(ctx, empty.claims[i%gpus], &prepare, &unprepare),
			full.cycle(ctx, full.claims[i%gpus], &prepareFull, &unprepareFull))
		if err != nil {
			return err
		}
	}
	for range max(b.samples/20, 2) {
		if err := errors.Join(empty.inject(ctx, &container), full.inject(ctx, &containerFull)); err != nil {
			return err
		}
	}
	of := b.report.Add("Prepare, no claims held", empty.title, &prepare)
	row := b.report.Add(fmt.Sprintf("Prepare, %d claims held", count), full.title, &prepareFull).Compare(of)
	b.report.AtMost(fmt.Sprintf("Prepare with %d claims held, p50", count), full.title, row.Ratio50, 1.2, "× empty")
	of = b.report.Add("Unprepare, no claims held", empty.title, &unprepare)
	b.report.Add(fmt.Sprintf("Unprepare, %d claims held", count), full.title, &unprepareFull).Compare(of)
	of = b.report.Add("CDI of a container, no claims held", empty.title, &container)
	b.report.Add(fmt.Sprintf("CDI of a container, %d claims held", count), full.title, &containerFull).Compare(of)
	return nil
}

// inject measures what a container runtime does when it starts a container with a claim: it reads
// all CDI specs and looks up the claim's devices.
func (s *subject) inject(ctx context.Context, samples *report.Samples) error {
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(s.node.CDIRoot), cdilib.WithAutoRefresh(false))
	if err != nil {
		return err
	}
	c := s.claims[0]
	if err := s.Prepare(ctx, c); err != nil {
		return err
	}
	<-time.After(pause)
	id := cdi.ClaimDeviceID(c.UID, s.node.Devices[0], nil)
	err = samples.Time(func() error {
		if err := cache.Refresh(); err != nil {
			return err
		}
		if cache.GetDevice(id) == nil || cache.GetDevice(cdi.BaseID) == nil {
			return fmt.Errorf("CDI devices %s and %s are missing", id, cdi.BaseID)
		}
		return nil
	})
	return errors.Join(err, s.Unprepare(ctx, c))
}

// footprint measures the plugin's memory after many claims, and its processor time when it is idle.
func (b *bench) footprint(ctx context.Context) error {
	few, many, idle := 1000, 10000, 60*time.Second
	if b.quick {
		few, many, idle = 20, 40, 2*time.Second
	}
	for _, s := range b.subjects {
		done := 0
		after := func(cycles int) (float64, error) {
			for ; done < cycles; done++ {
				c := s.claims[done%gpus]
				if err := errors.Join(s.Prepare(ctx, c), s.Unprepare(ctx, c)); err != nil {
					return 0, err
				}
			}
			m, err := s.Memory()
			in := func(bytes int64) float64 { return float64(bytes) / megabyte }
			fmt.Fprintf(os.Stderr, "memory of %s after %d cycles: %.1f MB (%.1f MB anonymous, %.1f MB program file), %.1f MB child processes\n",
				s.title, done, in(m.Plugin), in(m.Own), in(m.Files), in(m.Children))
			return in(m.Plugin), err
		}
		first, err := after(few)
		if err != nil {
			return err
		}
		last, err := after(many)
		if err != nil {
			return err
		}
		b.report.AtMost(fmt.Sprintf("memory after %d cycles", few), s.title, first, 45, "MB")
		b.report.AtMost(fmt.Sprintf("memory after %d cycles", many), s.title, last, max(45, first), "MB")
		before := s.CPU()
		<-time.After(idle)
		b.report.AtMost("processor while idle, with child processes", s.title,
			100*float64(s.CPU()-before)/float64(idle), 0.2, "% of a core")
	}
	return nil
}

// size adds the sizes of the plugin's program and of a claim's CDI spec to the report.
func (b *bench) size(ctx context.Context) error {
	for _, s := range b.subjects {
		info, err := os.Stat(s.node.Binary)
		if err != nil {
			return err
		}
		binary := b.report.AtMost("the plugin's program", s.title, float64(info.Size())/1e6, 45, "MB")
		if err := s.Prepare(ctx, s.claims[0]); err != nil {
			return err
		}
		spec, err := only(filepath.Join(s.node.CDIRoot, "*claim*.json"))
		if err := errors.Join(err, s.Unprepare(ctx, s.claims[0])); err != nil {
			return err
		}
		file := b.report.AtMost("CDI spec of a claim for a GPU", s.title, float64(len(spec)), 1024, "bytes")
		binary.Timed, file.Timed = false, false
	}
	return nil
}

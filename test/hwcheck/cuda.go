package main

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

// These are values of CUresult in cuda.h.
const (
	cudaSuccess  = 0
	cudaNoDevice = 100
)

// cudaValues is how many values the CUDA program lets the GPU compute.
const cudaValues = 1024

// checkCUDA runs our CUDA program in a container with one GPU and in one without. It adds to the
// report whether the first computes on exactly its GPU, and whether the second sees none.
func (s *visit) checkCUDA(ctx context.Context, c *containers, given offer) {
	const with, without = "CUDA computes in a container with one GPU", "CUDA sees no GPU in a container without one"
	if !s.cuda {
		s.add(with, facts.NotProven, "left out because of --cuda=false")
		return
	}
	found := &facts.CUDA{}
	s.report.CUDA = found
	for _, x := range []struct {
		name  string
		given []offer
		found *facts.CUDAResult
		judge func(string, *containers, facts.CUDAResult)
	}{
		{without, nil, &found.WithoutGPU, s.judgeNoCUDA},
		{with, []offer{given}, &found.WithGPU, func(name string, c *containers, r facts.CUDAResult) { s.judgeCUDA(name, c, given, r) }},
	} {
		devices, err := c.specs.devices(x.given)
		if err != nil {
			s.add(x.name, facts.Failed, "%v", err)
			return
		}
		program := guest{host: s.programs.path(cudaCheck), inside: filepath.Join("/usr/bin", cudaCheck), copied: true}
		result := c.run(ctx, program, devices)
		if ctx.Err() != nil {
			return // the output of an interrupted run proves nothing
		}
		s.show("The CUDA program: "+x.name, "", result.stdout+result.stderr)
		if err := json.Unmarshal([]byte(result.stdout), x.found); err != nil || result.err != nil {
			s.add(x.name, facts.Failed, "%s", lastLines(result.summary(), 3))
			continue
		}
		x.judge(x.name, c, *x.found)
	}
}

// judgeCUDA adds to the report whether the program computed on the given GPU alone.
func (s *visit) judgeCUDA(name string, c *containers, given offer, r facts.CUDAResult) {
	verdict, detail := s.verdictCUDA(c, given, r)
	s.add(name, verdict, "%s", detail)
}

func (s *visit) verdictCUDA(c *containers, given offer, r facts.CUDAResult) (facts.Verdict, string) {
	switch reservations := c.reservations(); {
	case s.report.Driver.Simulated:
		return facts.NotProven, fmt.Sprintf("simulated library: %s", cudaText(r))
	case r.Error != cudaSuccess:
		return facts.Failed, cudaText(r)
	case r.Correct != cudaValues || r.Wrong != 0:
		return facts.Differed, fmt.Sprintf("%d of %d values are wrong", r.Wrong, cudaValues)
	case c.way != onTheMachine && (r.Devices != 1 || !strings.EqualFold(r.UUID, given.uuid)):
		return facts.Differed, fmt.Sprintf("CUDA sees %d GPUs, the first is %s, and the container has %s", r.Devices, r.UUID, given.uuid)
	case reservations != "":
		return facts.NotProven, fmt.Sprintf("%s computed %d values, but %s", r.UUID, r.Correct, reservations)
	default:
		return facts.Agreed, fmt.Sprintf("%s computed %d values, CUDA %d", r.UUID, r.Correct, r.DriverVersion)
	}
}

// judgeNoCUDA adds to the report whether the program found no GPU.
func (s *visit) judgeNoCUDA(name string, c *containers, r facts.CUDAResult) {
	none := r.Error == cudaNoDevice || r.Error == cudaSuccess && r.Devices == 0
	switch reservations := c.reservations(); {
	case s.report.Driver.Simulated:
		s.add(name, facts.NotProven, "simulated library: %s", cudaText(r))
	case c.way == onTheMachine:
		s.add(name, facts.NotProven, "%s", reservations)
	case !none:
		s.add(name, facts.Differed, "%s", cudaText(r))
	case reservations != "":
		s.add(name, facts.NotProven, "%s, but %s", cudaText(r), reservations)
	default:
		s.add(name, facts.Agreed, "%s", cudaText(r))
	}
}

func cudaText(r facts.CUDAResult) string {
	return fmt.Sprintf("CUDA error %d in %s, %d GPUs", r.Error, r.Step, r.Devices)
}

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

const (
	// mpsArgument makes our CUDA program start an MPS daemon and its clients.
	mpsArgument = "mps"
	mpsControl  = "nvidia-cuda-mps-control"
	mpsCheck    = "MPS clients have a pinned memory limit"
	// mpsClients is how many clients the program starts.
	mpsClients = 2
	// mpsFreeMiB is the free memory without which the program starts no daemon. Two clients whose
	// limit does not hold take 2560 MiB and their contexts. On a fuller GPU they could be refused
	// memory although the limit does not hold.
	mpsFreeMiB = 3072
)

// checkMPS starts an MPS daemon and two clients with a pinned memory limit in a container with one
// GPU. It adds to the report whether the limit holds, and whether the daemon ends. It starts a
// daemon only in a container made by runc, with whose end the kernel kills the daemon, and only if
// the GPU has enough free memory. It leaves the compute mode as it is.
func (s *visit) checkMPS(ctx context.Context, c *containers, given offer) {
	if !s.cuda {
		s.add(mpsCheck, facts.NotProven, "left out because of --cuda=false")
		return
	}
	if _, _, ok := c.specs.mounted(mpsControl); !ok {
		s.add(mpsCheck, facts.NotProven, "the base spec mounts no %s: the driver was installed without it", mpsControl)
		return
	}
	devices, err := c.specs.devices([]offer{given})
	if err != nil {
		s.add(mpsCheck, facts.Failed, "%v", err)
		return
	}
	program := guest{host: s.programs.path(cudaCheck), inside: filepath.Join("/usr/bin", cudaCheck), copied: true, onlyByRunc: true}
	result := c.run(ctx, program, devices, mpsArgument)
	if ctx.Err() != nil {
		return // the output of an interrupted run proves nothing
	}
	if errors.Is(result.err, errNotByRunc) {
		s.add(mpsCheck, facts.NotProven, "no daemon was started: %v", result.err)
		return
	}
	s.show("The CUDA program: "+mpsCheck, "", result.stdout+result.stderr)
	found := &facts.MPS{}
	if err := json.Unmarshal([]byte(result.stdout), found); err != nil || result.err != nil {
		s.add(mpsCheck, facts.Failed, "%s", lastLines(result.summary(), 3))
		return
	}
	s.report.MPS = found
	s.judgeMPS(*found)
}

// judgeMPS adds to the report whether both clients were served within their limit.
func (s *visit) judgeMPS(r facts.MPS) {
	text := fmt.Sprintf("%d of %d clients, %d got memory below the limit, %d were refused memory above it, CUDA error %d in %s",
		r.Clients, mpsClients, r.Allocated, r.Refused, r.Error, r.Step)
	switch {
	case !r.Started && r.Error != 0:
		s.add(mpsCheck, facts.NotProven, "no daemon was started: error %d in %s, so the GPU's free memory is unknown", r.Error, r.Step)
	case r.FreeMiB < mpsFreeMiB:
		s.add(mpsCheck, facts.NotProven, "the GPU has %d MiB free, and only with %d a refusal would prove the limit", r.FreeMiB, mpsFreeMiB)
	case !r.Started:
		s.add(mpsCheck, facts.Failed, "the daemon did not start")
	case !r.Ended:
		s.add(mpsCheck, facts.Differed, "the daemon, its server or a client did not end; %s", text)
	case s.report.Driver.Simulated:
		s.add(mpsCheck, facts.NotProven, "simulated library: the daemon started and ended; %s", text)
	case r.Error != cudaSuccess:
		s.add(mpsCheck, facts.Failed, "%s", text)
	case r.Servers != 1 || r.Clients != mpsClients || r.Allocated != mpsClients || r.Refused != mpsClients:
		s.add(mpsCheck, facts.Differed, "%d servers, %s", r.Servers, text)
	default:
		s.add(mpsCheck, facts.Agreed, "%s", text)
	}
}

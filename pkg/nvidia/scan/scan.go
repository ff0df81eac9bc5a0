package scan

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/wake"
)

// scanNode reads the node once, in this process. The error is a [nvidia.NotReadyError] if the node
// lacks something that GPUs need. Any other error says what failed.
func scanNode(ctx context.Context, p nvidia.Paths) (nvidia.Node, error) {
	p = p.WithDefaults()
	node, err := scanDriver(ctx, p)
	return addPassthrough(ctx, p, node, err)
}

// scanDriver reads what NVIDIA's driver says about the node.
func scanDriver(ctx context.Context, p nvidia.Paths) (nvidia.Node, error) {
	if err := host.Check(p); err != nil {
		return nvidia.Node{}, err
	}
	lib, path, err := nvmlx.Load(p)
	if err != nil {
		return nvidia.Node{}, err
	}
	s := scanner{paths: p, lib: lib, path: path, limit: nvmlx.CallLimit, group: ownGroup("/proc", p.Cgroups)}
	return s.scan(ctx)
}

// scanner has the settings of one scan.
type scanner struct {
	paths nvidia.Paths
	lib   nvml.Interface
	path  string
	limit time.Duration
	// group is the cgroup directory of this process. It is empty without cgroup v2.
	group string
}

func (s scanner) scan(ctx context.Context) (nvidia.Node, error) {
	if _, err := nvmlx.Bounded(ctx, s.limit, "nvmlInit", func() (any, error) { return nil, nvmlx.Start(s.lib, s.path) }); err != nil {
		return nvidia.Node{}, err
	}
	// A hung card may hold NVML's lock forever, so wait only a limited time for the shutdown. The
	// end of the process closes NVML anyway.
	defer func() {
		_, _ = nvmlx.Bounded(context.WithoutCancel(ctx), s.limit, "nvmlShutdown",
			func() (any, error) { return nil, nvmlx.ToError(s.lib.Shutdown()) })
	}()

	node := nvidia.Node{}
	var err error
	if node.Driver, err = nvmlx.Bounded(ctx, s.limit, "reading the driver's version", s.driver); err != nil {
		return nvidia.Node{}, err
	}
	if _, err := nvmlx.Bounded(ctx, s.limit, "reading the state of confidential computing", func() (any, error) {
		return nil, s.checkConfCompute()
	}); err != nil {
		return nvidia.Node{}, err
	}
	common, err := nvmlx.Bounded(ctx, s.limit, "collecting the driver's files", func() (nvidia.Node, error) {
		common, problems, err := s.commonEdits(node.Driver)
		return nvidia.Node{Common: common, Omissions: problems}, err
	})
	if err != nil {
		return nvidia.Node{}, err
	}
	count, err := nvmlx.Bounded(ctx, s.limit, "counting the GPUs", func() (int, error) {
		n, ret := s.lib.DeviceGetCount()
		return n, nvmlx.ToError(ret)
	})
	if err != nil {
		return nvidia.Node{}, fmt.Errorf("count the GPUs: %w", err)
	}
	node.GPUs, node.Problems, node.Omissions = s.gpus(ctx, count, node.Driver)
	node.Common, node.Omissions = common.Common, append(node.Omissions, common.Omissions...)
	slices.SortFunc(node.Omissions, func(a, b nvidia.Omission) int { return cmp.Compare(a.String(), b.String()) })
	return node, nil
}

// checkConfCompute returns an error if the GPUs compute confidentially and accept no work yet. NVML
// has one ready state for all GPUs of the node.
func (s scanner) checkConfCompute() error {
	if !nvmlx.Has(s.lib, "nvmlSystemGetConfComputeState") || !nvmlx.Has(s.lib, "nvmlSystemGetConfComputeGpusReadyState") {
		return nil
	}
	if state, ret := s.lib.SystemGetConfComputeState(); ret == nvml.SUCCESS && state.CcFeature == nvml.CC_SYSTEM_FEATURE_ENABLED {
		accepts, ret := s.lib.SystemGetConfComputeGpusReadyState()
		if ret == nvml.SUCCESS && accepts == nvml.CC_ACCEPTING_CLIENT_REQUESTS_FALSE {
			return nvidia.NotReady("verify the attestation of the GPUs, then run nvidia-smi conf-compute -srs 1 on the node",
				"confidential computing is on and the GPUs accept no work: their ready state is not set")
		}
	}
	return nil
}

func (s scanner) driver() (device.Driver, error) {
	version, ret := s.lib.SystemGetDriverVersion()
	if ret != nvml.SUCCESS {
		return device.Driver{}, fmt.Errorf("read the driver's version: %w", nvmlx.ToError(ret))
	}
	d := device.Driver{Version: version}
	if cuda, ret := s.lib.SystemGetCudaDriverVersion(); ret == nvml.SUCCESS {
		d.CUDAVersion = fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10)
	}
	return d, nil
}

// gpus reads every GPU on its own goroutine, so that a hung GPU does not block the others.
func (s scanner) gpus(ctx context.Context, count int, d device.Driver) ([]nvidia.GPU, []nvidia.Problem, []nvidia.Omission) {
	type result struct {
		gpu     *nvidia.GPU
		address device.PCIAddress
		err     error
	}
	results, opens := make(chan result, count), nvmlx.NewPendingOpens()
	readings, omitted := make([]*gpuReading, count), make([][]nvidia.Omission, count)
	for i := range readings { // add all cards before the first limit starts
		readings[i] = &gpuReading{progress: wake.New(), onOpen: opens.Add()}
	}
	for i, r := range readings {
		go func() {
			defer r.onOpen()
			what := fmt.Sprintf("NVML for the GPU with index %d", i)
			gpu, err := nvmlx.BoundedWhile(ctx, s.limit, r.progress, opens, what, func() (*nvidia.GPU, error) { return s.gpu(i, d, r) })
			if gpu != nil { // the goroutine of the call has ended
				omitted[i] = r.omitted
			}
			results <- result{gpu, r.known(), err}
		}()
	}
	var gpus []nvidia.GPU
	var problems []nvidia.Problem
	listed := map[device.PCIAddress]bool{}
	for range count {
		r := <-results
		listed[r.address] = true
		if r.err != nil {
			problems = append(problems, problemOf(r.address, r.err))
		}
		if r.gpu != nil {
			gpus = append(gpus, *r.gpu)
		}
	}
	sort.Slice(gpus, func(i, j int) bool {
		return gpus[i].PCIAddress < gpus[j].PCIAddress || gpus[i].PCIAddress == gpus[j].PCIAddress && gpus[i].UUID < gpus[j].UUID
	})
	gpus, problems = distinct(gpus, problems)
	problems = explain(s.paths.Sysfs, listed, problems)
	sort.Slice(problems, func(i, j int) bool { return problems[i].String() < problems[j].String() })
	return gpus, problems, slices.Concat(omitted...)
}

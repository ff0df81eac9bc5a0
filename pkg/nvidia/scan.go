package nvidia

import (
	"context"
	"fmt"
	"sort"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Scan makes one pass over the node, in this process; see [Isolated] for why a daemon should not call it itself.
// An error that is a [NotReadyError] says what the node lacks; any other error says what failed.
func Scan(ctx context.Context, p Paths) (Node, error) {
	p = p.withDefaults()
	if err := Check(p); err != nil {
		return Node{}, err
	}
	path, err := findLibrary(p)
	if err != nil {
		return Node{}, err
	}
	s := scanner{paths: p, lib: nvml.New(nvml.WithLibraryPath(path)), path: path, limit: callLimit, group: ownGroup("/proc", p.Cgroups)}
	return s.scan(ctx)
}

// scanner is one pass.
type scanner struct {
	paths Paths
	lib   nvml.Interface
	path  string
	limit time.Duration
	// group is this process's own control group, empty where there is no cgroup v2 or nobody wants to know.
	group string
}

func (s scanner) scan(ctx context.Context) (Node, error) {
	if _, err := bounded(ctx, s.limit, "nvmlInit", func() (any, error) { return nil, s.init() }); err != nil {
		return Node{}, err
	}
	// A hanging card may hold NVML's lock for ever, so the goodbye is bounded too. What it leaves behind goes with the process.
	defer func() {
		_, _ = bounded(context.WithoutCancel(ctx), s.limit, "nvmlShutdown", func() (any, error) { return nil, toError(s.lib.Shutdown()) })
	}()

	node := Node{}
	var err error
	if node.Driver, err = bounded(ctx, s.limit, "reading the driver's version", s.driver); err != nil {
		return Node{}, err
	}
	if node.Common, err = bounded(ctx, s.limit, "collecting the driver's files", func() (edits, error) { return s.commonEdits(node.Driver) }); err != nil {
		return Node{}, err
	}
	count, err := bounded(ctx, s.limit, "counting the GPUs", func() (int, error) {
		n, ret := s.lib.DeviceGetCount()
		return n, toError(ret)
	})
	if err != nil {
		return Node{}, fmt.Errorf("count the GPUs: %w", err)
	}
	node.GPUs, node.Problems = s.gpus(ctx, count, node.Driver)
	return node, nil
}

// init takes NVML. What it answers when the driver is absent, half gone or of another version is the operator's first lead.
func (s scanner) init() error {
	switch ret := s.lib.Init(); ret {
	case nvml.SUCCESS:
		return nil
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return notReady("check that the library fits this machine (architecture, glibc) and can be read", "%s cannot be loaded", s.path)
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return notReady("run modprobe nvidia on the node, and look at dmesg if that fails", "the NVIDIA kernel module is not loaded")
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return notReady("finish the driver upgrade: unload the old kernel module (or reboot the node)", "the NVIDIA kernel module and %s are of different versions", s.path)
	case nvml.ERROR_NO_PERMISSION:
		return notReady("run the plugin privileged, or give it access to /dev/nvidiactl", "NVML may not talk to the driver")
	default:
		return fmt.Errorf("start NVML from %s: %w", s.path, toError(ret))
	}
}

func (s scanner) driver() (device.Driver, error) {
	version, ret := s.lib.SystemGetDriverVersion()
	if ret != nvml.SUCCESS {
		return device.Driver{}, fmt.Errorf("read the driver's version: %w", toError(ret))
	}
	d := device.Driver{Version: version}
	if cuda, ret := s.lib.SystemGetCudaDriverVersion(); ret == nvml.SUCCESS {
		d.CUDAVersion = fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10)
	}
	return d, nil
}

// gpus reads every GPU on a worker of its own: one that hangs hangs alone.
func (s scanner) gpus(ctx context.Context, count int, d device.Driver) ([]GPU, []Problem) {
	type result struct {
		gpu     *GPU
		address device.PCIAddress
		err     error
	}
	results, opening := make(chan result, count), newOpenings()
	readings := make([]*reading, count)
	for i := range readings { // all of them before the first limit is set
		readings[i] = newReading(opening.enter())
	}
	for i, r := range readings {
		go func() {
			defer r.opened()
			gpu, err := boundedWhile(ctx, s.limit, r.progress, opening, fmt.Sprintf("NVML for the GPU with index %d", i), func() (*GPU, error) { return s.gpu(i, d, r) })
			results <- result{gpu, r.known(), err}
		}()
	}
	var gpus []GPU
	var problems []Problem
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
	return gpus, problems
}

// distinct drops cards that claim another's place: two devices of one name would make the scheduler drop the whole pool.
func distinct(gpus []GPU, problems []Problem) ([]GPU, []Problem) {
	var kept []GPU
	for i, g := range gpus {
		if i > 0 && gpus[i-1].PCIAddress == g.PCIAddress {
			problems = append(problems, Problem{PCIAddress: g.PCIAddress, Message: fmt.Sprintf("NVML lists two GPUs at this address (%s and %s): only the first is offered", gpus[i-1].UUID, g.UUID)})
			continue
		}
		kept = append(kept, g)
	}
	return kept, problems
}

// explain completes the problems by what the PCI bus tells: cards that NVML does not mention at all, and the address of one
// that failed before it could say its own.
func explain(sysfs string, listed map[device.PCIAddress]bool, problems []Problem) []Problem {
	onBus, err := pciGPUs(sysfs)
	if err != nil {
		return problems // sysfs only helps to explain here
	}
	var nameless []int
	for i, p := range problems {
		if p.PCIAddress == "" {
			nameless = append(nameless, i)
		}
	}
	var unlisted []device.PCIAddress
	for _, a := range onBus {
		if listed[a] {
			continue
		}
		if driver := pciDriver(sysfs, a); driver != "" && driver != "nvidia" {
			problems = append(problems, Problem{PCIAddress: a, Message: fmt.Sprintf("bound to the kernel driver %s, not to nvidia", driver)})
			continue
		}
		unlisted = append(unlisted, a)
	}
	if len(nameless) == 1 && len(unlisted) == 1 {
		problems[nameless[0]].PCIAddress = unlisted[0]
		return problems
	}
	if len(nameless) > 0 {
		return problems // which is which cannot be told
	}
	for _, a := range unlisted {
		problems = append(problems, Problem{PCIAddress: a, Message: "on the PCI bus, but NVML does not list it: look at dmesg for NVRM messages about this address"})
	}
	return problems
}

// toError makes an error of NVML's answer, nil for success.
func toError(ret nvml.Return) error {
	if ret == nvml.SUCCESS {
		return nil
	}
	return nvmlError(ret)
}

// nvmlError is an NVML answer as an error. Its text comes from here, not from the library, which may be gone by then.
type nvmlError nvml.Return

func (r nvmlError) Error() string {
	if text, ok := returnTexts[nvml.Return(r)]; ok {
		return text
	}
	return fmt.Sprintf("NVML error %d", int(r))
}

var returnTexts = map[nvml.Return]string{
	nvml.ERROR_UNINITIALIZED:          "NVML is not initialized",
	nvml.ERROR_INVALID_ARGUMENT:       "an argument is invalid",
	nvml.ERROR_NOT_SUPPORTED:          "not supported by this GPU or driver",
	nvml.ERROR_NO_PERMISSION:          "no permission",
	nvml.ERROR_NOT_FOUND:              "not found",
	nvml.ERROR_DRIVER_NOT_LOADED:      "the NVIDIA kernel module is not loaded",
	nvml.ERROR_TIMEOUT:                "the driver timed out",
	nvml.ERROR_IRQ_ISSUE:              "the kernel has an interrupt problem with this GPU",
	nvml.ERROR_FUNCTION_NOT_FOUND:     "the driver is too old for this question",
	nvml.ERROR_CORRUPTED_INFOROM:      "the GPU's infoROM is corrupted",
	nvml.ERROR_GPU_IS_LOST:            "the GPU has fallen off the bus or is otherwise inaccessible (reset it or reboot the node, and look at dmesg for XIDs)",
	nvml.ERROR_RESET_REQUIRED:         "the GPU needs a reset",
	nvml.ERROR_OPERATING_SYSTEM:       "the operating system or a cgroup refused access",
	nvml.ERROR_IN_USE:                 "the GPU is in use",
	nvml.ERROR_MEMORY:                 "the driver is out of memory",
	nvml.ERROR_NOT_READY:              "the GPU is not ready",
	nvml.ERROR_INSUFFICIENT_SIZE:      "more answers than there should be",
	nvml.ERROR_INSUFFICIENT_RESOURCES: "the GPU has not enough resources left",
	nvml.ERROR_UNKNOWN:                "unknown error of the driver",
}

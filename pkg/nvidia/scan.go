package nvidia

import (
	"context"
	"fmt"
	"sort"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Scan reads the node once, in this process. A daemon should use [Isolated] instead. The error is a
// [NotReadyError] if the node lacks something that GPUs need. Any other error says what failed.
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

// scanner has the settings of one scan.
type scanner struct {
	paths Paths
	lib   nvml.Interface
	path  string
	limit time.Duration
	// group is the cgroup directory of this process. It is empty without cgroup v2.
	group string
}

func (s scanner) scan(ctx context.Context) (Node, error) {
	if _, err := bounded(ctx, s.limit, "nvmlInit", func() (any, error) { return nil, s.init() }); err != nil {
		return Node{}, err
	}
	// A hung card may hold NVML's lock forever, so wait only a limited time for the shutdown. The end
	// of the process closes NVML anyway.
	defer func() {
		_, _ = bounded(context.WithoutCancel(ctx), s.limit, "nvmlShutdown", func() (any, error) { return nil, toError(s.lib.Shutdown()) })
	}()

	node := Node{}
	var err error
	if node.Driver, err = bounded(ctx, s.limit, "reading the driver's version", s.driver); err != nil {
		return Node{}, err
	}
	if node.Common, err = bounded(ctx, s.limit, "collecting the driver's files", func() (edits, error) {
		return s.commonEdits(node.Driver)
	}); err != nil {
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

// init starts NVML. If the driver is absent, incomplete or of another version, NVML's answer to
// init is the first sign of it, so init adds a remedy to it.
func (s scanner) init() error {
	switch ret := s.lib.Init(); ret {
	case nvml.SUCCESS:
		return nil
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return notReady("check that the library fits this machine (architecture, glibc) and can be read", "%s cannot be loaded", s.path)
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return notReady("run modprobe nvidia on the node, and check dmesg if that fails", "the NVIDIA kernel module is not loaded")
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return notReady("finish the driver upgrade: unload the old kernel module (or reboot the node)",
			"the NVIDIA kernel module and %s are of different versions", s.path)
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

// gpus reads every GPU on its own goroutine, so that a hung GPU does not block the others.
func (s scanner) gpus(ctx context.Context, count int, d device.Driver) ([]GPU, []Problem) {
	type result struct {
		gpu     *GPU
		address device.PCIAddress
		err     error
	}
	results, opens := make(chan result, count), newPendingOpens()
	readings := make([]*gpuReading, count)
	for i := range readings { // add all cards before the first limit starts
		readings[i] = newGPUReading(opens.add())
	}
	for i, r := range readings {
		go func() {
			defer r.onOpen()
			what := fmt.Sprintf("NVML for the GPU with index %d", i)
			gpu, err := boundedWhile(ctx, s.limit, r.progress, opens, what, func() (*GPU, error) { return s.gpu(i, d, r) })
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

// distinct drops a card that has the same PCI address as the card before, and adds a problem for
// it. Otherwise two devices would have one name, and the scheduler would ignore the whole pool.
func distinct(gpus []GPU, problems []Problem) ([]GPU, []Problem) {
	var kept []GPU
	for i, g := range gpus {
		if i > 0 && gpus[i-1].PCIAddress == g.PCIAddress {
			message := fmt.Sprintf("NVML lists two GPUs at this address (%s and %s): only the first is offered", gpus[i-1].UUID, g.UUID)
			problems = append(problems, Problem{PCIAddress: g.PCIAddress, Message: message})
			continue
		}
		kept = append(kept, g)
	}
	return kept, problems
}

// explain adds a problem for each card on the PCI bus that NVML does not list. If a problem has no
// address and only one such card is left, explain sets that card's address instead. If this is
// ambiguous, explain leaves those cards out.
func explain(sysfs string, listed map[device.PCIAddress]bool, problems []Problem) []Problem {
	onBus, err := pciGPUs(sysfs)
	if err != nil {
		return problems // without sysfs, the problems stay as they are
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
		return problems // it is unknown which address belongs to which problem
	}
	for _, a := range unlisted {
		problems = append(problems, Problem{
			PCIAddress: a,
			Message:    "on the PCI bus, but NVML does not list it: check dmesg for NVRM messages about this address",
		})
	}
	return problems
}

// toError returns an NVML return code as an error, and nil for SUCCESS.
func toError(ret nvml.Return) error {
	if ret == nvml.SUCCESS {
		return nil
	}
	return nvmlError(ret)
}

// nvmlError is an NVML return code as an error. Its text does not come from the library, because
// the library may already be unloaded.
type nvmlError nvml.Return

func (r nvmlError) Error() string {
	if text, ok := returnTexts[nvml.Return(r)]; ok {
		return text
	}
	return fmt.Sprintf("NVML error %d", int(r))
}

var returnTexts = map[nvml.Return]string{
	nvml.ERROR_UNINITIALIZED:      "NVML is not initialized",
	nvml.ERROR_INVALID_ARGUMENT:   "an argument is invalid",
	nvml.ERROR_NOT_SUPPORTED:      "not supported by this GPU or driver",
	nvml.ERROR_NO_PERMISSION:      "no permission",
	nvml.ERROR_NOT_FOUND:          "not found",
	nvml.ERROR_DRIVER_NOT_LOADED:  "the NVIDIA kernel module is not loaded",
	nvml.ERROR_TIMEOUT:            "the driver timed out",
	nvml.ERROR_IRQ_ISSUE:          "the kernel has an interrupt problem with this GPU",
	nvml.ERROR_FUNCTION_NOT_FOUND: "the driver is too old for this query",
	nvml.ERROR_CORRUPTED_INFOROM:  "the GPU's infoROM is corrupted",
	nvml.ERROR_GPU_IS_LOST: "the GPU has fallen off the bus or is otherwise inaccessible " +
		"(reset it or reboot the node, and check dmesg for XIDs)",
	nvml.ERROR_RESET_REQUIRED:         "the GPU needs a reset",
	nvml.ERROR_OPERATING_SYSTEM:       "the operating system or a cgroup refused access",
	nvml.ERROR_IN_USE:                 "the GPU is in use",
	nvml.ERROR_MEMORY:                 "the driver is out of memory",
	nvml.ERROR_NOT_READY:              "the GPU is not ready",
	nvml.ERROR_INSUFFICIENT_SIZE:      "more answers than expected",
	nvml.ERROR_INSUFFICIENT_RESOURCES: "the GPU has not enough resources left",
	nvml.ERROR_UNKNOWN:                "unknown error of the driver",
}

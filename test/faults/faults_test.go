package faults

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2/ktesting"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// These are the NVML functions that the plugin calls for Prepare and Unprepare: reading has those
// that only read, changing those that change the hardware.
var (
	reading = []string{
		"nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetMinorNumber",
		"nvmlDeviceGetMigMode", "nvmlDeviceGetGpuInstanceProfileInfo", "nvmlDeviceGetGpuInstanceById",
		"nvmlGpuInstanceGetInfo", "nvmlGpuInstanceGetComputeInstanceProfileInfo",
		"nvmlComputeInstanceGetInfo_v2", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex",
		"nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId",
	}
	changing = []string{
		"nvmlDeviceSetMigMode", "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance",
		"nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy",
	}
)

// hangTime is how long a hanging call takes. It is longer than any timeout.
const hangTime = time.Hour

type fault struct {
	name string
	state.Fault
	// functions are the NVML functions into which the test injects the fault.
	functions []string
	// timeouts are the kubelet's timeouts for Prepare and Unprepare under this fault. The default is a
	// minute.
	timeouts map[operation]time.Duration
}

var allFunctions = slices.Concat(reading, changing)

// shortTimeouts are so short that Prepare and Unprepare have about 3 s for their work. The plugin
// reserves the rest of each timeout for the rollback and the answer.
var shortTimeouts = map[operation]time.Duration{
	prepareParts: 13 * time.Second, unprepareParts: 5 * time.Second, prepareWhole: 13 * time.Second,
}

var faults = []fault{
	{"an error", state.Fault{Kind: state.FaultFail, Error: uint32(nvml.ERROR_UNKNOWN)}, allFunctions, nil},
	{"an error after its effect", state.Fault{Kind: state.FaultFail, Error: uint32(nvml.ERROR_UNKNOWN), After: 1}, changing, nil},
	{"in use", state.Fault{Kind: state.FaultFail, Error: uint32(nvml.ERROR_IN_USE)}, changing, nil},
	{"a hanging call", state.Fault{Kind: state.FaultSlow, DelayMS: uint64(hangTime.Milliseconds())}, allFunctions, shortTimeouts},
	{"kill -9 of the worker before", state.Fault{Kind: state.FaultKill}, allFunctions, nil},
	{"kill -9 of the worker after", state.Fault{Kind: state.FaultKill, After: 1}, changing, nil},
	{"kill -9 of the plugin before", state.Fault{Kind: state.FaultKill, Group: 1}, allFunctions, nil},
	{"kill -9 of the plugin after", state.Fault{Kind: state.FaultKill, Group: 1, After: 1}, changing, nil},
}

func TestRestartRecoversFromFaultInEveryNVMLCall(t *testing.T) {
	called := map[operation][]string{}
	for _, o := range operations {
		called[o] = calls(t, o)
	}
	var mu sync.Mutex
	hit := map[string]int{}    // by fault and function
	passed := map[string]int{} // number of operations, by fault
	t.Run("each", func(t *testing.T) {
		for _, f := range faults {
			for _, o := range operations {
				t.Run(f.name+", "+string(o), func(t *testing.T) {
					t.Parallel()
					s := newTestNode(t)
					for _, function := range f.functions {
						if !slices.Contains(called[o], function) {
							continue
						}
						if s.runWithFault(t, f, function, o) {
							mu.Lock()
							hit[f.name+" in "+function]++
							mu.Unlock()
						}
					}
					mu.Lock()
					defer mu.Unlock()
					passed[f.name]++
				})
			}
		}
	})
	times := 0
	for _, f := range faults {
		for _, function := range f.functions {
			n := hit[f.name+" in "+function]
			times += n
			if n == 0 && passed[f.name] == len(operations) {
				t.Errorf("no operation met %s in %s", f.name, function)
			}
		}
	}
	t.Logf("injected %d faults", times)
}

// addAdminInstance creates a MIG instance on half of the second GPU, as an admin would.
func (s *testNode) addAdminInstance(t *testing.T) {
	t.Helper()
	p := s.start(t)
	defer nvidiatest.StopWorkers(p.Worker)
	c := p.card(gpu1)
	_, err := p.Worker.SetMode(t.Context(), c, true)
	if err != nil {
		t.Fatal(err)
	}
	in, err := p.Worker.CreateInstance(t.Context(), c, 9, device.Placement{Start: 0, Size: 4})
	if err == nil {
		in, err = p.Worker.CreateCompute(t.Context(), c, in.ID)
	}
	if err != nil {
		t.Fatal(err)
	}
	s.adminInstances = []device.Instance{in}
}

// start starts the plugin's code for Prepare and Unprepare, without the plugin's periodic scans and
// publishing. The test fails if that returns an error.
func (s *testNode) start(t *testing.T) *plugin {
	t.Helper()
	p, err := s.newPlugin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// calls returns those NVML functions that the operation calls when there is no fault. A fault in
// any other function would not affect the operation.
func calls(t *testing.T, o operation) (functions []string) {
	t.Helper()
	must := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %s: %v", o, what, err)
		}
	}
	s := newTestNode(t)
	s.runBefore(t, o, must)
	must("count", s.inProcess(t, o, time.Minute, func() error {
		return s.Change(func(file *state.File) error {
			for _, function := range allFunctions {
				if err := file.AddFault(state.Fault{Kind: state.FaultSlow, DelayMS: 1, GPU: state.AnyGPU}, function, 0); err != nil {
					return err
				}
			}
			return nil
		})
	}))
	must("count", s.Change(func(file *state.File) error {
		for i, function := range allFunctions {
			if file.Fault(i).Hits > 0 {
				functions = append(functions, function)
			}
		}
		return file.ClearFaults()
	}))
	t.Logf("%s calls %q", o, functions)
	return functions
}

// runBefore brings the node to the state in which the operation o can start.
func (s *testNode) runBefore(t *testing.T, o operation, must func(string, error)) {
	t.Helper()
	before := s.start(t)
	if o != prepareParts {
		must("before", before.do(t.Context(), prepareParts))
	}
	if o == prepareWhole {
		must("before", before.do(t.Context(), unprepareParts))
	}
	nvidiatest.StopWorkers(before.Worker)
	for _, c := range []*resourceapi.ResourceClaim{parts, whole} {
		must("before", s.api.Free(t.Context(), c))
	}
	switch o {
	case prepareParts:
		must("before", s.api.Allocate(t.Context(), parts))
	case prepareWhole:
		must("before", s.api.Allocate(t.Context(), whole))
	case unprepareParts: // the Pod has ended and its claim is deleted
	}
}

// runWithFault runs the operation o with one fault in this NVML function, restarts the plugin, and
// fails the test unless all state agrees. hit is false if the operation did not call the function.
func (s *testNode) runWithFault(t *testing.T, f fault, function string, o operation) (hit bool) {
	t.Helper()
	must := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s, %s in %s: %s: %v", f.name, o, function, what, err)
		}
	}
	s.runBefore(t, o, must)

	f.GPU = state.AnyGPU
	arm := func() error {
		return s.Change(func(file *state.File) error { return file.AddFault(f.Fault, function, 1) })
	}
	run := s.inProcess
	if f.Group != 0 {
		run = s.asProcess
	}
	err := run(t, o, cmp.Or(f.timeouts[o], time.Minute), arm)
	must("count", s.Change(func(file *state.File) error {
		hit = file.Fault(0).Hits > 0
		return file.ClearFaults()
	}))
	if !hit {
		must("without a fault", err)
	}
	s.checkAfterRestart(t, must)
	return hit
}

// checkAfterRestart restarts the plugin. It fails the test unless hardware, checkpoint records, CDI
// specs, statuses and slices agree, and claims can be prepared and unprepared again.
func (s *testNode) checkAfterRestart(t *testing.T, must func(string, error)) {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	d, err := s.Start(ctx, s.api)
	must("start again", err)
	defer func() {
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	}()
	p, err := s.newPlugin(t.Context())
	must("start again", err)
	defer nvidiatest.StopWorkers(p.Worker)
	o := observer{p, s.Node, s.api, s.adminInstances}
	must("after the restart", eventually(t.Context(), o.checkAll))

	prepare := func(c *resourceapi.ResourceClaim) {
		t.Helper()
		must("once more", s.api.Allocate(t.Context(), c))
		// The test retries, as the kubelet does: a plugin that has just started may not have scanned the
		// hardware yet.
		must("once more", eventually(t.Context(), func(ctx context.Context) error { return d.Prepare(ctx, c) }))
		must("after "+c.Name+" was prepared once more", eventually(t.Context(), o.check))
	}
	unprepare := func(c *resourceapi.ResourceClaim) {
		t.Helper()
		must("once more", s.api.Free(t.Context(), c))
		must("once more", d.Unprepare(t.Context(), c))
		must("after "+c.Name+" was unprepared once more", eventually(t.Context(), o.check))
	}
	unprepare(whole)
	unprepare(parts)
	prepare(parts)
	unprepare(parts)
	prepare(whole)
	unprepare(whole)
}

func (s *testNode) inProcess(t *testing.T, o operation, limit time.Duration, arm func() error) error {
	t.Helper()
	p, err := s.newPlugin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer nvidiatest.StopWorkers(p.Worker)
	if err := arm(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	return p.do(ctx, o)
}

func (s *testNode) asProcess(t *testing.T, o operation, limit time.Duration, arm func() error) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	command := s.Command(string(o))
	child := exec.CommandContext(ctx, command[0], command[1:]...) //nolint:gosec // it is the test binary
	child.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdin, err1 := child.StdinPipe()
	stdout, err2 := child.StdoutPipe()
	if err := errors.Join(err1, err2, child.Start()); err != nil {
		t.Fatal(err)
	}
	answers := bufio.NewReader(stdout)
	if _, err := answers.ReadString('\n'); err != nil {
		t.Fatal(err, child.Wait())
	}
	if err := arm(); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintln(stdin, "go"); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, answers)
	return child.Wait()
}

package faults

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// Every function of NVML that is called on the way.
var (
	reading = []string{
		"nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetMigMode",
		"nvmlDeviceGetGpuInstanceProfileInfo", "nvmlDeviceGetGpuInstanceById", "nvmlGpuInstanceGetInfo", "nvmlGpuInstanceGetComputeInstanceProfileInfo",
		"nvmlComputeInstanceGetInfo_v2", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex",
		"nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId",
	}
	changing = []string{
		"nvmlDeviceSetMigMode", "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance", "nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy",
	}
)

const (
	// hangs is how long a call hangs that hangs, shortTime how long the kubelet waits for a claim then, and longTime otherwise.
	hangs     = time.Hour
	shortTime = 11 * time.Second
	longTime  = time.Minute
)

type fault struct {
	name string
	state.Fault
	// functions are those that can meet it.
	functions []string
	time      time.Duration
}

var all = slices.Concat(reading, changing)

var faults = []fault{
	{"an error", state.Fault{Kind: state.FaultFail, Error: uint32(nvml.ERROR_UNKNOWN)}, all, longTime},
	{"an error after its effect", state.Fault{Kind: state.FaultFail, Error: uint32(nvml.ERROR_UNKNOWN), After: 1}, changing, longTime},
	{"in use", state.Fault{Kind: state.FaultFail, Error: uint32(nvml.ERROR_IN_USE)}, changing, longTime},
	{"a call without an end", state.Fault{Kind: state.FaultSlow, DelayMS: uint64(hangs.Milliseconds())}, changing, shortTime},
	{"kill -9 of the worker before", state.Fault{Kind: state.FaultKill}, all, longTime},
	{"kill -9 of the worker after", state.Fault{Kind: state.FaultKill, After: 1}, changing, longTime},
	{"kill -9 of the plugin before", state.Fault{Kind: state.FaultKill, Group: 1}, all, longTime},
	{"kill -9 of the plugin after", state.Fault{Kind: state.FaultKill, Group: 1, After: 1}, changing, longTime},
}

func TestWhateverGoesWrongInWhicheverCallHardwareRecordsAndSpecsAgreeAfterwards(t *testing.T) {
	for _, f := range faults {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			s := newStand(t)
			theirs := s.halfAnAdmins(t)
			met := 0
			for _, function := range f.functions {
				for _, o := range []operation{prepareParts, unprepareParts, prepareWhole} {
					if s.disturb(t, f, function, o, theirs) {
						met++
					}
					if t.Failed() {
						t.Fatalf("%s, in %s", o, function)
					}
				}
			}
			t.Logf("met %d times", met)
			if met < len(f.functions) {
				t.Errorf("%d functions, and it was met %d times", len(f.functions), met)
			}
		})
	}
}

// halfAnAdmins cuts half of the second GPU past the plugin.
func (s stand) halfAnAdmins(t *testing.T) []device.Instance {
	t.Helper()
	p := s.start(t)
	defer p.Cuts.Close()
	c := p.card(gpu1)
	_, err := p.Cuts.SetMode(t.Context(), c, true)
	if err != nil {
		t.Fatal(err)
	}
	in, err := p.Cuts.CreateInstance(t.Context(), c, 9, device.Placement{Start: 0, Size: 4})
	if err == nil {
		in, err = p.Cuts.CreateCompute(t.Context(), c, in.ID)
	}
	if err != nil {
		t.Fatal(err)
	}
	return []device.Instance{in}
}

func (s stand) start(t *testing.T) *plugin {
	t.Helper()
	p, err := s.plugin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// disturb lets one operation meet one fault, and looks at what is there after a restart. It is false where the operation does not make the call.
func (s stand) disturb(t *testing.T, f fault, function string, o operation, theirs []device.Instance) (met bool) {
	t.Helper()
	must := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s, %s in %s: %s: %v", f.name, o, function, what, err)
		}
	}
	before := s.start(t)
	if o != prepareParts {
		must("before", before.do(t.Context(), prepareParts))
	}
	if o == prepareWhole {
		must("before", before.do(t.Context(), unprepareParts))
	}
	before.Cuts.Close()

	f.GPU = state.AnyGPU
	arm := func() error {
		return s.Change(func(file *state.File) error { return file.AddFault(f.Fault, function, 1) })
	}
	run := s.inProcess
	if f.Group != 0 {
		run = s.asProcess
	}
	err := run(t, o, f.time, arm)
	must("count", s.Change(func(file *state.File) error {
		met = file.Fault(0).Hits > 0
		return file.ClearFaults()
	}))
	if !met {
		must("undisturbed", err)
	}

	after, err := s.plugin(t.Context())
	must("start again", err)
	defer after.Cuts.Close()
	must("scan again", after.Look(t.Context()))
	must("after the restart", after.agree(t.Context(), theirs))
	for _, again := range []operation{unprepareParts, prepareParts} {
		must("once more", after.Unprepare(t.Context(), whole.UID))
		must("once more", after.do(t.Context(), again))
		must("after "+string(again), after.agree(t.Context(), theirs))
	}
	must("in the end", after.do(t.Context(), unprepareParts))
	must("in the end", after.do(t.Context(), prepareWhole))
	must("in the end", after.Unprepare(t.Context(), whole.UID))
	must("in the end", after.agree(t.Context(), theirs))
	return met
}

func (s stand) inProcess(t *testing.T, o operation, limit time.Duration, arm func() error) error {
	t.Helper()
	p, err := s.unrecovered(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Cuts.Close()
	if err := arm(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	return p.do(ctx, o)
}

func (s stand) asProcess(t *testing.T, o operation, limit time.Duration, arm func() error) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	command := s.Command(string(o))
	child := exec.CommandContext(ctx, command[0], command[1:]...) //nolint:gosec // ourselves
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

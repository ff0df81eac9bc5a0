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

// hangs is how long a call hangs that hangs.
const hangs = time.Hour

type fault struct {
	name string
	state.Fault
	// functions are those that can meet it.
	functions []string
	// time is how long the kubelet waits for each operation; a minute if it says nothing of one.
	time map[operation]time.Duration
}

var all = slices.Concat(reading, changing)

// impatient leaves about three seconds for what an operation does, and the rest for what it undoes and says.
var impatient = map[operation]time.Duration{prepareParts: 13 * time.Second, unprepareParts: 5 * time.Second, prepareWhole: 13 * time.Second}

var faults = []fault{
	{"an error", state.Fault{Kind: state.FaultFail, Error: uint32(nvml.ERROR_UNKNOWN)}, all, nil},
	{"an error after its effect", state.Fault{Kind: state.FaultFail, Error: uint32(nvml.ERROR_UNKNOWN), After: 1}, changing, nil},
	{"in use", state.Fault{Kind: state.FaultFail, Error: uint32(nvml.ERROR_IN_USE)}, changing, nil},
	{"a call without an end", state.Fault{Kind: state.FaultSlow, DelayMS: uint64(hangs.Milliseconds())}, all, impatient},
	{"kill -9 of the worker before", state.Fault{Kind: state.FaultKill}, all, nil},
	{"kill -9 of the worker after", state.Fault{Kind: state.FaultKill, After: 1}, changing, nil},
	{"kill -9 of the plugin before", state.Fault{Kind: state.FaultKill, Group: 1}, all, nil},
	{"kill -9 of the plugin after", state.Fault{Kind: state.FaultKill, Group: 1, After: 1}, changing, nil},
}

func TestWhateverGoesWrongInWhicheverCallAllAgreesAfterARestart(t *testing.T) {
	called := map[operation][]string{}
	for _, o := range operations {
		called[o] = calls(t, o)
	}
	var mu sync.Mutex
	met := map[string]int{}    // by fault and function
	passed := map[string]int{} // by fault, how many operations
	t.Run("each", func(t *testing.T) {
		for _, f := range faults {
			for _, o := range operations {
				t.Run(f.name+", "+string(o), func(t *testing.T) {
					t.Parallel()
					s := newStand(t)
					for _, function := range f.functions {
						if !slices.Contains(called[o], function) {
							continue
						}
						if s.disturb(t, f, function, o) {
							mu.Lock()
							met[f.name+" in "+function]++
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
			n := met[f.name+" in "+function]
			times += n
			if n == 0 && passed[f.name] == len(operations) {
				t.Errorf("no operation met %s in %s", f.name, function)
			}
		}
	}
	t.Logf("faults were met %d times", times)
}

// halfAnAdmins cuts half of the second GPU past the plugin.
func (s *stand) halfAnAdmins(t *testing.T) {
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
	s.theirs = []device.Instance{in}
}

// start is a plugin that has just been started, without what it does beside the kubelet's calls.
func (s *stand) start(t *testing.T) *plugin {
	t.Helper()
	p, err := s.unrecovered(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// calls are the functions of which an operation that nothing disturbs makes calls: no others can go wrong in it.
func calls(t *testing.T, o operation) (functions []string) {
	t.Helper()
	must := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %s: %v", o, what, err)
		}
	}
	s := newStand(t)
	s.until(t, o, must)
	must("count", s.inProcess(t, o, time.Minute, func() error {
		return s.Change(func(file *state.File) error {
			for _, function := range all {
				if err := file.AddFault(state.Fault{Kind: state.FaultSlow, DelayMS: 1, GPU: state.AnyGPU}, function, 0); err != nil {
					return err
				}
			}
			return nil
		})
	}))
	must("count", s.Change(func(file *state.File) error {
		for i, function := range all {
			if file.Fault(i).Hits > 0 {
				functions = append(functions, function)
			}
		}
		return file.ClearFaults()
	}))
	t.Logf("%s calls %q", o, functions)
	return functions
}

// until does what comes before an operation.
func (s *stand) until(t *testing.T, o operation, must func(string, error)) {
	t.Helper()
	before := s.start(t)
	if o != prepareParts {
		must("before", before.do(t.Context(), prepareParts))
	}
	if o == prepareWhole {
		must("before", before.do(t.Context(), unprepareParts))
	}
	before.Cuts.Close()
	for _, c := range []*resourceapi.ResourceClaim{parts, whole} {
		must("before", s.api.Free(t.Context(), c))
	}
	switch o {
	case prepareParts:
		must("before", s.api.Allocate(t.Context(), parts))
	case prepareWhole:
		must("before", s.api.Allocate(t.Context(), whole))
	case unprepareParts: // its Pod has ended
	}
}

// disturb lets one operation meet one fault, and looks at what is there after a restart. It is false where the operation does not make the call.
func (s *stand) disturb(t *testing.T, f fault, function string, o operation) (met bool) {
	t.Helper()
	must := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s, %s in %s: %s: %v", f.name, o, function, what, err)
		}
	}
	s.until(t, o, must)

	f.GPU = state.AnyGPU
	arm := func() error {
		return s.Change(func(file *state.File) error { return file.AddFault(f.Fault, function, 1) })
	}
	run := s.inProcess
	if f.Group != 0 {
		run = s.asProcess
	}
	err := run(t, o, cmp.Or(f.time[o], time.Minute), arm)
	must("count", s.Change(func(file *state.File) error {
		met = file.Fault(0).Hits > 0
		return file.ClearFaults()
	}))
	if !met {
		must("undisturbed", err)
	}
	s.look(t, must)
	return met
}

// look starts the plugin again, looks whether all agrees, and whether everything can still be done.
func (s *stand) look(t *testing.T, must func(string, error)) {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	d, err := s.Start(ctx, s.api)
	must("start again", err)
	defer func() {
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	}()
	p, err := s.unrecovered(t.Context())
	must("start again", err)
	defer p.Cuts.Close()
	o := outside{p, s.Host, s.api, s.theirs}
	must("after the restart", eventually(t.Context(), o.agreeAll))

	prepare := func(c *resourceapi.ResourceClaim) {
		t.Helper()
		must("once more", s.api.Allocate(t.Context(), c))
		// As the kubelet does: a plugin that has just started may not have looked at the hardware yet.
		must("once more", eventually(t.Context(), func(ctx context.Context) error { return d.Prepare(ctx, c) }))
		must("after "+c.Name+" was prepared once more", eventually(t.Context(), o.agree))
	}
	unprepare := func(c *resourceapi.ResourceClaim) {
		t.Helper()
		must("once more", s.api.Free(t.Context(), c))
		must("once more", d.Unprepare(t.Context(), c))
		must("after "+c.Name+" was unprepared once more", eventually(t.Context(), o.agree))
	}
	unprepare(whole)
	unprepare(parts)
	prepare(parts)
	unprepare(parts)
	prepare(whole)
	unprepare(whole)
}

func (s *stand) inProcess(t *testing.T, o operation, limit time.Duration, arm func() error) error {
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

func (s *stand) asProcess(t *testing.T, o operation, limit time.Duration, arm func() error) error {
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

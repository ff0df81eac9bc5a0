package main

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/smi"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// tool runs nvmlsim commands on one state file.
type tool struct {
	t    *testing.T
	path string
}

func newTool(t *testing.T) *tool {
	t.Helper()
	t.Setenv("NVMLSIM_STATE", "")
	tool := &tool{t: t, path: filepath.Join(t.TempDir(), "state.bin")}
	tool.run("compile", "--node", "../../nodes/dgx-h100.yaml", "--models", "../../models", tool.path)
	return tool
}

func (c *tool) try(args ...string) error {
	command := newCommand()
	command.SetArgs(append([]string{"--state", c.path}, args...))
	return command.Execute()
}

func (c *tool) run(args ...string) {
	c.t.Helper()
	if err := c.try(args...); err != nil {
		c.t.Fatalf("nvmlsim %s: %v", strings.Join(args, " "), err)
	}
}

func (c *tool) shown() shownNode {
	c.t.Helper()
	f, err := state.Open(c.path)
	if err != nil {
		c.t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	return describe(f)
}

func TestGPUByIndexUUIDOrAddress(t *testing.T) {
	c := newTool(t)
	uuid := c.shown().GPUs[5].UUID
	for _, name := range []string{"5", uuid, "0000:c3:00.0", "0000:C3:00.0", "00000000:C3:00.0"} {
		c.run("lose", name)
		if got := c.shown().GPUs[5].Condition; got != "lost" {
			t.Errorf("lose %s: GPU 5 is %s", name, got)
		}
		c.run("restore", name)
		if got := c.shown().GPUs[5].Condition; got != "ok" {
			t.Errorf("restore %s: GPU 5 is %s", name, got)
		}
	}
}

func TestHealthCommands(t *testing.T) {
	c := newTool(t)
	c.run("ecc", "1", "single")
	c.run("ecc", "1", "double")
	c.run("xid", "1", "94")
	c.run("recovery", "1", "drain-and-reset")
	shown := c.shown()
	if gpu := shown.GPUs[1]; gpu.ECCSingle != 1 || gpu.ECCDouble != 1 || gpu.Recovery != "drain-and-reset" || shown.Events != 3 {
		t.Errorf("%+v, %d events", gpu, shown.Events)
	}
}

func TestCommandsOnCardsAndEvents(t *testing.T) {
	c := newTool(t)
	c.run("xid", "2", "31", "--count", "500")
	c.run("xid", "2", "31", "--count", "5", "--over", "5ms")
	c.run("recovery", "2", "bus-reset", "--announce")
	c.run("event", "2", "fatalPoison", "0x10")
	c.run("events", "2", "xid,recoveryAction")
	c.run("events", "3", "none")
	c.run("remap", "2", "both")
	c.run("fabric", "2", "completed", "--error", "NVML_ERROR_UNKNOWN")
	shown := c.shown()
	if gpu := shown.GPUs[2]; shown.Events != 508 || gpu.Recovery != "bus-reset" || gpu.Remap != "both" ||
		!slices.Equal(gpu.Events, []string{"recoveryAction", "xid"}) {
		t.Errorf("%+v, %d events", gpu, shown.Events)
	}
	if events := shown.GPUs[3].Events; len(events) > 0 {
		t.Errorf("GPU 3 supports %v", events)
	}
	c.run("unplug", "2")
	if gpu := c.shown().GPUs[2]; gpu.Condition != "gone" {
		t.Errorf("unplugged: %s", gpu.Condition)
	}
	c.run("plug", "2", "--uuid", "GPU-00000000-1111-2222-3333-444444444444")
	if gpu := c.shown().GPUs[2]; gpu.Condition != "ok" || gpu.Recovery != "none" || gpu.Remap != "none" ||
		gpu.UUID != "GPU-00000000-1111-2222-3333-444444444444" {
		t.Errorf("plugged in: %+v", gpu)
	}
	c.run("show")
}

func TestFaultCommands(t *testing.T) {
	c := newTool(t)
	c.run("slow", "nvmlDeviceGetName", "1500ms", "--gpu", "2", "--times", "3")
	c.run("fail", "nvmlInit_v2", "NVML_ERROR_UNKNOWN")
	want := []shownFault{
		{Function: "nvmlDeviceGetName", GPU: "2", Effect: "slow: 1.5s", Left: "3"},
		{Function: "nvmlInit_v2", GPU: "any", Effect: "fails: NVML_ERROR_UNKNOWN", Left: "always"},
	}
	faults := c.shown().Faults
	if len(faults) != 2 || faults[0] != want[0] || faults[1] != want[1] {
		t.Errorf("faults %+v, want %+v", faults, want)
	}
	c.run("show")
	c.run("show", "-o", "yaml")
	c.run("clear")
	if faults := c.shown().Faults; len(faults) != 0 {
		t.Errorf("faults after clear: %+v", faults)
	}
}

func TestMIGCommands(t *testing.T) {
	c := newTool(t)
	c.run("compile", "--node", "../../nodes/static-mig.yaml", "--models", "../../models", c.path)
	c.run("busy", "0", "4711")
	c.run("busy", "0/5/0", "4712", "4713")
	c.run("lock", "gpu")
	c.run("fabric", "1", "notStarted")
	c.run("fabric", "--settle", "2s")
	c.run("kill", "nvmlGpuInstanceDestroy", "--after", "--group", "--times", "1")
	shown := c.shown()
	want := []shownProcess{{PID: 4711}, {PID: 4712, Instance: "5/0"}, {PID: 4713, Instance: "5/0"}}
	if first := shown.GPUs[0]; !slices.Equal(first.Processes, want) || first.MIG.mode() != "on" || len(first.MIG.Instances) != 3 {
		t.Errorf("%+v, %+v", first.Processes, first.MIG)
	}
	if gi := shown.GPUs[0].MIG.Instances[1]; gi.ID != 5 || gi.Profile != "MIG 2g.20gb" || gi.Placement != "4:2" || len(gi.Compute) != 1 ||
		gi.Compute[0].UUID == "" {
		t.Errorf("%+v", gi)
	}
	if mode := shown.GPUs[3].MIG.mode(); mode != "off, pending on" {
		t.Errorf("the second A100's MIG mode is %s", mode)
	}
	if len(shown.Faults) != 1 || shown.Faults[0].Effect != "kills the group, afterwards" || shown.Lock != "gpu" {
		t.Errorf("faults %+v, lock %s", shown.Faults, shown.Lock)
	}
	c.run("show")
	if err := c.try("reset", "0"); !errors.Is(err, state.ErrBusy) {
		t.Errorf("reset of a busy GPU: %v", err)
	}
	c.run("busy", "0", "--clear")
	c.run("reset", "0")
	c.run("reset", "3")
	shown = c.shown()
	if first := shown.GPUs[0]; first.MIG.mode() != "off" || len(first.MIG.Instances) > 0 || len(first.Processes) > 0 {
		t.Errorf("after a reset: %+v", first.MIG)
	}
	if mode := shown.GPUs[3].MIG.mode(); mode != "on" {
		t.Errorf("after its reset the second A100's MIG mode is %s", mode)
	}
}

func TestInvalidInputIsNamed(t *testing.T) {
	c := newTool(t)
	for _, bad := range []struct {
		args []string
		want string
	}{
		{[]string{"lose", "8"}, "no GPU 8"},
		{[]string{"lose", "GPU-x"}, "GPU-x"},
		{[]string{"xid", "0", "many"}, "many"},
		{[]string{"ecc", "0", "triple"}, "triple"},
		{[]string{"recovery", "0", "pray"}, "pray"},
		{[]string{"slow", "nvmlDeviceGetName", "soon"}, "soon"},
		{[]string{"slow", "nvmlDeviceGetName", "99h"}, "more than a day"},
		{[]string{"slow", "nvmlDeviceGetNam", "1s"}, "nvmlDeviceGetNam"},
		{[]string{"slow", "mpsStart", "1s"}, "mpsControlStart"},
		{[]string{"fail", "mpsControlStart", "NVML_ERROR_UNKNOWN", "--after"}, "changes nothing"},
		{[]string{"event", "0", "boom", "1"}, "boom"},
		{[]string{"event", "0", "xid", "many"}, "many"},
		{[]string{"events", "0", "xid,boom"}, "boom"},
		{[]string{"remap", "0", "maybe"}, "maybe"},
		{[]string{"plug", "0"}, "not empty"},
		{[]string{"fabric", "0", "completed", "--error", "NVML_OOPS"}, "NVML_OOPS"},
		{[]string{"fail", "nvmlDeviceGetName", "NVML_OOPS"}, "NVML_OOPS"},
		{[]string{"kill", "nvmlDeviceGetName", "--after"}, "changes nothing"},
		{[]string{"busy", "0/5", "1"}, "GPU/GI/CI"},
		{[]string{"busy", "0", "init"}, "init"},
		{[]string{"lock", "cpu"}, "cpu"},
		{[]string{"fabric", "0", "torn"}, "torn"},
		{[]string{"fabric", "0"}, "fabric state"},
		{[]string{"show", "-o", "json"}, "json"},
		{[]string{"driver", "away", "--root", "/nonexistent"}, "layout up"},
		{[]string{"--state", "/nonexistent", "show"}, "/nonexistent"},
	} {
		if err := c.try(bad.args...); err == nil || !strings.Contains(err.Error(), bad.want) {
			t.Errorf("nvmlsim %s: error %v does not name %q", strings.Join(bad.args, " "), err, bad.want)
		}
	}
}

func TestExitCodes(t *testing.T) {
	for want, err := range map[int]error{
		exitFailed: errors.New("any"), exitInUse: errors.Join(state.ErrInUse, nil),
		exitUnavailable: errors.Join(errors.New("no"), smi.ErrUnavailable),
	} {
		if got := exitCode(err); got != want {
			t.Errorf("exit code of %v is %d, want %d", err, got, want)
		}
	}
}

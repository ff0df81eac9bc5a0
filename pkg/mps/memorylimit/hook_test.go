package memorylimit

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
)

const gpu = "GPU-00000000-0000-0000-0000-000000000000"

// node fakes a host whose driver has a fake nvidia-smi. That program writes its arguments to the
// file "calls", and answers --get with the content of the file "shows".
type node struct {
	*testing.T
	dir string
}

func newNode(t *testing.T) node {
	t.Helper()
	n := node{t, t.TempDir()}
	n.write("driver/usr/lib64/"+driverroot.NVML, "", 0o600)
	n.write("driver/usr/bin/nvidia-smi", fmt.Sprintf("#!/bin/sh\ncd %s\necho \"$@\" >>calls\ncase $2 in\n"+
		"--set) cat fails 2>/dev/null && exit 6; exit 0;;\nesac\ncat shows\n", n.dir), 0o700)
	n.write("proc/77/cgroup", "12:memory:/elsewhere\n0::/kubepods/pod1/c1\n", 0o600)
	n.write("shows", "namespace: /cg/kubepods/pod1/c1\nsoft limit: 0 MiB\nhard limit: 18432 MiB\ncurrent used: 0 MiB\n", 0o600)
	return n
}

func (n node) write(path, text string, mode os.FileMode) {
	n.Helper()
	path = filepath.Join(n.dir, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		n.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		n.Fatal(err)
	}
}

func (n node) apply() error {
	c := container{state: specs.State{ID: "c1", Pid: 77}}
	return Limit{GPU: gpu, Mebibytes: 18432, DriverRoot: filepath.Join(n.dir, "driver"),
		Cgroups: "/cg"}.apply(n.Context(), c, filepath.Join(n.dir, "proc"))
}

func (n node) calls() string {
	text, err := os.ReadFile(filepath.Join(n.dir, "calls"))
	if err != nil {
		return ""
	}
	return string(text)
}

func TestHookLimitsTheContainersControlGroup(t *testing.T) {
	n := newNode(t)
	if err := n.apply(); err != nil {
		t.Fatal(err)
	}
	want := "memory-limits --set --namespace /cg/kubepods/pod1/c1 --soft-limit 0 --hard-limit 18432 -i " + gpu + "\n" +
		"memory-limits --get --namespace /cg/kubepods/pod1/c1 -i " + gpu + "\n"
	if got := n.calls(); got != want {
		t.Errorf("nvidia-smi was called with\n%s", got)
	}
}

func TestHookFailsIfLimitDoesNotHold(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(node)
		says   string
		noCall bool
	}{
		"only cgroup v1":       {func(n node) { n.write("proc/77/cgroup", "12:memory:/kubepods\n", 0o600) }, "cgroup v2", true},
		"root group":           {func(n node) { n.write("proc/77/cgroup", "0::/\n", 0o600) }, "no control group of its own", true},
		"group above the root": {func(n node) { n.write("proc/77/cgroup", "0::/../..\n", 0o600) }, "no control group of its own", true},
		"no process":           {func(n node) { _ = os.RemoveAll(filepath.Join(n.dir, "proc/77")) }, "control group", true},
		"no nvidia-smi": {func(n node) { _ = os.Remove(filepath.Join(n.dir, "driver/usr/bin/nvidia-smi")) },
			"nvidia-smi is not under the driver root", true},
		"nvidia-smi fails": {func(n node) { n.write("fails", "Option memory-limits is not recognized", 0o600) },
			"is not recognized", false},
		"limit not set":   {func(n node) { n.write("shows", "hard limit: max\n", 0o600) }, `"max"`, false},
		"different limit": {func(n node) { n.write("shows", "hard limit: 40960 MiB\n", 0o600) }, "40960", false},
		"no answer":       {func(n node) { n.write("shows", "", 0o600) }, "shows no hard limit", false},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			tc.change(n)
			if err := n.apply(); err == nil || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("got %v", err)
			}
			if calls := n.calls(); tc.noCall && calls != "" {
				t.Errorf("nvidia-smi was called with %s", calls)
			}
		})
	}
}

func TestHookErrorNamesContainerAndGPU(t *testing.T) {
	bundle := t.TempDir()
	config, _ := json.Marshal(specs.Spec{Version: specs.Version, Root: &specs.Root{Path: "rootfs"}})
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), config, 0o600); err != nil {
		t.Fatal(err)
	}
	state, _ := json.Marshal(specs.State{Version: specs.Version, ID: "c1", Pid: os.Getpid(), Bundle: bundle})
	err := Limit{GPU: gpu, Mebibytes: 1024, DriverRoot: t.TempDir(), Cgroups: "/cg"}.Hook(t.Context(), strings.NewReader(string(state)))
	if err == nil || !strings.Contains(err.Error(), `container "c1": limit memory to 1024 MiB of `+gpu) {
		t.Errorf("got %v", err)
	}
}

func TestOnlyGPUsOfOthersAreHidden(t *testing.T) {
	keep := containerHas(container{config: specs.Spec{Linux: &specs.Linux{
		Devices: []specs.LinuxDevice{{Path: "/dev/nvidiactl"}, {Path: "/dev/nvidia3"}},
	}}})
	for name, want := range map[string]bool{"nvidia3": true, "nvidia0": false, "nvidia30": false} {
		if got := keep(name); got != want {
			t.Errorf("%s: %t", name, got)
		}
	}
	if keep := containerHas(container{}); !keep("nvidia0") {
		t.Error("GPUs are hidden from a container without listed devices")
	}
}

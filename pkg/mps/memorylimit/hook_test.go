package memorylimit

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

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
	return Limit{GPU: gpu, Mebibytes: 18432, DriverRoot: filepath.Join(n.dir, "driver"),
		Cgroups: "/cg"}.apply(n.Context(), 77, filepath.Join(n.dir, "proc"))
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
	state := fmt.Sprintf(`{"id":"c1","pid":%d,"bundle":"/nowhere"}`, os.Getpid())
	for state, want := range map[string]string{
		state:   `container "c1": limit memory to 1024 MiB of ` + gpu,
		"":      "container's state",
		"state": "container's state",
	} {
		err := Limit{GPU: gpu, Mebibytes: 1024, DriverRoot: t.TempDir(), Cgroups: "/cg"}.Hook(t.Context(), strings.NewReader(state))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("state %q: got %v", state, err)
		}
	}
}

func TestOnlyGPUsOfOthersAreHidden(t *testing.T) {
	n := newNode(t)
	for _, name := range []string{"nvidiactl", "nvidia3", "nvidia0", "nvidia30"} {
		n.write("driver/dev/"+name, "", 0o600)
	}
	root := filepath.Join(n.dir, "driver")
	hidden := Limit{Minor: 3, DriverRoot: root}.otherGPUs()
	for name, want := range map[string]bool{"nvidiactl": false, "nvidia3": false, "nvidia0": true, "nvidia30": true} {
		if got := slices.Contains(hidden, filepath.Join(root, "dev", name)); got != want {
			t.Errorf("%s is hidden: %t", name, got)
		}
	}
}

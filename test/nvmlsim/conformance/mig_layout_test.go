package conformance

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// capabilities returns the capability files of a GPU's MIG instances in /proc and the names of
// their device nodes. It checks that every file has its device node.
func (s *site) capabilities(minor int) (files, nodes []string) {
	s.t.Helper()
	mig := filepath.Join(s.root, "proc/driver/nvidia/capabilities", fmt.Sprintf("gpu%d/mig", minor))
	paths, err := filepath.Glob(filepath.Join(mig, "gi*/access"))
	if err != nil {
		s.t.Fatal(err)
	}
	below, err := filepath.Glob(filepath.Join(mig, "gi*/ci*/access"))
	if err != nil {
		s.t.Fatal(err)
	}
	for _, path := range slices.Sorted(slices.Values(append(paths, below...))) {
		content, err := os.ReadFile(path)
		if err != nil {
			s.t.Fatal(err)
		}
		var n uint32
		if _, err := fmt.Sscanf(string(content), "DeviceFileMinor: %d\nDeviceFileMode: 292\n", &n); err != nil {
			s.t.Errorf("%s says %q", path, content)
		}
		name, _ := filepath.Rel(mig, filepath.Dir(path))
		files = append(files, name)
		if _, err := os.Stat(filepath.Join(s.deviceFolder(), "nvidia-caps", fmt.Sprintf("nvidia-cap%d", n))); err != nil {
			s.t.Errorf("%s: %v", name, err)
		}
	}
	all, err := filepath.Glob(filepath.Join(s.deviceFolder(), "nvidia-caps/nvidia-cap*"))
	if err != nil {
		s.t.Fatal(err)
	}
	for _, path := range all {
		if name := filepath.Base(path); name != "nvidia-cap1" && name != "nvidia-cap2" {
			nodes = append(nodes, name)
		}
	}
	return files, nodes
}

func (s *site) deviceFolder() string {
	if s.kind == layout.Container {
		return filepath.Join(s.driverRoot(), "dev")
	}
	return s.dev
}

func (s *site) expectCapabilities(files ...string) {
	s.t.Helper()
	have, nodes := s.capabilities(0)
	if !slices.Equal(have, files) || len(nodes) != len(files) {
		s.t.Errorf("capabilities %v with nodes %v, want %v and a node for each", have, nodes, files)
	}
}

// fault injects a fault into the next call of a function.
func (s *site) fault(fault state.Fault, function string) {
	s.t.Helper()
	fault.GPU = state.AnyGPU
	s.change(func(_ *layout.Config, f *state.File) error { return f.AddFault(fault, function, 1) })
}

// MIG capability files and device nodes must exist when the call that creates a MIG instance
// returns, and must be gone when the destroying call returns.
func TestCapabilitiesFollowTheInstances(t *testing.T) {
	for _, kind := range []layout.Kind{layout.Host, layout.Container} {
		t.Run(string(kind), func(t *testing.T) {
			s := newSite(t, "dgx-h100", kind, "")
			s.fault(state.Fault{Kind: state.FaultKill}, "nvmlComputeInstanceDestroy")
			p := start(t, "cut", s.environment()...)
			for _, line := range []string{"mode 0 0", "instance 0", "compute 0"} {
				p.expect(line)
			}
			p.died()
			s.expectCapabilities("gi2", "gi2/ci0")

			// A process that is killed in the middle of a MIG change leaves wrong capability files. The next
			// process that uses NVML must repair them.
			mig := filepath.Join(s.root, "proc/driver/nvidia/capabilities/gpu0/mig")
			if err := os.RemoveAll(filepath.Join(mig, "gi2")); err != nil {
				t.Fatal(err)
			}
			if err := os.MkdirAll(filepath.Join(mig, "gi7", "ci1"), 0o755); err != nil {
				t.Fatal(err)
			}
			start(t, "version", s.environment()...).says()
			s.expectCapabilities("gi2", "gi2/ci0")

			// An update of the simulated node's files must keep the capability files of existing MIG
			// instances. A reboot must remove these files together with the MIG instances.
			s.change(func(c *layout.Config, f *state.File) error { return c.Apply(f) })
			s.expectCapabilities("gi2", "gi2/ci0")
			if _, err := layout.Up(s.options); err != nil {
				t.Fatal(err)
			}
			s.expectCapabilities()
			p = start(t, "cut", s.environment()...)
			for _, line := range []string{"mode 0 0", "instance 0", "compute 0", "destroy 0 0"} {
				p.expect(line)
			}
			p.end()
			s.expectCapabilities()
		})
	}
}

// inOwnNamespace runs a command in its own mount namespace. Each entry of mounts has the arguments
// of one mount(8) call to make before the command.
func inOwnNamespace(t *testing.T, env []string, mounts [][]string, command ...string) string {
	t.Helper()
	script := "set -e\n"
	for _, m := range mounts {
		script += "mount " + strings.Join(m, " ") + "\n"
	}
	script += "exec " + strings.Join(command, " ")
	c := exec.Command("unshare", "--mount", "sh", "-c", script)
	c.Env = append(os.Environ(), env...)
	out, err := c.CombinedOutput()
	if err != nil && strings.Contains(string(out), "unshare failed") {
		t.Skipf("no mount namespaces here: %s", out)
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}

// The container of this project's DRA plugin has a read-only driver root and /proc, but all of
// /dev. As with the real driver, that must be enough to create MIG instances. Without the simulated
// node's folder in /dev, creation must fail.
func TestContainerWithAllOfDevCreatesInstances(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: mounts")
	}
	for _, kind := range []layout.Kind{layout.Host, layout.Container} {
		t.Run(string(kind), func(t *testing.T) {
			s := newSite(t, "dgx-h100", kind, "")
			inside := t.TempDir()
			mounts := [][]string{
				{"--bind", s.root, inside}, {"-o", "remount,bind,ro", inside},
				{"-t", "tmpfs", "none", s.root}, // hides the layout from the container
			}
			reach := [][]string{{"-t", "tmpfs", "none", "/mnt"}, {"--bind", s.root, "/mnt"}}
			library := strings.Replace(s.nvml(), s.root, inside, 1)
			env := []string{roleVariable + "=cut", libraryVariable + "=" + library, "LD_LIBRARY_PATH=" + filepath.Dir(library)}
			if kind == layout.Host {
				env = append(env, "NVMLSIM_DEV="+s.dev)
			}
			out := inOwnNamespace(t, env, mounts, os.Args[0])
			if want := fmt.Sprintf("mode %d 0", nvml.ERROR_NO_PERMISSION); !strings.HasPrefix(out, want) {
				t.Errorf("without the folder: %q, want %q", out, want)
			}
			s.fault(state.Fault{Kind: state.FaultFail, Error: uint32(nvml.ERROR_IN_USE)}, "nvmlComputeInstanceDestroy")
			// The test must not change the machine's /dev, so it mounts an empty tmpfs over /dev in its own
			// mount namespace.
			over := [][]string{
				{"-t", "tmpfs", "none", "/dev"},
				{"-t", "tmpfs", "-o", "mode=755", "none", "/dev", "&&", "mkdir", "-p", "/dev/.udev/nvmlsim"},
				{"--bind", "/mnt", "/dev/.udev/nvmlsim"},
			}
			out = inOwnNamespace(t, env, append(append(reach, mounts...), over...), os.Args[0])
			if !strings.HasPrefix(out, "mode 0 0\ninstance 0\ncompute 0\n") {
				t.Fatalf("with the folder: %q", out)
			}
			s.expectCapabilities("gi2", "gi2/ci0")
		})
	}
}

// The real nvidia-smi must be able to create, list and destroy MIG instances, with each command as
// its own process.
func TestRealNvidiaSMICreatesInstances(t *testing.T) {
	program := realSMI(t)
	s := newSite(t, "dgx-h100", layout.Host, program)
	for _, step := range []struct {
		args string
		fail bool
		says []string
	}{
		{args: "mig -i 0 -lgip", says: []string{"MIG 1g.10gb       19     7/7        9.75"}}, // as on a real H100 with MIG mode off
		{args: "-i 0,1 -mig 1", says: []string{"Enabled MIG Mode for GPU 00000000:1B:00.0"}},
		{args: "mig -i 0 -lgip", says: []string{"MIG 1g.10gb       19     7/7        9.75", "MIG 7g.80gb        0     1/1"}},
		{args: "mig -i 0 -lgipp", says: []string{"Profile ID 14 Placements: {0,2,4}:2", "Profile ID  5 Placement : {0}:4"}},
		{args: "mig -i 0 -cgi 9:4,2g.20gb,19 -C", says: []string{"GPU instance ID  2 on GPU  0 using profile MIG 3g.40gb (ID  9)"}},
		{args: "mig -i 0 -lgip", says: []string{"MIG 1g.10gb       19     1/7", "MIG 7g.80gb        0     0/1"}},
		{args: "mig -i 1 -cgi 15", says: []string{"Successfully created GPU instance ID  6 on GPU  1"}},
		{args: "mig -i 1 -cci", says: []string{"compute instance ID  0 on GPU  1 GPU instance ID  6 using profile MIG 1g.20gb (ID  7)"}},
		{args: "mig -i 0 -cgi 0", fail: true, says: []string{"Insufficient Resources"}},
		{args: "mig -lgi", says: []string{"MIG 3g.40gb          9        2          4:4", "|   1  MIG 1g.20gb         15        6          6:2"}},
		{args: "mig -lci", says: []string{"|   0      2       MIG 3g.40gb          2         0          0:3"}},
		{args: "mig -i 0 -gi 2 -lcip", says: []string{"MIG 1c.3g.40gb", "3g.40gb          2*"}},
		{args: "-L", says: []string{"  MIG 3g.40gb     Device  0: (UUID: MIG-", "  MIG 1g.20gb     Device  0: (UUID: MIG-"}},
		{args: "-i 0", says: []string{"|  0    2   0   0  |               0MiB / 40448MiB    | 60      0 |  3   0    3    0    3 |"}},
		{args: "mig -i 0 -dgi", fail: true, says: []string{"In use by another client"}},
		{args: "-i 0 -mig 0", fail: true, says: []string{"In use by another client"}},
		{args: "mig -i 0 -gi 2 -ci 0 -dci", says: []string{"Successfully destroyed compute instance ID  0 from GPU  0 GPU instance ID  2"}},
		{args: "mig -dci", says: []string{"Successfully destroyed compute instance ID  0 from GPU  1 GPU instance ID  6"}},
		{args: "mig -i 0 -gi 2 -dgi", says: []string{"Successfully destroyed GPU instance ID  2 from GPU  0"}},
		{args: "mig -dgi", says: []string{"Successfully destroyed GPU instance ID  6 from GPU  1"}},
		{args: "mig -lgi", fail: true, says: []string{"No GPU instances found: Not Found"}},
		{args: "-i 0 -mig 0", says: []string{"Disabled MIG Mode for GPU 00000000:1B:00.0"}},
	} {
		out, err := s.smi(strings.Fields(step.args)...)
		if (err != nil) != step.fail {
			t.Fatalf("nvidia-smi %s: %v\n%s", step.args, err, out)
		}
		for _, line := range step.says {
			if !strings.Contains(out, line) {
				t.Errorf("nvidia-smi %s does not say %q:\n%s", step.args, line, out)
			}
		}
	}
	s.expectCapabilities()
}

package e2e

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// The nodes of TestClaims with their GPUs.
const (
	h100  = "h100"  // eight equal GPUs
	a100  = "a100"  // eight equal GPUs, two behind each PCIe root
	mixed = "mixed" // four different GPUs
	plain = "plain" // no GPU
)

// probeDir is the nodes' directory for the programs that buildProgram compiles.
const probeDir = "/opt/probe"

// TestClaims runs the kinds of claims that users write. Containers must get exactly the devices of
// their claims.
func TestClaims(t *testing.T) {
	t.Parallel()
	sim := simulator(t)
	nodes := []cluster.NodeOptions{
		sim.Node(h100, "dgx-h100"),
		sim.Node(a100, "dgx-a100"),
		sim.Node(mixed, "mixed"),
		// The node without GPUs needs these directories too, because the chart mounts them. Its PCI bus
		// has a network card and an NVSwitch, an NVIDIA device that is no GPU.
		{Name: plain, BootHook: []string{"/bin/sh", "-ec", `
			mkdir -p /var/lib/nvmlsim/proc
			device() {
				mkdir -p "/var/lib/nvmlsim/sys/bus/pci/devices/$1"
				echo "$2" >"/var/lib/nvmlsim/sys/bus/pci/devices/$1/vendor"
				echo "$3" >"/var/lib/nvmlsim/sys/bus/pci/devices/$1/class"
			}
			device 0000:65:00.0 0x8086 0x020000
			device 0000:66:00.0 0x10de 0x068000`}},
	}
	probe := buildProgram(t, "probe")
	if b, err := built(); err == nil { // otherwise simulator has ended the test
		addMetadataReader(t, b.root, probe)
	}
	for i := range nodes {
		nodes[i].Mounts = []cluster.Mount{{Source: probe, Target: probeDir}}
	}
	w := bringUp(t, "e2e-claims", nodes...)
	w.install(t, "--set", "mps.enabled=true") // The test checks the supervisor's socket too.
	w.offers(t, h100, 8)
	w.offers(t, a100, 8)
	w.offers(t, mixed, 4)

	// There are enough GPUs for all of these.
	t.Run("side by side", func(t *testing.T) {
		sideBySide(t, map[string]func(*testing.T){
			"a Pod sees the one GPU that its claim was allocated":     w.testOneGPU,
			"a Pod without a claim sees no GPU":                       w.testNoClaim,
			"a container opens the devices of its claim and no other": w.testIsolation,
			"an unprivileged container uses its GPU":                  w.testUnprivileged,
			"another claim's CDI device name gives nothing":           w.testNamesOfOthers,
			"containers of a Pod use different claims":                w.testContainers,
			"two Pods share one claim":                                w.testSharedClaim,
			"the Pods of a PodGroup share its claim":                  w.testPodGroup,
			"only root can change sockets, records and specs":         w.testSocketsAndStateAreRoots,
			"a claim has devices of another driver too":               w.testOtherDriver,
			"a container reads what devices it has":                   w.testMetadata,
		})
	})
	t.Run("eight Pods take eight GPUs, and others wait", w.testNinePods)
	t.Run("a Deployment takes two GPUs a Pod", w.testDeployment)
	t.Run("claims select by attributes and capacity", w.testSelectors)
	t.Run("claims constrain devices to each other", w.testConstraints)
	t.Run("a prioritized list takes the first entry that fits", w.testPrioritizedList)
	t.Run("admin access sees GPUs that others hold", w.testAdminAccess)
	t.Run("the API server stores every node's slices unchanged", w.testSlicesOfEveryNode)
	t.Run("a node without a GPU idles", w.testPlainNode)
	t.Run("a plugin's token writes the slices of its own node only", w.testForgedSlices)
	t.Run("a plugin's token writes the status of its own devices only", w.testForgedStatuses)
	t.Run("Pods ask with resource limits", w.testExtendedResource)
	t.Run("the examples of the documentation work", w.testExamples) // one example needs the values that testExtendedResource sets
	t.Run("nothing of all these claims is left on the nodes", func(t *testing.T) {
		for _, node := range []string{h100, a100, mixed} {
			w.clean(t, node)
		}
	})
}

// buildProgram compiles a C program of testdata and returns the directory of the binary.
func buildProgram(t *testing.T, name string) string {
	t.Helper()
	dir := t.TempDir()
	build := exec.CommandContext(
		t.Context(),
		"gcc",
		"-Wall",
		"-Wextra",
		"-Werror",
		"-o",
		filepath.Join(dir, name),
		filepath.Join("testdata", name+".c"),
		"-ldl",
	)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", name, err, out)
	}
	return dir
}

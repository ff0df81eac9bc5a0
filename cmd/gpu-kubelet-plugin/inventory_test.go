package main

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nodeharness"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// TestMain lets a test start this binary as the plugin, or the plugin start it as the child process
// that scans the hardware.
func TestMain(m *testing.M) {
	if os.Getenv(asPlugin) != "" {
		main()
	}
	if len(os.Args) == 2 && os.Args[1] == driver.ScanCommand {
		os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)) //nolint:forbidigo // a child process of a test
	}
	if code := nodeharness.Main(m, nil); code != 0 {
		os.Exit(code) //nolint:forbidigo // this process is the tests, or the child of one
	}
}

// inventoryOf runs the command inventory on the files of a simulated host below root. It returns
// standard output, standard error and the exit code.
func inventoryOf(t *testing.T, root string, args ...string) (out, errOut string, code int) {
	t.Helper()
	var o, e strings.Builder
	args = append([]string{
		"inventory", "--driver-root=/run/nvidia/driver", "--driver-root-mount=" + filepath.Join(root, "driver"),
		"--sysfs-root=" + filepath.Join(root, "sys"), "--proc-root=" + filepath.Join(root, "proc"), "--dev-root=" + filepath.Join(root, "driver"),
	}, args...)
	code = run(t.Context(), args, &o, &e)
	return o.String(), e.String(), code
}

func pciDevice(t *testing.T, root, address, vendor, class string) {
	t.Helper()
	dir := filepath.Join(root, "sys/bus/pci/devices", address)
	err := errors.Join(os.MkdirAll(dir, 0o750), os.WriteFile(filepath.Join(dir, "vendor"), []byte(vendor+"\n"), 0o600),
		os.WriteFile(filepath.Join(dir, "class"), []byte(class+"\n"), 0o600))
	if err != nil {
		t.Fatal(err)
	}
}

func TestInventoryWithoutGPUSucceeds(t *testing.T) {
	root := t.TempDir()
	pciDevice(t, root, "0000:00:02.0", "0x8086", "0x030000")
	out, errOut, code := inventoryOf(t, root)
	if code != 0 || !strings.Contains(out, "no NVIDIA GPU on this node's PCI bus") {
		t.Errorf("%d: %s%s", code, out, errOut)
	}
}

func TestInventoryWithoutDriverSaysWhatToDo(t *testing.T) {
	root := t.TempDir()
	pciDevice(t, root, "0000:1b:00.0", "0x10de", "0x030200")
	_, errOut, code := inventoryOf(t, root)
	if code != exitFailed || !strings.Contains(errOut, "offers none of them") || !strings.Contains(errOut, "install the NVIDIA driver") {
		t.Errorf("%d: %s", code, errOut)
	}
}

func TestInventoryWithoutDriverOffersGPUsToVirtualMachines(t *testing.T) {
	root := t.TempDir()
	pciDevice(t, root, "0000:1b:00.0", "0x10de", "0x030200")
	dir := filepath.Join(root, "sys/bus/pci/devices/0000:1b:00.0")
	group := filepath.Join(root, "sys/kernel/iommu_groups/7")
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(filepath.Join(group, "devices"), 0o750))
	must(os.Symlink(group, filepath.Join(dir, "iommu_group")))
	for name, text := range map[string]string{"device": "0x2330", "reset_method": "flr", "driver_override": "(null)", "modalias": "pci:v1"} {
		must(os.WriteFile(filepath.Join(dir, name), []byte(text+"\n"), 0o600))
	}
	settings := filepath.Join(root, "settings.yaml")
	must(os.WriteFile(settings, []byte("passthrough:\n  enabled: true\n"), 0o600))
	if _, errOut, code := inventoryOf(t, root, "--settings", settings); code == 0 {
		t.Errorf("without the module vfio_pci: %d: %s", code, errOut)
	}
	must(os.MkdirAll(filepath.Join(root, "sys/module/vfio_pci/drivers/pci:vfio-pci"), 0o750))
	out, errOut, code := inventoryOf(t, root, "--settings", settings)
	if code != 0 || !strings.Contains(out, "1 x whole for a virtual machine") || !strings.Contains(out, "NVIDIA's driver is missing") ||
		!strings.Contains(out, "install the NVIDIA driver") {
		t.Errorf("%d: %s%s", code, out, errOut)
	}
}

func TestInventoryRefusesAnUnknownFormat(t *testing.T) {
	if _, errOut, code := inventoryOf(t, t.TempDir(), "-o", "xml"); code != exitUsage || !strings.Contains(errOut, "neither table nor yaml") {
		t.Errorf("%d: %s", code, errOut)
	}
	if _, errOut, code := inventoryOf(t, t.TempDir(), "--nonsense"); code != exitUsage {
		t.Errorf("%d: %s", code, errOut)
	}
}

func TestInventoryShowsOfferedDevices(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with the driver's numbers")
	}
	const simulator = "../../test/nvmlsim"
	if out, err := exec.Command("make", "-s", "-C", simulator, "library").CombinedOutput(); err != nil {
		t.Fatalf("build the simulated library: %v\n%s", err, out)
	}
	models, err := model.ReadGPUs(filepath.Join(simulator, "models"))
	if err != nil {
		t.Fatal(err)
	}
	node, err := model.ReadNode(filepath.Join(simulator, "nodes/l40s-x2.yaml"), "inventory")
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	if _, err := layout.Up(layout.Options{
		Root: root, Models: models, Seed: "inventory", Config: layout.Config{Kind: layout.Container, Node: node},
		Sources: layout.Sources{Library: "../../build/nvmlsim/libnvidia-ml.so.1"},
	}); err != nil {
		t.Fatal(err)
	}
	t.Setenv("NVMLSIM_DEV", filepath.Join(root, "driver/dev"))

	// The test process opens the second GPU, so the output must name that process.
	held, err := unix.Open(filepath.Join(root, "driver/dev/nvidia1"), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(held) }()
	self := strconv.Itoa(os.Getpid())
	if err := os.Symlink("/proc/"+self, filepath.Join(root, "proc", self)); err != nil {
		t.Fatal(err)
	}
	out, errOut, code := inventoryOf(t, root)
	if code != 0 || strings.Count(out, "NVIDIA L40S") != 2 || !strings.Contains(out, node.GPUs[1].UUID) {
		t.Errorf("%d: %s%s", code, out, errOut)
	}
	if _, holders, _ := strings.Cut(out, "Open in other processes:"); !strings.Contains(holders, "(process "+self) ||
		strings.Count(holders, "gpu-0000-") != 1 {
		t.Errorf("%s", out)
	}
	out, errOut, code = inventoryOf(t, root, "-o", "yaml", "--node-name", "node-1")
	var slice resourceapi.ResourceSlice
	if err := yaml.UnmarshalStrict([]byte(strings.TrimPrefix(out, "---\n")), &slice); err != nil || code != 0 {
		t.Fatalf("%d: %v %s%s", code, err, out, errOut)
	}
	if len(slice.Spec.Devices) != 2 || *slice.Spec.NodeName != "node-1" {
		t.Errorf("%+v", slice.Spec)
	}
}

// The node has two GPUs. The plugin created a MIG device of one GPU for a claim, and an admin
// created a MIG device of the other. The output must name the owner of each, which the command
// reads from the plugin's claim records.
func TestInventoryUsesConfigurationAndRecords(t *testing.T) {
	const ours, theirs = "gpu-0000-1b-00-0", "gpu-0000-43-00-0"
	h := nodeharness.New(t, "0000:1b:00.0", "0000:43:00.0")
	t.Setenv("NVMLSIM_DEV", filepath.Join(h.Root, "driver/dev"))
	plugin, err := h.Plugin(t.Context(), durable.OS{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer nvidiatest.StopWorkers(plugin.Worker)
	if _, err := plugin.Prepare(t.Context(), nodeharness.Claim("one", ours+"-mig-19-0")); err != nil {
		t.Fatal(err)
	}
	other := plugin.Snapshot().Node.GPUs[1].Card()
	if _, err := plugin.Worker.SetMode(t.Context(), other, true); err != nil {
		t.Fatal(err)
	}
	made, err := plugin.Worker.CreateInstance(t.Context(), other, 9, device.Placement{Start: 4, Size: 4})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := plugin.Worker.CreateCompute(t.Context(), other, made.ID); err != nil {
		t.Fatal(err)
	}
	settings := func(text string) string {
		file := filepath.Join(t.TempDir(), "settings.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return "--settings=" + file
	}
	state := "--plugin-dir=" + h.Config().PluginDir
	elsewhere := "--plugin-dir=" + filepath.Join(h.Root, "nothing")

	for name, c := range map[string]struct {
		args []string
		says []string
	}{
		"by default": {[]string{state}, []string{
			ours + " static 1 x 1g.10gb", theirs + " static 1 x 3g.40gb", ours + ": the GPU is not offered whole while claims hold its partitions",
		}},
		"dynamic": {[]string{state, settings("mig: {policy: dynamic}")}, []string{
			ours + "-mig-19-0 a claim", theirs + "-mig-9-4 an admin", ours + " dynamic 1 x whole, ", theirs + " dynamic 1 x 3g.40gb",
			theirs + ": MIG instances exist that no claim created",
		}},
		"with a policy": {[]string{state, settings("mig: {policy: dynamic, rules: [{gpus: '0000:1b:00.0', policy: off}]}")}, []string{
			ours + " off 1 x 1g.10gb", ours + ": the policy offers whole GPUs only: waiting for claims", theirs + " dynamic 1 x 3g.40gb",
		}},
		"with shares": {[]string{state, settings("shares: [{profile: 3g*, kind: shares, count: 2}]")}, []string{
			theirs + " static 1 x 3g.40gb, 1 x 3g.40gb in 2 shares",
		}},
		"without records": {[]string{elsewhere}, []string{ours + "-mig-19-0 an admin",
			"the plugin's records, so that MIG instances of claims are shown as an admin's: no records in " + h.Root}},
		"what it cannot see": {[]string{state}, []string{
			"Not checked here:", "gpu.nvidia.com/mig-policy", "consumable capacities", "device plugin", "/readyz", "kubectl describe node",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			out, errOut, code := inventoryOf(t, h.Root, c.args...)
			// Remove the columns between a partition's name and its owner, and repeated spaces.
			text := regexp.MustCompile(`(-mig-\d+-\d+) +\d+ +\d:\d +\S+`).ReplaceAllString(out, "$1")
			text = regexp.MustCompile(" +").ReplaceAllString(text, " ")
			for _, says := range c.says {
				if !strings.Contains(text, says) {
					t.Errorf("the output lacks %q", says)
				}
			}
			if t.Failed() || code != 0 {
				t.Errorf("%d: %s%s", code, out, errOut)
			}
		})
	}
	if _, err := os.Stat(filepath.Join(h.Root, "nothing")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("inventory made a directory: %v", err)
	}

	offAndShares := settings("{mig: {policy: off}, shares: [{kind: shares, count: 4}]}")
	out, errOut, code := inventoryOf(t, h.Root, state, "-o", "yaml", offAndShares, "--node-name=node-1")
	if code != 0 || !strings.Contains(out, "\n# Not checked here:\n#   the Node's annotation") {
		t.Errorf("%d: %s%s", code, out, errOut)
	}
	var offered []string
	for document := range strings.SplitSeq(out, "---\n") {
		var slice resourceapi.ResourceSlice
		if err := yaml.UnmarshalStrict([]byte(document), &slice); err != nil {
			t.Fatalf("%v\n%s", err, document)
		}
		for i := range slice.Spec.Devices {
			offered = append(offered, slice.Spec.Devices[i].Name)
		}
	}
	// With policy off, the first GPU can be offered whole only after its claim ends, so it still
	// offers the claim's partition. The second has an admin's partition, so it offers nothing.
	if want := []string{ours + "-mig-19-0"}; !slices.Equal(offered, want) {
		t.Errorf("with the policy off it offers %v, want %v", offered, want)
	}
}

func TestInventoryFailsWhenPolicyOffersNothing(t *testing.T) {
	h := nodeharness.New(t, "0000:1b:00.0")
	t.Setenv("NVMLSIM_DEV", filepath.Join(h.Root, "driver/dev"))
	cuts := h.PartitionWorker()
	defer nvidiatest.StopWorkers(cuts)
	node, err := h.Scan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cuts.SetMode(t.Context(), node.GPUs[0].Card(), true); err != nil {
		t.Fatal(err)
	}
	out, errOut, code := inventoryOf(t, h.Root, "--plugin-dir="+h.Config().PluginDir)
	if code != exitFailed || !strings.Contains(errOut, "offers none of them") || !strings.Contains(out,
		"nothing is offered: MIG mode is on and there is no MIG instance") {
		t.Errorf("%d: %s%s", code, out, errOut)
	}
}

package golden

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// For a node of each GPU model, the plugin's inventory command must print the ResourceSlices and
// CDI specs recorded in testdata.
func TestInventory(t *testing.T) {
	needSimulator(t)
	golden := newFiles(t, "inventory")
	program := filepath.Join(t.TempDir(), "gpu-kubelet-plugin")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "./cmd/gpu-kubelet-plugin")
	build.Dir = repository()
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the plugin: %v\n%s", err, out)
	}
	models, err := model.ReadGPUs(filepath.Join(repository(), "test", "nvmlsim", "models"))
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range slices.Sorted(maps.Keys(models)) {
		m := models[key]
		root := t.TempDir()
		layOut(t, root, m, models)
		for name, args := range outputs(t, m) {
			t.Run(key+"/"+name, func(t *testing.T) {
				t.Parallel()
				golden.check(t, filepath.Join(key, name), inventory(t, program, root, args))
			})
		}
	}
}

// layOut creates the files of a simulated node with one GPU of the model. For a model with MIG it
// creates three GPUs: one without MIG mode, one in MIG mode without MIG instances, and one with a
// MIG instance of an admin.
func layOut(t *testing.T, root string, m *model.GPU, models map[string]*model.GPU) {
	t.Helper()
	mig := []string{""}
	if m.MIG.Supported.Value {
		smallest := m.MIG.Profiles[0]
		mig = append(mig, ", mig: {enabled: true}",
			fmt.Sprintf(", mig: {enabled: true, instances: [{profile: %d, start: %d}]}", smallest.ID, smallest.Placements.Starts[0]))
	}
	text := "driverVersion: \"580.65.06\"\ncudaVersion: \"13.0\"\ngpus:\n"
	for i, setting := range mig {
		text += fmt.Sprintf("- {model: %s, pci: \"0000:%02x:00.0\", pciRoot: \"pci0000:15\", numaNode: %d%s}\n", m.Key, 0x1b+i, i%2, setting)
	}
	file := filepath.Join(root, "node.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	node, err := model.ReadNode(file, seed)
	if err != nil {
		t.Fatal(err)
	}
	dev := filepath.Join(root, "machine", "dev")
	if err := os.MkdirAll(dev, 0o750); err != nil {
		t.Fatal(err)
	}
	_, err = layout.Up(layout.Options{
		Root: root, Models: models, Seed: seed, Config: layout.Config{Kind: layout.Container, Node: node, Dev: dev},
		Sources: layout.Sources{Library: filepath.Join(repository(), "build", "nvmlsim", "libnvidia-ml.so.1")},
	})
	if err != nil {
		t.Fatal(err)
	}
}

// outputs returns, for each golden file of this model, the arguments of the inventory command whose
// output is compared with the file.
func outputs(t *testing.T, m *model.GPU) map[string][]string {
	dir := t.TempDir()
	slicesOf := func(settings string) []string {
		file := filepath.Join(dir, fmt.Sprintf("%x.yaml", sha256.Sum256([]byte(settings))))
		if err := os.WriteFile(file, []byte(settings), 0o600); err != nil {
			t.Fatal(err)
		}
		return []string{"-o", "yaml", "--settings=" + file}
	}
	all := map[string][]string{
		"off.yaml":       slicesOf("mig: {policy: off}"),
		"static.yaml":    slicesOf("mig: {policy: static}"),
		"dynamic.yaml":   slicesOf("mig: {policy: dynamic}"),
		"fractions.yaml": slicesOf("shares: [{kind: fractions}]"),
		"shares.yaml":    slicesOf("shares: [{kind: shares, count: 4}]"),
		"cdi.json":       {"-o", "cdi"},
	}
	if m.MIG.Supported.Value {
		first, last := m.MIG.Profiles[0], m.MIG.Profiles[len(m.MIG.Profiles)-1]
		list := strings.ReplaceAll(first.Name+","+last.Name, "MIG ", "")
		all["dynamic-list.yaml"] = slicesOf("mig: {policy: dynamic, profiles: [" + list + "]}")
		all["adopt.yaml"] = slicesOf("mig: {policy: adopt}")
	}
	return all
}

// prose matches the comment lines at the end of the YAML output, which list what the inventory
// command cannot check.
var prose = regexp.MustCompile(`(?m)^#.*\n`)

// inventory returns the output of the inventory command, without the parts that depend on this
// machine. Exit code 1 means that the plugin would offer nothing, and becomes part of the output.
func inventory(t *testing.T, program, root string, args []string) []byte {
	t.Helper()
	at := func(dir string) string { return filepath.Join(root, dir) }
	cmd := exec.CommandContext(t.Context(), program, append([]string{
		"inventory", "--node-name=" + nodeName, "--driver-root=/run/nvidia/driver", "--driver-root-mount=" + at("driver"),
		"--sysfs-root=" + at("sys"), "--proc-root=" + at("proc"), "--dev-root=" + at("driver"), "--plugin-dir=" + at("plugin"),
	}, args...)...)
	cmd.Env = append(os.Environ(), "NVMLSIM_DEV="+filepath.Join(root, "driver", "dev"))
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil && (out.Len() == 0 || cmd.ProcessState.ExitCode() != 1) {
		t.Fatalf("%v\n%s", err, errOut.String())
	}
	text := strings.ReplaceAll(prose.ReplaceAllString(out.String(), ""), root, "/golden")
	text = capsMajor.ReplaceAllString(text, `"major": 0`)
	if code := cmd.ProcessState.ExitCode(); code != 0 {
		text += fmt.Sprintf("# exit code %d\n", code)
	}
	return []byte(text)
}

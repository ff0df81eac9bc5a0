package nvidiactk

import (
	"bytes"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/driverzoo"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/hostharness"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

const (
	repository = "../.."
	// hookPath is the path of nvidia-cdi-hook in all specs.
	hookPath = "/var/lib/kubelet/plugins/gpu.nvidia.com/nvidia-cdi-hook"
)

var update = flag.Bool("update", false, "write the table of differences to docs/cdi.md")

// Containers get from the plugin what they would get by `nvidia-ctk cdi generate`, but for the
// differences that have a reason. With -short a part of the pairs of driver root and node is
// compared, in which each occurs.
func TestContainersGetWhatNvidiaCTKGenerates(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with the driver's numbers, another root directory")
	}
	kits := toolkits(t)
	simulator := hostharness.NewSimulator(t)
	all := pairs(t)
	var lock sync.Mutex
	explained, compared := map[*pattern]bool{}, 0
	t.Run("on", func(t *testing.T) {
		for _, p := range all {
			t.Run(p.name(), func(t *testing.T) {
				t.Parallel()
				root, node := p.read(t)
				h := simulator.NewHost(t, filepath.Join(t.TempDir(), "host"), root, node)
				base, claim := h.CDI(root.DriverRoot, hookPath)
				leadsTo := func(path string) string {
					found, err := driverroot.Resolve(h.Dir, path)
					if err != nil {
						return err.Error()
					}
					return "/" + strings.TrimPrefix(found, h.Dir+"/")
				}
				for _, kit := range kits {
					for _, d := range differences(base, claim, kit.specOf(t, h)) {
						found := explanation(root.Name, node.Name, d, leadsTo)
						if found == nil {
							t.Errorf("without a reason: %s", d)
						}
						lock.Lock()
						explained[found] = true
						lock.Unlock()
					}
				}
				lock.Lock()
				defer lock.Unlock()
				compared++
			})
		}
	})
	if testing.Short() || compared < len(all) {
		return
	}
	for _, r := range reasons {
		for i, p := range r.differences {
			if !explained[&r.differences[i]] {
				t.Errorf("%s: there is no such difference any more: %+v", r.what, p)
			}
		}
	}
}

// toolkits returns nvidia-ctk of the version whose nvcdi the plugin has, and of the newest, which
// test/cluster/tools/nvidia-ctk/go.mod pins. They may be one.
func toolkits(t *testing.T) (all []toolkit) {
	t.Helper()
	const module = "github.com/NVIDIA/nvidia-container-toolkit"
	linked, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Version}}", module).Output()
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, version := range []string{strings.TrimSpace(string(linked)), ""} {
		path, err := cluster.BuildNvidiaCTK(t.Context(), version, os.Stderr)
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, path)
	}
	for _, path := range slices.Compact(paths) {
		all = append(all, newToolkit(t, path))
	}
	return all
}

// pair is a host: the position of its driver root among those of test/driverzoo, and a node file.
type pair struct {
	position   int
	root, file string
}

func (p pair) name() string { return p.root + "/" + strings.TrimSuffix(filepath.Base(p.file), ".yaml") }

// pairs returns all pairs, or with -short as many as are needed for each root to occur twice and
// each node once.
func pairs(t *testing.T) (chosen []pair) {
	t.Helper()
	roots, err := driverzoo.All("0.0.0")
	if err != nil {
		t.Fatal(err)
	}
	files := hostharness.NodeFiles(t, "testdata")
	if testing.Short() {
		for i := range max(2*len(roots), len(files)) {
			at := i % len(roots)
			chosen = append(chosen, pair{at, roots[at].Name, files[i%len(files)]})
		}
		return chosen
	}
	for at, root := range roots {
		for _, file := range files {
			chosen = append(chosen, pair{at, root.Name, file})
		}
	}
	return chosen
}

func (p pair) read(t *testing.T) (driverzoo.Root, *model.Node) {
	t.Helper()
	node := hostharness.ReadNode(t, p.file)
	roots, err := driverzoo.All(node.DriverVersion)
	if err != nil {
		t.Fatal(err)
	}
	return roots[p.position], node
}

// differences compares what a container gets with each device. A device that only one side has is a
// difference of its own.
func differences(base, claim, theirs specs.Spec) (found []difference) {
	other := map[string]specs.ContainerEdits{}
	for _, d := range theirs.Devices {
		other[identity(d.ContainerEdits)] = d.ContainerEdits
	}
	for _, d := range claim.Devices {
		id := identity(d.ContainerEdits)
		same, ok := other[id]
		if !ok {
			found = append(found, difference{"device " + id, "", there, none})
			continue
		}
		delete(other, id)
		ours := editsOf(base.ContainerEdits, base.Devices[0].ContainerEdits, d.ContainerEdits)
		found = append(found, compare(ours, editsOf(theirs.ContainerEdits, same))...)
	}
	for id := range other {
		found = append(found, difference{"device " + id, "", none, there})
	}
	return found
}

// explanation returns the pattern that explains the difference, or nil.
func explanation(root, node string, d difference, leadsTo func(string) string) *pattern {
	for _, r := range reasons {
		for i, p := range r.differences {
			if p.explains(root, node, d, leadsTo) {
				return &r.differences[i]
			}
		}
	}
	return nil
}

// The table in docs/cdi.md is that of the test. -update writes it.
func TestDifferencesAreDocumented(t *testing.T) {
	const page, begin, end = repository + "/docs/cdi.md", "<!-- begin differences -->\n", "<!-- end differences -->"
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := bytes.Cut(text, []byte(begin))
	_, after, closed := bytes.Cut(rest, []byte(end))
	if !found || !closed {
		t.Fatalf("%s lacks the comments %q and %q", page, begin, end)
	}
	want := slices.Concat(before, []byte(begin), []byte(table()), []byte(end), after)
	switch {
	case bytes.Equal(text, want):
	case *update:
		if err := os.WriteFile(page, want, 0o644); err != nil {
			t.Fatal(err)
		}
	default:
		t.Errorf("%s differs from the table in differences_test.go: write it with go test ./test/nvidiactk -run Documented -args -update", page)
	}
}

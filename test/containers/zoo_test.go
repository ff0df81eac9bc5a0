package containers

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/driverzoo"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/hostharness"
)

// seesHost continues findsLibraries on a host of test/driverzoo. NODES are the container's device
// nodes with what its user may do, SMI is the host's file nvidia-smi. Nodes with NVIDIA's own
// number are opened. The others have numbers of the simulator, maybe those of another driver here.
const seesHost = `
[ "$(stat -L -c %d:%i "$(command -v nvidia-smi)")" = "$SMI" ] || wrong "nvidia-smi is not the host's"
for entry in $NODES; do
    node=${entry%=*} may=
    [ -c "$node" ] || wrong "there is no $node"
    [ ! -r "$node" ] || may+=r
    [ ! -w "$node" ] || may+=w
    [ "$may" = "${entry#*=}" ] || wrong "$node: may be opened for '$may', not '${entry#*=}'"
    case "$entry" in /dev/nvidia[0-9]*=rw|/dev/nvidiactl=rw)
        error=$( { : <>"$node"; } 2>&1 ) || case "$error" in
            *"No such device"*) ;; # its driver is not loaded
            *) wrong "$error" ;;
        esac
    esac
done
exit $status
`

// zooWays are how containers run on each host of test/driverzoo.
var zooWays = []way{plainly, inUserNamespace, withReadOnlyRoot, withoutPrivileges}

// Containers with all GPUs of a host start and find the driver, whatever the host's distribution.
// With -short each distribution occurs with each runtime and way, and each node of test/nvmlsim.
func TestContainersOnEachDistribution(t *testing.T) {
	simulator, files := hostharness.NewSimulator(t), hostharness.NodeFiles(t)
	hook := filepath.Join(openDir(t), "nvidia-cdi-hook")
	copyFile(t, buildHook(t), hook)
	var runtimes []ociRuntime
	for _, name := range []string{"runc", "crun"} {
		t.Run(name, func(t *testing.T) { runtimes = append(runtimes, findRuntime(t, name)) })
	}
	image := newImage(t)
	roots, err := driverzoo.All("0.0.0")
	must(t, err)
	for at, root := range roots {
		for number, file := range files {
			chosen := zooWays
			if testing.Short() {
				chosen = nil
				for i, way := range zooWays {
					if (len(zooWays)*at+i)%len(files) == number {
						chosen = append(chosen, way)
					}
				}
			}
			if len(chosen) == 0 {
				continue
			}
			t.Run(root.Name+"/"+strings.TrimSuffix(filepath.Base(file), ".yaml"), func(t *testing.T) {
				t.Parallel()
				n := newZooNode(t, simulator, at, file, hook)
				for _, way := range chosen {
					for _, runtime := range runtimes {
						t.Run(way.name+" by "+runtime.name, func(t *testing.T) { n.check(t, runtime, image, way) })
					}
				}
			})
		}
	}
}

// zooNode is a host with a driver root of test/driverzoo, and the CDI specs for all its GPUs.
type zooNode struct {
	node
	host  hostharness.Host
	nodes []*specs.DeviceNode
}

func newZooNode(t *testing.T, simulator hostharness.Simulator, root int, file, hook string) zooNode {
	t.Helper()
	model := hostharness.ReadNode(t, file)
	roots, err := driverzoo.All(model.DriverVersion)
	must(t, err)
	n := zooNode{host: simulator.NewHost(t, openDir(t), roots[root], model)}
	n.dev = filepath.Join(n.host.Dir, "dev")
	must(t, os.Mkdir(filepath.Join(n.host.Dir, "devices"), 0o755))
	folder := t.TempDir()
	// Devices are injected on this machine, where the host's files and device nodes are below Dir.
	base, claim := n.host.CDI(filepath.Join(n.host.Dir, n.host.Root.DriverRoot), hook)
	n.nodes = base.ContainerEdits.DeviceNodes
	for _, device := range slices.Concat(base.Devices, claim.Devices) {
		n.nodes = append(n.nodes, device.ContainerEdits.DeviceNodes...)
	}
	for _, node := range n.nodes {
		if node.HostPath == "" && node.Type == "" {
			node.HostPath = filepath.Join(n.host.Dir, node.Path)
		}
	}
	for name, spec := range map[string]specs.Spec{"base.json": base, "claim.json": claim} {
		spec.Version = specs.CurrentVersion // earlier ones have no hostPath
		data, err := json.Marshal(spec)
		must(t, err)
		must(t, os.WriteFile(filepath.Join(folder, name), data, 0o600))
		for _, device := range spec.Devices {
			n.devices = append(n.devices, spec.Kind+"="+device.Name)
		}
	}
	n.specs, err = cdilib.NewCache(cdilib.WithSpecDirs(folder), cdilib.WithAutoRefresh(false))
	must(t, err)
	for path, failed := range n.specs.GetErrors() {
		t.Errorf("%s: %v", path, failed)
	}
	return n
}

// check starts a container. It must work, or not start for a reason in docs/support.md.
func (n zooNode) check(t *testing.T, runtime ociRuntime, image image, how way) {
	t.Helper()
	root := n.host.Root
	smi := root.Mounts["/usr/bin/nvidia-smi"]
	if smi == "" {
		smi = filepath.Join(root.Programs, "nvidia-smi")
	}
	var file syscall.Stat_t
	must(t, syscall.Stat(filepath.Join(n.host.Dir, root.DriverRoot, smi), &file))
	out, err := n.run(t, runtime, image, how, findsLibraries+seesHost,
		fmt.Sprintf("SMI=%d:%d", file.Dev, file.Ino), "NODES="+strings.Join(n.rights(t, runtime, how), " "))
	reason := ""
	switch {
	case how.refused != nil && how.refused(runtime):
		reason = "hook"
	case how.owner != 0 && runtime.mountsNodes() && root.Devices.Root == "driver":
		reason = "/dev/nvidia" // the host's /dev lacks it
	}
	if reason != "" && (err == nil || strings.Contains(out, "WRONG") || !strings.Contains(out, reason)) {
		t.Errorf("the container was not refused because of %q, change docs/support.md: %v\n%s", reason, err, out)
	} else if reason == "" && err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// rights returns for each device node its path in the container, and for what its user may open it.
// Root may do anything, another user what the node's group and others may, since containers get the
// group. In a user namespace a mounted node belongs to no user or group.
func (n zooNode) rights(t *testing.T, runtime ociRuntime, how way) (all []string) {
	t.Helper()
	for _, node := range n.nodes {
		var mode fs.FileMode
		if node.FileMode != nil {
			mode = node.FileMode.Perm()
		} else {
			info, err := os.Stat(node.HostPath)
			must(t, err)
			mode = info.Mode().Perm()
		}
		bits := fs.FileMode(0o6)
		switch {
		case how.name == withoutPrivileges.name:
			bits = mode | mode>>3
		case how.owner != 0 && runtime.mountsNodes():
			bits = mode
		}
		may := ""
		if bits&0o4 != 0 {
			may += "r"
		}
		if bits&0o2 != 0 {
			may += "w"
		}
		all = append(all, node.Path+"="+may)
	}
	return all
}

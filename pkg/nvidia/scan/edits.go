package scan

import (
	"cmp"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"syscall"

	nvlib "github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/sirupsen/logrus"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

type edits = specs.ContainerEdits

// memoryLimitHook is the container toolkit's hook that opens NVML on the host to limit memory if a
// container sets NVIDIA_GPU_MEMORY_LIMIT. The hook is disabled, because this variable would make a
// container fail on cgroup v1 or an older driver. Package memorylimit sets the limits instead.
const memoryLimitHook = "apply-cuda-memory-limits"

// commonEdits returns the edits that every container with a GPU needs, and what containers lack.
// nvcdi (of the NVIDIA Container Toolkit) finds the driver's files. It fails only without the
// libraries and device nodes that every CUDA program needs.
func (s scanner) commonEdits(d device.Driver) (edits, []nvidia.Omission, error) {
	var found edits
	var err error
	s.inDriverRoot(func(root string) { found, err = s.search(d, root) })
	if err != nil {
		return edits{}, nil, nvidia.NotReady("wait until the driver's installation is complete, "+
			"or check that its libraries and its kernel module are of one version",
			"the libraries of driver %s are not complete under %s (%v)", d.Version, s.paths.HostDriverRoot, err)
	}
	found.DeviceNodes, found.AdditionalGIDs = s.controlNodes()
	for _, name := range expectedPrograms {
		if program, err := s.paths.Program(name); err == nil && !hasFile(found, name) {
			found.Mounts = append(found.Mounts, &specs.Mount{HostPath: program.Path, ContainerPath: "/usr/bin/" + name, Options: readOnly})
		}
	}
	confined, problems := s.confine(found)
	common := s.tidy(confined)
	for _, library := range []string{"libcuda.so.", "libnvidia-ml.so."} {
		if !hasFile(common, library+d.Version) {
			return edits{}, nil, nvidia.NotReady(
				"install the compute part of the driver (libcuda), or wait until the driver's installation is complete",
				"%s is not under %s: containers could not use CUDA%s", library+d.Version, s.paths.HostDriverRoot, because(problems, library))
		}
	}
	for _, name := range []string{"nvidiactl", "nvidia-uvm"} {
		if !hasNode(common, "/dev/"+name) {
			return edits{}, nil, nvidia.NotReady("remove it and run nvidia-modprobe -u -c=255 on the node",
				"containers cannot have the device node /dev/%s%s", name, because(problems, name))
		}
	}
	for _, name := range append([]string{"libnvidia-ptxjitcompiler.so." + d.Version}, expectedPrograms...) {
		if !hasFile(common, name) && because(problems, name) == "" {
			problems = append(problems, nvidia.Omission{Kind: nvidia.MissingFile, Name: name,
				Message: "containers lack it, because it was not found under " + s.paths.HostDriverRoot + ": complete the driver's installation"})
		}
	}
	return common, problems, nil
}

// inDriverRoot calls f with the path at which f finds the driver root. That is / where possible, on
// a thread with that root directory: nvcdi would follow an absolute symlink in this process's root.
// DriverDirs have the same path for this process and the host, so a symlink may lead to them only
// from this process's root.
func (s scanner) inDriverRoot(f func(root string)) {
	if len(s.paths.DriverDirs) == 0 && driverroot.Inside(s.paths.DriverRoot, func() { f("/") }) == nil {
		return
	}
	f(s.paths.DriverRoot)
}

// search returns what nvcdi finds in the driver root, with sources of mounts as this process sees
// them.
func (s scanner) search(d device.Driver, root string) (edits, error) {
	generator, err := s.generator(pinned{Interface: s.lib, driver: d}, root)
	if err != nil {
		return edits{}, err
	}
	found, err := generator.GetCommonEdits()
	if err != nil {
		return edits{}, err
	}
	withoutVoid(found.ContainerEdits)
	if root == "/" {
		for _, m := range found.Mounts {
			m.HostPath = filepath.Join(s.paths.DriverRoot, m.HostPath)
		}
	}
	return *found.ContainerEdits, nil
}

// controlNodes returns the device nodes that every container with a GPU gets, and the groups
// without which a user of a container could not open them.
func (s scanner) controlNodes() (nodes []*specs.DeviceNode, groups []uint32) {
	for _, name := range []string{"nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidiactl"} {
		n := &specs.DeviceNode{Path: filepath.Join(s.paths.DeviceRoot(), "dev", name)}
		info, err := os.Lstat(n.Path)
		if err != nil || info.Mode()&fs.ModeCharDevice == 0 {
			continue // checkControlNodes has found those that CUDA needs
		}
		if stat, ok := info.Sys().(*syscall.Stat_t); ok && stat.Gid != 0 {
			n.GID = &stat.Gid
			if info.Mode().Perm()&0o006 != 0o006 && !slices.Contains(groups, stat.Gid) {
				groups = append(groups, stat.Gid)
			}
		}
		nodes = append(nodes, n)
	}
	return nodes, groups
}

// readOnly are the options with which nvcdi mounts a file.
var readOnly = []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}

// expectedPrograms are the programs that every complete driver has and that containers use.
var expectedPrograms = []string{"nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"}

// because returns why a file is missing, if an edit with its name was refused.
func because(problems []nvidia.Omission, name string) string {
	for _, p := range problems {
		if strings.Contains(p.Name, name) {
			return " (" + p.String() + ")"
		}
	}
	return ""
}

// ownEdits returns the edits that a container needs for the GPU g: its device node, and its DRM
// device nodes if it has any. It fails only without the GPU's own device node.
func (s scanner) ownEdits(handle nvml.Device, g device.GPU, d device.Driver) (edits, []nvidia.Omission, error) {
	generator, err := s.generator(pinned{Interface: s.lib, driver: d, uuid: g.UUID, handle: handle}, s.paths.DriverRoot)
	if err != nil {
		return edits{}, nil, fmt.Errorf("prepare the CDI description: %w", err)
	}
	found, err := generator.GetDeviceSpecsByID(g.UUID)
	if err != nil {
		return edits{}, nil, fmt.Errorf("describe the GPU for CDI: %w", err)
	}
	if len(found) == 0 {
		return edits{}, nil, fmt.Errorf("describe the GPU for CDI: nothing found for %s", g.UUID)
	}
	own, graphics := withoutGraphics(found[0].ContainerEdits), graphicsEdits(s.paths, g.PCIAddress)
	own.DeviceNodes = append(own.DeviceNodes, graphics.DeviceNodes...)
	own.Hooks = append(own.Hooks, graphics.Hooks...)
	own.AdditionalGIDs = append(own.AdditionalGIDs, graphics.AdditionalGIDs...)
	confined, refused := s.confine(own)
	own = s.tidy(confined)
	name := fmt.Sprintf("/dev/nvidia%d", g.Minor)
	if !hasNode(own, name) {
		return edits{}, nil, fmt.Errorf("describe the GPU for CDI: %s is not among the device nodes found%s", name, because(refused, name))
	}
	return own, refused, nil
}

// generator returns nvcdi for the driver root at root.
func (s scanner) generator(library pinned, root string) (nvcdi.Interface, error) {
	quiet := logrus.New() // nvcdi would log some forty lines about optional files
	quiet.SetOutput(io.Discard)
	options := []nvcdi.Option{
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithNvmlLib(library),
		nvcdi.WithDeviceLib(nvlib.New(library)),
		nvcdi.WithDriverRoot(root),
		nvcdi.WithDevRoot(s.paths.DeviceRoot()),
		nvcdi.WithNVIDIACDIHookPath(s.paths.HookPath),
		nvcdi.WithLdconfigPath(s.paths.LdconfigPath),
		nvcdi.WithDisabledHooks(memoryLimitHook),
		nvcdi.WithFeatureFlags(
			nvcdi.FeatureDisableNvsandboxUtils,
			// This feature flag keeps the host's MPS pipes and the fabric manager's socket out of
			// containers.
			nvcdi.FeatureDisableIPCDiscoverer,
		),
		nvcdi.WithLogger(quiet),
	}
	if dirs := driverroot.SearchDirs(s.paths.DriverRoot, s.path); len(dirs) > 0 {
		for i := range dirs {
			dirs[i] = filepath.Join(root, dirs[i])
		}
		options = append(options, nvcdi.WithLibrarySearchPaths(dirs))
	}
	return nvcdi.New(options...)
}

// pinned is an NVML library that shows nvcdi only one GPU, through its open handle. nvcdi finds
// GPUs by UUID, for which NVML queries every card. One lost or hung card would then fail the other
// cards too.
type pinned struct {
	nvml.Interface
	driver device.Driver
	uuid   string
	handle nvml.Device
}

func (p pinned) Init() nvml.Return { return nvml.SUCCESS }

func (p pinned) Shutdown() nvml.Return { return nvml.SUCCESS }

func (p pinned) SystemGetDriverVersion() (string, nvml.Return) {
	return p.driver.Version, nvml.SUCCESS
}

func (p pinned) DeviceGetHandleByUUID(uuid string) (nvml.Device, nvml.Return) {
	if p.handle == nil || uuid != p.uuid {
		return nil, nvml.ERROR_NOT_FOUND
	}
	return p.handle, nvml.SUCCESS
}

// tidy converts the paths in nvcdi's edits from the plugin's view to the host's, and sorts the
// edits.
func (s scanner) tidy(e edits) edits {
	for _, n := range e.DeviceNodes {
		visible := cmp.Or(n.HostPath, n.Path)
		n.Path = s.withoutDevRoot(n.Path)
		if n.HostPath = s.paths.Host(visible); n.HostPath == n.Path {
			n.HostPath = ""
		}
		// Without stored numbers, the runtime reads them from the host's device node when the
		// container starts. The number of nvidia-uvm changes with every module load, so a stored
		// number could open another device after a reboot.
		n.Type, n.Major, n.Minor, n.FileMode = "", 0, 0, nil
		n.Permissions = "rw" // no mknod: the container need not create the device node
	}
	sort.SliceStable(e.DeviceNodes, func(i, j int) bool { return e.DeviceNodes[i].Path < e.DeviceNodes[j].Path })
	for _, m := range e.Mounts {
		m.HostPath = s.paths.Host(m.HostPath)
	}
	sort.SliceStable(e.Mounts, func(i, j int) bool { return e.Mounts[i].ContainerPath < e.Mounts[j].ContainerPath })
	for _, h := range e.Hooks {
		for i, arg := range h.Args {
			if target, link, ok := strings.Cut(arg, "::"); ok {
				h.Args[i] = target + "::" + s.withoutDevRoot(link)
			}
		}
	}
	return e
}

// withoutVoid removes what nvcdi adds to keep NVIDIA's own container runtime from injecting GPUs: a
// variable, which the base device in package cdi sets, and since 1.20.2 a mount of /dev/null, which
// confine would refuse. The variable suffices: that runtime asks it in a container without other
// mounts of this kind.
func withoutVoid(e *edits) {
	e.Env = slices.DeleteFunc(e.Env, func(v string) bool { return strings.HasPrefix(v, "NVIDIA_VISIBLE_DEVICES=") })
	e.Mounts = slices.DeleteFunc(e.Mounts, func(m *specs.Mount) bool {
		return m.HostPath == "/dev/null" && m.ContainerPath == "/var/run/nvidia-container-devices/void"
	})
}

// withoutDevRoot returns the path in the container of a device node at path on this machine.
func (s scanner) withoutDevRoot(path string) string {
	root := s.paths.DeviceRoot()
	if rest, ok := hostfile.Below(filepath.Join(root, "dev"), path); ok {
		return filepath.Join("/dev", rest)
	}
	return path
}

func hasNode(e edits, path string) bool {
	return slices.ContainsFunc(e.DeviceNodes, func(n *specs.DeviceNode) bool { return n.Path == path })
}

func hasFile(e edits, name string) bool {
	return slices.ContainsFunc(e.Mounts, func(m *specs.Mount) bool { return filepath.Base(m.ContainerPath) == name })
}

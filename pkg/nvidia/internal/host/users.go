package host

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

// majorNVIDIA is the major number of all GPU device nodes (Linux device list).
const majorNVIDIA = 195

// DeviceNodes says which device nodes [UsersOf] searches for in the processes: by device
// number in open files, and by name in memory mappings.
type DeviceNodes struct {
	numbers map[uint64]bool
	// like are parts of the paths of all such device nodes. Other files are not examined.
	like []string
	// names are parts of the device nodes' paths. Memory mappings show a path and no device number, so
	// names are needed to find them. Device nodes that processes do not map have none.
	names []string
}

// likeNVIDIA, likeDRM and likeVFIO are in the paths of all device nodes of NVIDIA's driver, of DRM
// and of VFIO.
const (
	likeNVIDIA = "/nvidia"
	likeDRM    = "/dri/"
	likeVFIO   = "/vfio/"
)

// GPUNodes describes the device nodes of a GPU, and those of its DRM devices.
func GPUNodes(p nvidia.Paths, gpu device.PCIAddress, minor int) DeviceNodes {
	nodes := DeviceNodes{
		//nolint:gosec // NVML's own number
		numbers: map[uint64]bool{unix.Mkdev(majorNVIDIA, uint32(minor)): true}, like: []string{likeNVIDIA, likeDRM},
		names: []string{fmt.Sprintf("nvidia%d", minor)},
	}
	for _, name := range GraphicsDevices(p.Sysfs, gpu) {
		var major, minor uint32
		number := hostfile.ReadTrimmed(filepath.Join(p.Sysfs, "bus/pci/devices", string(gpu), "drm", name, "dev"))
		if n, _ := fmt.Sscanf(number, "%d:%d", &major, &minor); n == 2 {
			nodes.numbers[unix.Mkdev(major, minor)] = true
			nodes.names = append(nodes.names, "dri/"+name)
		}
	}
	return nodes
}

// And returns the nodes of n and of others.
func (n DeviceNodes) And(others ...DeviceNodes) DeviceNodes {
	all := DeviceNodes{numbers: map[uint64]bool{}}
	for _, one := range append(others, n) {
		maps.Copy(all.numbers, one.numbers)
		all.like = append(all.like, one.like...)
		all.names = append(all.names, one.names...)
	}
	slices.Sort(all.like)
	all.like = slices.Compact(all.like)
	return all
}

// Minor returns the N of the device node nvidiaN of a card that NVIDIA's driver has.
func Minor(p nvidia.Paths, card device.PCIAddress) (int, error) {
	path := filepath.Join(p.Proc, "driver/nvidia/gpus", string(card), "information")
	text, err := os.ReadFile(path)
	if err != nil {
		return -1, fmt.Errorf("find the device node of %s: %w", card, err)
	}
	_, after, _ := strings.Cut(string(text), "Device Minor:")
	line, _, _ := strings.Cut(after, "\n")
	minor, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		return -1, fmt.Errorf("find the device node of %s: %s: %w", card, path, err)
	}
	return minor, nil
}

// InstanceNodes describes the capability device nodes of a GPU instance and its compute instances.
func InstanceNodes(p nvidia.Paths, gpuMinor int, instance uint32) DeviceNodes {
	found := DeviceNodes{numbers: map[uint64]bool{}, like: []string{likeNVIDIA}}
	major, err := CapabilityMajor(p)
	if err != nil {
		return found
	}
	folder := instanceFolder(p, gpuMinor, instance)
	files, _ := filepath.Glob(filepath.Join(folder, "ci*", "access"))
	for _, file := range append(files, filepath.Join(folder, "access")) {
		if c, err := readCapability(file); err == nil {
			found.numbers[unix.Mkdev(major, uint32(c.minor))] = true //nolint:gosec // 31 bits
		}
	}
	return found
}

// VFIONodes describes the device nodes at these paths, which VFIO made. Missing ones are left out.
func VFIONodes(paths ...string) DeviceNodes {
	found := DeviceNodes{numbers: map[uint64]bool{}, like: []string{likeVFIO}}
	for _, path := range paths {
		if number, is := hostfile.CharDevice(path); is {
			found.numbers[number] = true
		}
	}
	return found
}

// UsersOf lists the processes in the host's /proc that have one of the device nodes open or mapped.
// It skips processes that it cannot read.
func UsersOf(p nvidia.Paths, of DeviceNodes) []nvidia.Process {
	self, _ := os.Readlink(filepath.Join(p.Proc, "self")) // this process's PID in the host's namespace
	entries, _ := os.ReadDir(p.Proc)
	var found []nvidia.Process
	for _, e := range entries {
		pid, err := strconv.ParseUint(e.Name(), 10, 32)
		if err != nil || e.Name() == self {
			continue
		}
		if Uses(p, uint32(pid), of) {
			found = append(found, ProcessOf(p, uint32(pid)))
		}
	}
	return found
}

// errorLimit is how long [UsersForError] may take. A read of /proc takes milliseconds, but blocks
// while a process hangs with its memory map locked.
const errorLimit = 3 * time.Second

// reading is locked while a goroutine of [UsersForError] reads /proc, so that only one can hang.
var reading sync.Mutex

// UsersForError is [UsersOf] for an error message. The message must not wait for a process that
// hangs. So the list is empty if /proc does not answer in time, or has not answered an earlier
// call.
func UsersForError(p nvidia.Paths, of DeviceNodes) []nvidia.Process {
	if !reading.TryLock() {
		return nil
	}
	found := make(chan []nvidia.Process, 1)
	go func() {
		users := UsersOf(p, of)
		reading.Unlock() // before the caller can ask again
		found <- users
	}()
	select {
	case users := <-found:
		return users
	case <-time.After(errorLimit):
		return nil
	}
}

// Uses reports whether a process of the host has one of the device nodes open or mapped.
func Uses(p nvidia.Paths, pid uint32, of DeviceNodes) bool {
	dir := filepath.Join(p.Proc, fmt.Sprint(pid))
	return of.openIn(dir) || of.mappedIn(dir)
}

// openIn reports whether a process has one of the device nodes open. process is its /proc
// directory.
func (n DeviceNodes) openIn(process string) bool {
	descriptors := filepath.Join(process, "fd")
	entries, _ := os.ReadDir(descriptors)
	for _, e := range entries {
		descriptor := filepath.Join(descriptors, e.Name())
		target, err := os.Readlink(descriptor)
		if err != nil || !slices.ContainsFunc(n.like, func(part string) bool { return strings.Contains(target, part) }) {
			continue
		}
		if number, is := hostfile.CharDevice(descriptor); is && n.numbers[number] {
			return true
		}
	}
	return false
}

// mappedIn reports whether a process maps one of the device nodes into memory. process is its /proc
// directory. A process may keep a mapping after it has closed the file.
func (n DeviceNodes) mappedIn(process string) bool {
	if len(n.names) == 0 {
		return false
	}
	mapped, _ := os.ReadFile(filepath.Join(process, "maps"))
	return slices.ContainsFunc(n.names, func(name string) bool { return strings.Contains(string(mapped), "/"+name+"\n") })
}

// ProcessOf returns what /proc says about a process of the host.
func ProcessOf(p nvidia.Paths, pid uint32) nvidia.Process {
	dir := filepath.Join(p.Proc, fmt.Sprint(pid))
	environment := strings.Split(hostfile.ReadTrimmed(filepath.Join(dir, "environ")), "\x00")
	return nvidia.Process{
		PID: pid, Name: hostfile.ReadTrimmed(filepath.Join(dir, "comm")), Pod: podOf(filepath.Join(dir, "cgroup")),
		Plugin: slices.Contains(environment, nvidia.ChildMark),
	}
}

// podGroup matches the kubelet's name for a Pod's cgroup. The systemd cgroup driver replaces the
// dashes of the Pod's UID with underscores.
var podGroup = regexp.MustCompile(`pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})`)

// podOf returns the UID of the Pod in a process's cgroup file. It is empty if the process belongs
// to no Pod.
func podOf(cgroup string) string {
	m := podGroup.FindStringSubmatch(hostfile.ReadTrimmed(cgroup))
	if m == nil {
		return ""
	}
	return strings.ReplaceAll(m[1], "_", "-")
}

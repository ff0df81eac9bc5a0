package nvidia

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// majorNVIDIA is of all GPUs, as Linux's list of device numbers has it.
const majorNVIDIA = 195

// nodes are device nodes of the driver.
type nodes struct {
	numbers map[uint64]bool
	name    string // finds mappings, which show no device number; empty if the nodes are never mapped
}

// cardNode is a GPU's device node.
func cardNode(minor int) nodes {
	return nodes{map[uint64]bool{unix.Mkdev(majorNVIDIA, uint32(minor)): true}, fmt.Sprintf("nvidia%d", minor)} //nolint:gosec // NVML's own number
}

// instanceNodes are the capability nodes of a GPU instance and its compute instances.
func (p Paths) instanceNodes(gpuMinor int, instance uint32) nodes {
	found := nodes{numbers: map[uint64]bool{}}
	major, err := p.capabilityMajor()
	if err != nil {
		return found
	}
	folder := p.instanceFolder(gpuMinor, instance)
	files, _ := filepath.Glob(filepath.Join(folder, "ci*", "access"))
	for _, file := range append(files, filepath.Join(folder, "access")) {
		if c, err := readCapability(file); err == nil {
			found.numbers[unix.Mkdev(major, uint32(c.minor))] = true //nolint:gosec // 31 bits
		}
	}
	return found
}

// Holders are the other processes that have a GPU's device node open, on the whole host. NVML lists
// only processes with a CUDA or graphics context.
func (p Paths) Holders(minor int) []Process { return p.withDefaults().holders(cardNode(minor)) }

// holders searches all processes of the host's /proc. It leaves out what it cannot read.
func (p Paths) holders(of nodes) []Process {
	self, _ := os.Readlink(filepath.Join(p.Proc, "self")) // our PID in the host's namespace
	entries, _ := os.ReadDir(p.Proc)
	var found []Process
	for _, e := range entries {
		pid, err := strconv.ParseUint(e.Name(), 10, 32)
		if err != nil || e.Name() == self {
			continue
		}
		if dir := filepath.Join(p.Proc, e.Name()); of.openIn(dir) || of.mappedIn(dir) {
			found = append(found, p.process(uint32(pid)))
		}
	}
	return found
}

// openIn calls stat only on paths that look like the driver's nodes: others may lie on a file system
// that hangs.
func (n nodes) openIn(process string) bool {
	descriptors := filepath.Join(process, "fd")
	entries, _ := os.ReadDir(descriptors)
	for _, e := range entries {
		descriptor := filepath.Join(descriptors, e.Name())
		target, err := os.Readlink(descriptor)
		if err != nil || !strings.HasPrefix(filepath.Base(target), "nvidia") {
			continue
		}
		if info, err := os.Stat(descriptor); err == nil && info.Mode()&fs.ModeCharDevice != 0 && n.numbers[deviceNumber(info)] {
			return true
		}
	}
	return false
}

// mappedIn finds a process that has closed the descriptor and keeps the mapping.
func (n nodes) mappedIn(process string) bool {
	if n.name == "" {
		return false
	}
	maps, _ := os.ReadFile(filepath.Join(process, "maps"))
	return strings.Contains(string(maps), "/"+n.name+"\n")
}

// process describes a process of the host.
func (p Paths) process(pid uint32) Process {
	dir := filepath.Join(p.Proc, fmt.Sprint(pid))
	return Process{PID: pid, Name: readTrimmed(filepath.Join(dir, "comm")), Pod: podOf(filepath.Join(dir, "cgroup"))}
}

// podGroup matches the kubelet's cgroup of a Pod. The systemd driver writes underscores for dashes.
var podGroup = regexp.MustCompile(`pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})`)

// podOf is the UID of a process's Pod, empty if it has none.
func podOf(cgroup string) string {
	m := podGroup.FindStringSubmatch(readTrimmed(cgroup))
	if m == nil {
		return ""
	}
	return strings.ReplaceAll(m[1], "_", "-")
}

// merge adds the processes that first lacks.
func merge(first, more []Process) []Process {
	for _, p := range more {
		if !slices.ContainsFunc(first, func(o Process) bool { return o.PID == p.PID }) {
			first = append(first, p)
		}
	}
	return first
}

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

// nodes are device nodes of the driver's by their numbers, and the names of those that may be mapped.
type nodes struct {
	numbers map[uint64]bool
	name    string // nvidiaN; a mapping has no number
}

// cardNode is the node of a GPU.
func cardNode(minor int) nodes {
	return nodes{map[uint64]bool{unix.Mkdev(majorNVIDIA, uint32(minor)): true}, fmt.Sprintf("nvidia%d", minor)} //nolint:gosec // NVML's own number
}

// instanceNodes are those that stand for a GPU instance and what is in it.
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

// Holders are the processes that have a GPU's device node open, but for this one. NVML lists only those that compute.
func (p Paths) Holders(minor int) []Process { return p.withDefaults().holders(cardNode(minor)) }

// holders reads what every process of the host has open. It is for people: what cannot be read is left out.
func (p Paths) holders(of nodes) []Process {
	self, _ := os.Readlink(filepath.Join(p.Proc, "self")) // our number there, which is another one in a container
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

// openIn looks at those descriptors only whose path may be a node's: others may lie on a file system that does not answer.
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

// mappedIn finds who has closed the node and goes on using it.
func (n nodes) mappedIn(process string) bool {
	if n.name == "" {
		return false
	}
	maps, _ := os.ReadFile(filepath.Join(process, "maps"))
	return strings.Contains(string(maps), "/"+n.name+"\n")
}

// process says who that is.
func (p Paths) process(pid uint32) Process {
	dir := filepath.Join(p.Proc, fmt.Sprint(pid))
	return Process{PID: pid, Name: readTrimmed(filepath.Join(dir, "comm")), Pod: podOf(filepath.Join(dir, "cgroup"))}
}

// podGroup is how the kubelet names a Pod's control group: with dashes, or underscores where systemd makes it.
var podGroup = regexp.MustCompile(`pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})`)

// podOf is the UID of the Pod that a process is of, empty if it is of none.
func podOf(cgroup string) string {
	m := podGroup.FindStringSubmatch(readTrimmed(cgroup))
	if m == nil {
		return ""
	}
	return strings.ReplaceAll(m[1], "_", "-")
}

// join adds the processes that are not among the first.
func join(first, more []Process) []Process {
	for _, p := range more {
		if !slices.ContainsFunc(first, func(o Process) bool { return o.PID == p.PID }) {
			first = append(first, p)
		}
	}
	return first
}

package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// ticks is the unit of process times in /proc, 1/USER_HZ. USER_HZ is 100 on all supported
// architectures.
const ticks = time.Second / 100

type stat struct {
	state  string
	parent int
	cpu    time.Duration
}

func readStat(pid int) (stat, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return stat{}, err
	}
	// The program's name is in parentheses before the other fields.
	_, rest, _ := strings.Cut(string(raw), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 15 {
		return stat{}, fmt.Errorf("process %d: %q", pid, raw)
	}
	s := stat{state: fields[0]}
	s.parent, _ = strconv.Atoi(fields[1])
	// These fields are the user and kernel time of the process, and then of its ended child processes.
	for _, f := range fields[11:15] {
		n, _ := strconv.Atoi(f)
		s.cpu += time.Duration(n) * ticks
	}
	return s, nil
}

// Processes returns the process IDs of the plugin and its child processes. The plugin's own process
// ID is the first.
func (p *Plugin) Processes() []int {
	paths, _ := filepath.Glob("/proc/[0-9]*")
	children := map[int][]int{}
	for _, path := range paths {
		pid, _ := strconv.Atoi(filepath.Base(path))
		if s, err := readStat(pid); err == nil {
			children[s.parent] = append(children[s.parent], pid)
		}
	}
	tree := []int{p.cmd.Process.Pid}
	for i := 0; i < len(tree); i++ {
		tree = append(tree, children[tree[i]]...)
	}
	return tree
}

// CPU returns the processor time so far of the plugin and its child processes, including those that
// have ended.
func (p *Plugin) CPU() time.Duration {
	var sum time.Duration
	for _, pid := range p.Processes() {
		if s, err := readStat(pid); err == nil {
			sum += s.cpu
		}
	}
	return sum
}

// Memory is the plugin's resident memory in bytes.
type Memory struct {
	// Plugin is the total of the plugin's own process. Own is the anonymous part of that, and Files
	// the part that maps its program.
	Plugin, Own, Files int64
	// Children is the memory of all child processes. Memory that several processes share is divided
	// among them.
	Children int64
}

// Memory returns the resident memory that the plugin uses now.
func (p *Plugin) Memory() (m Memory, err error) {
	for _, part := range []struct {
		field string
		size  *int64
	}{{"VmRSS:", &m.Plugin}, {"RssAnon:", &m.Own}, {"RssFile:", &m.Files}} {
		if *part.size, err = memory(p.cmd.Process.Pid, "status", part.field); err != nil {
			return Memory{}, err
		}
	}
	for _, pid := range p.Processes()[1:] {
		// Pss divides a shared page, mostly of the program, among the processes that map it.
		more, err := memory(pid, "smaps_rollup", "Pss:")
		if err == nil {
			m.Children += more
		}
	}
	return m, nil
}

func memory(pid int, file, field string) (int64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(raw)) {
		if rest, ok := strings.CutPrefix(line, field); ok {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("process %d: no %s in %s", pid, field, file)
}

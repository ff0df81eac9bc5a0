package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// ticks is in what the kernel counts the time of processes: USER_HZ, which is 100 on every architecture that we build for.
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
	// The program's name is in brackets and may have anything in it.
	_, rest, _ := strings.Cut(string(raw), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 15 {
		return stat{}, fmt.Errorf("process %d: %q", pid, raw)
	}
	s := stat{state: fields[0]}
	s.parent, _ = strconv.Atoi(fields[1])
	for _, f := range fields[11:15] { // in user mode, in the kernel, and both of child processes that have ended
		n, _ := strconv.Atoi(f)
		s.cpu += time.Duration(n) * ticks
	}
	return s, nil
}

// Processes are the plugin and its child processes.
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

// CPU is the time that the plugin and its child processes have taken so far, also those that have ended.
func (p *Plugin) CPU() time.Duration {
	var sum time.Duration
	for _, pid := range p.Processes() {
		if s, err := readStat(pid); err == nil {
			sum += s.cpu
		}
	}
	return sum
}

// Memory is what is resident of the plugin, in bytes.
type Memory struct {
	// Plugin is all that the plugin has, Own what is its alone, Files what the page cache has of its program.
	Plugin, Own, Files int64
	// Children is what its child processes have beside that for themselves alone.
	Children int64
}

// Memory is what is resident now.
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
		// What they share with the plugin, the program above all, is there once.
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

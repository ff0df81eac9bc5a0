package main

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

// question is a check that asks the machine for something that this project does not know for sure.
// Its answer is in the report word for word, whatever it is.
type question struct {
	name string
	ask  func(context.Context) (answer string, err error)
	// judge compares the answer with what is known. Without it, the answer is only recorded.
	judge func(answer string) (facts.Verdict, string)
	// lines is how many of the answer's last lines are its summary, at least one.
	lines int
}

const (
	// questionLimit is how long one question may take, and questionEnd how long its programs may take
	// to end then. An answer that is read from a file that hangs is given up.
	questionLimit = 75 * time.Second
	questionEnd   = 20 * time.Second
)

// ask asks the questions in order, until ctx ends, and adds each answer to the report.
func (s *visit) ask(ctx context.Context, questions []question) {
	for _, q := range questions {
		if ctx.Err() != nil {
			return
		}
		answer, err := q.answered(ctx, questionLimit, questionEnd)
		verdict, detail := facts.Recorded, lastLines(answer, max(1, q.lines))
		switch {
		case ctx.Err() != nil && err != nil:
			verdict, detail = facts.NotProven, "the check ended first"
		case errors.Is(err, errNotByRunc):
			verdict, detail = facts.NotProven, err.Error()
		case err != nil:
			verdict, detail = facts.Failed, err.Error()
		case q.judge != nil:
			verdict, detail = q.judge(answer)
		}
		s.show(q.name, "", answer)
		s.add(q.name, verdict, "%s", detail)
		s.report.Checks[len(s.report.Checks)-1].Answer = answer
	}
}

// answered asks the question. If there is no answer within limit, it ends the question's context,
// and waits as long as end for what there is.
func (q question) answered(ctx context.Context, limit, end time.Duration) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("no answer within %s", limit))
	defer cancel()
	type reply struct {
		answer string
		err    error
	}
	replies := make(chan reply, 1)
	go func() {
		answer, err := q.ask(ctx)
		replies <- reply{answer, err}
	}()
	var r reply
	select {
	case r = <-replies:
	case <-ctx.Done():
		select {
		case r = <-replies:
		case <-time.After(end):
		}
	}
	if ctx.Err() != nil {
		r.err = errors.Join(context.Cause(ctx), r.err)
	}
	return r.answer, r.err
}

// machineQuestions ask what the kernel says about the driver and its DRM devices.
func (s *visit) machineQuestions() []question {
	return []question{
		{lines: 3, name: "the kernel modules and the reset methods", ask: func(context.Context) (string, error) {
			return contents(s.sysfs, "bus/pci/drivers/nvidia/*/numa_node", "module/nvidia*/refcnt", "module/nvidia*/parameters/*",
				"bus/pci/drivers/nvidia/*/reset_method", "module/nvidia*/version", "module/nvidia_drm/parameters/modeset"), nil
		}},
		{name: "the DRM device nodes", ask: func(context.Context) (string, error) {
			nodes := describe("/dev/dri")
			links, err := filepath.Glob(filepath.Join(s.sysfs, "bus/pci/devices/*/drm/*"))
			for _, link := range links {
				nodes += fmt.Sprintf("%s is of PCI %s\n", filepath.Base(link), filepath.Base(filepath.Dir(filepath.Dir(link))))
			}
			return nodes, err
		}},
	}
}

// contents returns the content of each file below folder that a pattern names, or why it cannot be
// read. A pattern without a file has its own line.
func contents(folder string, patterns ...string) string {
	b := &strings.Builder{}
	for _, pattern := range patterns {
		paths, _ := filepath.Glob(filepath.Join(folder, pattern))
		if len(paths) == 0 {
			fmt.Fprintf(b, "%s: none\n", pattern)
		}
		for _, path := range paths {
			data, err := os.ReadFile(path)
			text := strings.TrimSpace(string(data))
			if err != nil {
				text = err.Error()
			}
			fmt.Fprintf(b, "%s: %s\n", strings.TrimPrefix(path, folder+"/"), text)
		}
	}
	return b.String()
}

const (
	// stageLook is the first argument with which hwcheck runs in a container, to describe the files
	// at its other arguments: hwcheck look PATH…
	stageLook = "look"
	// writable marks a file that can be opened for writing, and readOnly one that not even a user with
	// all capabilities could open.
	writable = "can be written"
	readOnly = "on a read-only mount"
)

// describe lists path and all below it with mode, owner and group, and device nodes with their
// numbers. It opens plain files for writing, to see whether it may, and writes nothing.
func describe(path string) string {
	b := &strings.Builder{}
	err := filepath.WalkDir(path, func(path string, entry fs.DirEntry, err error) error {
		var stat unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &stat)
		}
		if err != nil {
			fmt.Fprintf(b, "%s: %v\n", path, err)
			return nil
		}
		fmt.Fprintf(b, "%s: mode %04o, owner %d, group %d", path, stat.Mode&0o7777, stat.Uid, stat.Gid)
		switch stat.Mode & unix.S_IFMT {
		case unix.S_IFCHR:
			fmt.Fprintf(b, ", device %d:%d", unix.Major(stat.Rdev), unix.Minor(stat.Rdev))
		case unix.S_IFLNK:
			to, _ := os.Readlink(path)
			fmt.Fprintf(b, ", a link to %s", to)
		case unix.S_IFREG:
			if file, err := os.OpenFile(path, os.O_WRONLY, 0); err == nil {
				_ = file.Close()
				fmt.Fprint(b, ", ", writable)
			} else {
				fmt.Fprintf(b, ", for writing: %v", errors.Unwrap(err))
			}
			var mount unix.Statfs_t
			if unix.Statfs(path, &mount) == nil && mount.Flags&unix.ST_RDONLY != 0 {
				fmt.Fprint(b, ", ", readOnly)
			}
		}
		fmt.Fprintln(b)
		return nil
	})
	if err != nil {
		fmt.Fprintf(b, "%s: %v\n", path, err)
	}
	return b.String()
}

// nvmlQuestions ask which functions the driver's NVML library exports. The plugin's program
// names all functions that go-nvml can call.
func (s *visit) nvmlQuestions() []question {
	return []question{{name: "the names that the NVML library exports", ask: func(context.Context) (string, error) {
		has, err := nvmlSymbols(s.report.Driver.Library)
		if err != nil {
			return "", err
		}
		calls, err := nvmlSymbols(s.programs.path(plugin))
		if err != nil {
			return "", err
		}
		absent := without(calls.undefined, has.defined)
		return fmt.Sprintf("exported: %s\nof go-nvml, and unknown to this library: %s\n"+
			"exported, and unknown to go-nvml: %s\n%d names, %d of go-nvml's %d are unknown to this library",
			strings.Join(has.defined, " "), orNone(strings.Join(absent, " ")),
			orNone(strings.Join(without(has.defined, calls.undefined), " ")),
			len(has.defined), len(absent), len(calls.undefined)), nil
	}}}
}

// names are NVML's functions in the symbol table of a file.
type names struct{ defined, undefined []string }

func nvmlSymbols(path string) (names, error) {
	file, err := elf.Open(path)
	if err != nil {
		return names{}, err
	}
	defer func() { _ = file.Close() }()
	all, err := file.DynamicSymbols()
	if err != nil {
		return names{}, fmt.Errorf("read the symbols of %s: %w", path, err)
	}
	var found names
	for _, symbol := range all {
		switch {
		case !strings.HasPrefix(symbol.Name, "nvml"):
		case symbol.Section == elf.SHN_UNDEF:
			found.undefined = append(found.undefined, symbol.Name)
		default:
			found.defined = append(found.defined, symbol.Name)
		}
	}
	slices.Sort(found.defined)
	slices.Sort(found.undefined)
	return found, nil
}

// without returns the elements of list that other lacks.
func without(list, other []string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(name string) bool { return slices.Contains(other, name) })
}

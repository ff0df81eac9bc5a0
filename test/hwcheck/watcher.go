package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

const (
	// attachLimit is how long the watcher may take until each GPU has answered. A GPU that no process
	// has open takes seconds to open, one after another.
	attachLimit = time.Minute
	// pollInterval is how often the watcher polls each GPU during this check. It is shorter than the
	// plugin's interval, so that a leak per poll shows.
	pollInterval = 250 * time.Millisecond
	// endLimit is how long the watcher may take to end. The plugin waits as long before it reports
	// that the driver is held.
	endLimit = 5 * time.Second
	// scanBudget is how long all scans together may take. Fewer scans are reported as such.
	scanBudget = 2 * time.Minute
	// samples is how many samples of the watcher tell what it holds at rest from what a poll opens.
	samples = 6
	// memoryGrowth is by how much the watcher's memory may grow. Go's garbage collector alone makes it
	// vary by a few MiB.
	memoryGrowth = 16 * 1024 // KiB
)

// instanceNode matches the capability node of a MIG instance. The nodes 1 and 2 are those of the
// whole machine, for configuration and monitoring.
var instanceNode = regexp.MustCompile(`^nvidia-caps/nvidia-cap([3-9]|[0-9]{2,})$`)

// childMark is the variable by which the plugin knows its own processes. Without it the inventory
// would list the watcher among the processes that have the GPU open.
const childMark = "GPU_DRA_DRIVER_CHILD=1"

// watchOrder is what the plugin's command watch reads as its first line. The plugin's own type
// would make this program three times as large.
type watchOrder struct {
	Paths    map[string]string `json:"paths"`
	Interval time.Duration     `json:"interval"`
	Wedged   time.Duration     `json:"wedged"`
}

// watchSignal is the part that this check needs of the lines that the command watch prints.
type watchSignal struct {
	Watcher *struct {
		Up     bool   `json:"up"`
		Events bool   `json:"events"`
		Error  string `json:"error"`
	} `json:"watcher"`
	Condition *struct {
		Card struct {
			PCIAddress string `json:"pciAddress"`
		} `json:"card"`
		Reach string `json:"reach"`
		Error string `json:"error"`
	} `json:"condition"`
}

// watcherProcess is the plugin's watcher process, started as the plugin starts it.
type watcherProcess struct {
	cmd    *exec.Cmd
	stdin  io.Closer
	began  time.Time
	stderr bytes.Buffer
	// changed gets a value after each signal. It is closed when the process sends no more.
	changed chan struct{}

	mu sync.Mutex
	// The fields below are those that the signals change. up is zero until the process has NVML.
	up       time.Time
	events   bool
	trouble  string
	answered map[string]bool   // PCI addresses of GPUs that are reached
	silent   map[string]string // and of those that are not, with the reason
	polls    int
}

// attachWatcher starts the plugin's watcher process and adds to the report how long it takes until
// each GPU has answered, and what it holds then. It returns nil if the process cannot be used.
func (s *visit) attachWatcher(ctx context.Context) *watcherProcess {
	const name = "the watcher reaches every GPU"
	w, err := s.startWatcher(ctx)
	if err != nil {
		s.add(name, facts.Failed, "%v", err)
		return nil
	}
	s.report.Watcher = &facts.Watcher{}
	if !s.judgeAttach(ctx, name, w, s.report.Watcher) {
		s.endWatcher(w)
		return nil
	}
	s.judgeRest(ctx, w, s.report.Watcher)
	return w
}

// startWatcher starts the watcher process without capabilities and sends it its order.
func (s *visit) startWatcher(ctx context.Context) (*watcherProcess, error) {
	args := []string{"watch"}
	if err := checkPermitted(plugin, args); err != nil {
		return nil, err
	}
	order, err := json.Marshal(watchOrder{
		Paths: map[string]string{
			"driverRoot": s.report.Driver.Root, "devRoot": s.devRoot, "sysfs": s.sysfs, "proc": s.proc, "hookPath": s.programs.path(hook),
		},
		Interval: pollInterval, Wedged: 10 * time.Second,
	})
	if err != nil {
		return nil, err
	}
	argv := append([]string{s.programs.self, stageWithoutCapabilities, s.programs.path(plugin)}, args...)
	w := &watcherProcess{
		cmd:     command{argv: argv, env: []string{childMark}}.build(ctx),
		changed: make(chan struct{}, 1), answered: map[string]bool{}, silent: map[string]string{},
	}
	w.cmd.Stderr = &w.stderr
	stdin, err := w.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := w.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	w.stdin, w.began = stdin, time.Now()
	if err := w.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the watcher process: %w", err)
	}
	go w.receive(stdout)
	_, _ = stdin.Write(append(order, '\n')) // if it fails, the process has ended, which closes changed
	return w, nil
}

func (w *watcherProcess) receive(stdout io.Reader) {
	defer close(w.changed)
	for decoder := json.NewDecoder(stdout); ; {
		var signal watchSignal
		if decoder.Decode(&signal) != nil {
			return
		}
		w.take(signal)
		select {
		case w.changed <- struct{}{}:
		default:
		}
	}
}

func (w *watcherProcess) take(signal watchSignal) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if state := signal.Watcher; state != nil {
		w.events, w.trouble = state.Events, state.Error
		if state.Up && w.up.IsZero() {
			w.up = time.Now()
		}
	}
	if condition := signal.Condition; condition != nil {
		w.polls++
		address := condition.Card.PCIAddress
		if condition.Reach == "ok" {
			w.answered[address] = true
			delete(w.silent, address)
		} else {
			w.silent[address] = condition.Reach + ": " + condition.Error
		}
	}
}

// isAttached reports whether that many GPUs have answered and all of them deliver events.
func (w *watcherProcess) isAttached(gpus int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.up.IsZero() && w.events && len(w.answered) >= gpus
}

// judgeAttach waits until each GPU has answered and delivers events, and adds the times to the
// report. It reports whether each GPU has answered.
func (s *visit) judgeAttach(ctx context.Context, name string, w *watcherProcess, found *facts.Watcher) bool {
	gpus := 0
	for _, f := range s.report.Machine.PCI {
		if f.Driver == "" || f.Driver == "nvidia" {
			gpus++
		}
	}
	gpus = max(gpus, 1) // a sandbox may hide the PCI bus
	limit := time.NewTimer(attachLimit)
	defer limit.Stop()
	for open := true; open && !w.isAttached(gpus); {
		select {
		case _, open = <-w.changed:
		case <-limit.C:
			open = false
		case <-ctx.Done():
			open = false
		}
	}
	answer := time.Since(w.began)
	w.mu.Lock()
	defer w.mu.Unlock()
	answered := !w.up.IsZero() && len(w.answered) >= gpus
	found.Events = w.events
	if !w.up.IsZero() {
		found.AttachMillis = w.up.Sub(w.began).Milliseconds()
	}
	if !answered {
		var silent []string
		for _, address := range slices.Sorted(maps.Keys(w.silent)) {
			silent = append(silent, address+" "+w.silent[address])
		}
		s.add(name, facts.Failed, "%d of %d GPUs answered within %s, events %t %s %s",
			len(w.answered), gpus, answer.Round(time.Second), w.events, w.trouble, strings.Join(silent, "; "))
		return false
	}
	if !w.events {
		s.add(name, facts.Differed, "every GPU answers, but within %s not every GPU delivers events: %s", answer.Round(time.Second), w.trouble)
		return true
	}
	found.AnswerMillis = answer.Milliseconds()
	s.add(name, facts.Agreed, "NVML after %d ms, every GPU and its events after %d ms", found.AttachMillis, found.AnswerMillis)
	return true
}

// judgeRest adds to the report which device nodes the watcher holds between polls. A descriptor of
// a MIG instance would block the removal of that instance.
func (s *visit) judgeRest(ctx context.Context, w *watcherProcess, found *facts.Watcher) {
	const name = "the watcher holds no MIG instance"
	var err error
	for i := range samples {
		now, failed := nvidiaDescriptors(w.cmd.Process.Pid)
		err = errors.Join(err, failed)
		if i == 0 {
			found.Descriptors = now
		}
		maps.DeleteFunc(found.Descriptors, func(node string, _ int) bool { return now[node] == 0 })
		wait(ctx, pollInterval/samples)
	}
	var nodes, instances []string
	for _, node := range slices.Sorted(maps.Keys(found.Descriptors)) {
		nodes = append(nodes, fmt.Sprintf("%s (%d)", node, found.Descriptors[node]))
		if instanceNode.MatchString(node) {
			instances = append(instances, node)
		}
	}
	switch {
	case err != nil:
		s.add(name, facts.NotProven, "%v", err)
	case len(instances) > 0:
		s.add(name, facts.Differed, "at rest it holds %s", strings.Join(instances, ", "))
	default:
		s.add(name, facts.Agreed, "at rest it holds %s", orNone(strings.Join(nodes, ", ")))
	}
}

// checkScans scans the GPUs again and again while the watcher polls them, and adds to the report
// how long that took and whether the watcher's memory or descriptors grew.
func (s *visit) checkScans(ctx context.Context, w *watcherProcess) {
	if w == nil {
		return // attachWatcher reported why
	}
	const name = "repeated scans leak nothing"
	found := s.report.Watcher
	var took []time.Duration
	var err error
	for began := time.Now(); len(took) < s.scans && time.Since(began) < scanBudget && ctx.Err() == nil; {
		start := time.Now()
		if result := s.inventory(ctx, s.report.Driver.Root, "yaml"); result.err != nil {
			s.add(name, facts.Failed, "scan %d: %s", len(took)+1, lastLines(result.summary(), 3))
			return
		}
		took = append(took, time.Since(start))
		if len(took) == 1 { // the first scan warms up the watcher too
			found.Start, err = usageAtRest(ctx, w.cmd.Process.Pid)
		}
	}
	if ctx.Err() != nil {
		return
	}
	var failed error
	found.End, failed = usageAtRest(ctx, w.cmd.Process.Pid)
	w.mu.Lock()
	found.Polls = w.polls
	w.mu.Unlock()
	found.Scans = facts.Scans{Count: len(took), FirstMillis: took[0].Milliseconds()}
	slices.Sort(took)
	found.Scans.MedianMillis, found.Scans.LongestMillis = took[len(took)/2].Milliseconds(), took[len(took)-1].Milliseconds()
	detail := fmt.Sprintf("%d scans of %d ms (longest %d ms) and %d polls; the watcher has %d, then %d descriptors, and %d, then %d KiB",
		len(took), found.Scans.MedianMillis, found.Scans.LongestMillis, found.Polls,
		found.Start.Descriptors, found.End.Descriptors, found.Start.MemoryKiB, found.End.MemoryKiB)
	switch {
	case errors.Join(err, failed) != nil:
		s.add(name, facts.NotProven, "%v", errors.Join(err, failed))
	case found.End.Descriptors > found.Start.Descriptors || found.End.MemoryKiB > found.Start.MemoryKiB+memoryGrowth:
		s.add(name, facts.Differed, "%s", detail)
	case len(took) < s.scans:
		s.add(name, facts.NotProven, "only %s fit into %s", detail, scanBudget)
	default:
		s.add(name, facts.Agreed, "%s", detail)
	}
}

// endWatcher closes the watcher's standard input, as the plugin does, and adds to the report
// whether it ends and releases the GPUs.
func (s *visit) endWatcher(w *watcherProcess) {
	if w == nil {
		return // attachWatcher reported why
	}
	const name = "the watcher ends and releases the GPUs"
	began := time.Now()
	_ = w.stdin.Close()
	killed := time.AfterFunc(endLimit, func() { _ = w.cmd.Process.Kill() })
	for range w.changed { // Wait closes the pipe, so read it to its end first
	}
	err := w.cmd.Wait()
	took := time.Since(began)
	s.report.Watcher.EndMillis = took.Milliseconds()
	left, _ := nvidiaDescriptors(w.cmd.Process.Pid)
	switch {
	case !killed.Stop():
		s.add(name, facts.Differed, "it did not end within %s, so this check killed it", endLimit)
	case err != nil:
		s.add(name, facts.Failed, "%s", lastLines(outcome{stderr: w.stderr.String(), err: err}.summary(), 3))
	case len(left) > 0:
		s.add(name, facts.Differed, "after its end it holds %v", left)
	default:
		s.add(name, facts.Agreed, "after %d ms it is gone, with all its descriptors", took.Milliseconds())
	}
}

// nvidiaDescriptors counts a process's open descriptors of each NVIDIA device node. The names are
// those below /dev. A process that has ended has none.
func nvidiaDescriptors(pid int) (map[string]int, error) {
	folder := filepath.Join("/proc", strconv.Itoa(pid), "fd")
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, fmt.Errorf("list the watcher's descriptors: %w", err)
	}
	found := map[string]int{}
	for _, entry := range entries {
		target, err := os.Readlink(filepath.Join(folder, entry.Name()))
		if err != nil {
			continue // closed since
		}
		if _, node, ok := strings.Cut(target, "/dev/"); ok && strings.HasPrefix(node, "nvidia") {
			found[node]++
		}
	}
	return found, nil
}

// usageAtRest returns the lowest of several samples of a process's usage, because a poll opens
// files for a moment.
func usageAtRest(ctx context.Context, pid int) (facts.Usage, error) {
	lowest, err := usage(pid)
	for range samples {
		wait(ctx, pollInterval/samples)
		now, failed := usage(pid)
		err = errors.Join(err, failed)
		lowest.Descriptors = min(lowest.Descriptors, now.Descriptors)
		lowest.MemoryKiB = min(lowest.MemoryKiB, now.MemoryKiB)
	}
	return lowest, err
}

// usage returns how many descriptors and how much memory a process has.
func usage(pid int) (facts.Usage, error) {
	folder := filepath.Join("/proc", strconv.Itoa(pid))
	entries, err := os.ReadDir(filepath.Join(folder, "fd"))
	if err != nil {
		return facts.Usage{}, fmt.Errorf("count the watcher's descriptors: %w", err)
	}
	used := facts.Usage{Descriptors: len(entries)}
	for line := range strings.SplitSeq(content(folder, "status"), "\n") {
		if size, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			used.MemoryKiB, err = strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(size), " kB"))
		}
	}
	return used, err
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

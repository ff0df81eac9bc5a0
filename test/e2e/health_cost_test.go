package e2e

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	// idleFor is the time over which the idle plugin's processor time is measured. idleShare is the
	// share of one core that the plugin may use meanwhile.
	idleFor   = time.Minute
	idleShare = 0.002
	// manyEvents is the number of XIDs between two measurements of the plugin's resources.
	manyEvents = 10_000
	// userHertz is the number of ticks a second in which /proc/PID/stat counts times. It is the same
	// on every machine that Linux runs containers on.
	userHertz = 100
)

// TestHealthCost measures what watching eight GPUs costs the plugin's processes. It runs only with
// E2E_COST=1, on a machine that does nothing else.
func TestHealthCost(t *testing.T) {
	if os.Getenv("E2E_COST") == "" {
		t.Skip("SKIPPED: what an idle plugin costs is measured on a machine that does nothing else, with E2E_COST=1")
	}
	sim := simulator(t)
	w := start(t, "e2e-cost", sim.Node(h100, "dgx-h100"))
	w.offersShapes(t, h100, 8, 200)
	gpus := slices.Sorted(maps.Keys(w.gpus(t, h100)))

	w.testEvents(t, gpus, manyEvents/10) // now everything exists that the plugin creates only once
	t.Run("watching eight GPUs costs almost nothing", w.testIdle)
	t.Run("ten thousand events leave nothing behind", func(t *testing.T) {
		before := w.processes(t)
		w.testEvents(t, gpus, manyEvents)
		<-time.After(idleFor) // until everything that expires has expired
		after := w.processes(t)
		t.Logf("before: %s", before)
		t.Logf("after:  %s", after)
		if after.watcher != before.watcher {
			t.Errorf("the watcher process was replaced")
		}
		if after.goroutines > before.goroutines+5 || after.files > before.files+5 {
			t.Errorf("the plugin has more open files or goroutines than before")
		}
		if grown := after.memory - before.memory; grown > 16<<20 {
			t.Errorf("the plugin has %d MiB more memory than before", grown>>20)
		}
	})
}

// processes are the resources that the plugin and its watcher process, which listens for NVML
// events, use together.
type processes struct {
	watcher              string
	processors           time.Duration // the time that both processes and their ended children have used
	memory, files, tasks int
	goroutines           int // of the plugin alone
}

func (p processes) String() string {
	return fmt.Sprintf(
		"%.1f MiB resident, %d open files, %d threads; %d goroutines in the plugin",
		float64(p.memory)/(1<<20),
		p.files,
		p.tasks,
		p.goroutines,
	)
}

// processes measures the plugin of the node h100 and its watcher process.
func (w *world) processes(t *testing.T) processes {
	t.Helper()
	plugin := strings.TrimSpace(w.on(t, h100, "pgrep", "-o", "-f", "^/usr/bin/gpu-kubelet-plugin"))
	p := processes{watcher: strings.TrimSpace(w.on(t, h100, "pgrep", "-P", plugin, "-f", " watch$"))}
	for _, pid := range []string{plugin, p.watcher} {
		// The second field is the command's name in parentheses, which may contain spaces.
		stat := w.on(t, h100, "cat", "/proc/"+pid+"/stat")
		fields := strings.Fields(stat[strings.LastIndex(stat, ")")+1:])
		for _, ticks := range fields[11:15] { // utime, stime, cutime, cstime
			p.processors += time.Duration(number(t, ticks)) * time.Second / userHertz
		}
		p.tasks += number(t, fields[17])
		memory, files := w.holds(t, pid)
		p.memory, p.files = p.memory+memory, p.files+files
	}
	for line := range strings.Lines(w.get(t, h100, "metrics")) {
		if rest, is := strings.CutPrefix(line, "go_goroutines "); is {
			p.goroutines = number(t, strings.TrimSpace(rest))
		}
	}
	return p
}

// holds returns the resident memory of a process in bytes, and the number of its open files.
func (w *world) holds(t *testing.T, pid string) (memory, files int) {
	t.Helper()
	for line := range strings.Lines(w.on(t, h100, "cat", "/proc/"+pid+"/status")) {
		if rest, is := strings.CutPrefix(line, "VmRSS:"); is {
			memory = number(t, strings.Fields(rest)[0]) << 10
		}
	}
	return memory, len(strings.Fields(w.on(t, h100, "ls", "/proc/"+pid+"/fd")))
}

func number(t *testing.T, text string) int {
	t.Helper()
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func (w *world) testIdle(t *testing.T) {
	<-time.After(idleFor)
	before, began := w.processes(t), time.Now()
	<-time.After(idleFor)
	after := w.processes(t)
	share := (after.processors - before.processors).Seconds() / time.Since(began).Seconds()
	t.Logf("the plugin and its watcher use %.3f %% of one processor; %s", 100*share, after)
	if share > idleShare {
		t.Errorf("want at most %.1f %% of one processor", 100*idleShare)
	}
}

// testEvents sends n XIDs to the GPUs: application errors, errors that make a GPU unavailable, and
// errors that only degrade it. After a reset no GPU may have a taint that keeps claims away.
func (w *world) testEvents(t *testing.T, gpus []string, n int) {
	t.Helper()
	codes := []string{"31", "95", "43", "144"}
	begun := w.counted(t)
	var all sync.WaitGroup
	for i, gpu := range gpus {
		all.Go(func() {
			for j := range codes {
				w.nvmlsim(t, h100, "xid", busOf(gpu), codes[(i+j)%len(codes)], "--count", strconv.Itoa(n/len(gpus)/len(codes)), "--over", "5s")
			}
		})
	}
	all.Wait()
	eventually(t, 60*time.Second, "all events are counted", func() (bool, string) {
		now := w.counted(t) - begun
		return now >= n-n%(len(gpus)*len(codes)), strconv.Itoa(now)
	})
	for _, gpu := range gpus {
		w.nvmlsim(t, h100, "reset", busOf(gpu))
	}
	eventually(t, 30*time.Second, "no device has a taint that keeps claims away", func() (bool, string) {
		for name, taints := range w.taints(t, h100) {
			for _, taint := range taints {
				if !strings.HasSuffix(taint, ":None") {
					return false, name + " " + taint
				}
			}
		}
		return true, ""
	})
}

// counted returns the number of XIDs that the plugin has counted since its start.
func (w *world) counted(t *testing.T) int {
	t.Helper()
	n := 0
	for line := range strings.Lines(w.get(t, h100, "metrics")) {
		if strings.HasPrefix(line, `gpu_dra_health_events_total{code="xid-`) {
			value, err := strconv.ParseFloat(line[strings.LastIndex(strings.TrimSpace(line), " ")+1:len(line)-1], 64)
			if err != nil {
				t.Fatal(err)
			}
			n += int(value)
		}
	}
	return n
}

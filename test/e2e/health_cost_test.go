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
	// idleFor is how long nothing happens while the plugin's use of processors is measured, idleShare what it may use of one.
	idleFor   = time.Minute
	idleShare = 0.002
	// manyEvents come between two looks at what the plugin holds.
	manyEvents = 10_000
	// userHertz is the unit of times in /proc/PID/stat on every machine that Linux runs containers on.
	userHertz = 100
)

// TestHealthCost: what it costs to listen to eight GPUs, in the plugin's own processes on a node. It measures, and so it is run by hand, alone.
func TestHealthCost(t *testing.T) {
	if os.Getenv("E2E_COST") == "" {
		t.Skip("SKIPPED: what an idle plugin costs is measured on a machine that does nothing else, with E2E_COST=1")
	}
	sim := simulator(t)
	w := start(t, "e2e-cost", sim.Node(h100, "dgx-h100"))
	w.offersShapes(t, h100, 8, 200)
	gpus := slices.Sorted(maps.Keys(w.gpus(t, h100)))

	w.testEvents(t, gpus, manyEvents/10) // what is only made once is there
	t.Run("listening to eight GPUs hardly costs anything", w.testIdle)
	t.Run("ten thousand events leave nothing behind", func(t *testing.T) {
		before := w.processes(t)
		w.testEvents(t, gpus, manyEvents)
		<-time.After(idleFor) // what waited for its time is over
		after := w.processes(t)
		t.Logf("before: %s", before)
		t.Logf("after:  %s", after)
		if after.watcher != before.watcher {
			t.Errorf("who listens is another process")
		}
		if after.goroutines > before.goroutines+5 || after.files > before.files+5 {
			t.Errorf("it holds more than before")
		}
		if grown := after.memory - before.memory; grown > 16<<20 {
			t.Errorf("it has %d MiB more than before", grown>>20)
		}
	})
}

// processes are the plugin and who listens for it.
type processes struct {
	watcher              string
	processors           time.Duration // that they and their ended children have used
	memory, files, tasks int
	goroutines           int // of the plugin alone
}

func (p processes) String() string {
	return fmt.Sprintf("%.1f MiB resident, %d open files, %d threads; %d goroutines in the plugin", float64(p.memory)/(1<<20), p.files, p.tasks, p.goroutines)
}

// processes looks at the plugin of the node.
func (w *world) processes(t *testing.T) processes {
	t.Helper()
	plugin := strings.TrimSpace(w.on(t, h100, "pgrep", "-o", "-f", "^/usr/bin/gpu-kubelet-plugin"))
	p := processes{watcher: strings.TrimSpace(w.on(t, h100, "pgrep", "-P", plugin, "-f", " watch$"))}
	for _, pid := range []string{plugin, p.watcher} {
		// The command's name may have spaces in it, and stands in parentheses.
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

// holds is how many bytes of a process are resident, and how many files it has open.
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
	t.Logf("of one processor they use %.3f %%; %s", 100*share, after)
	if share > idleShare {
		t.Errorf("want at most %.1f %%", 100*idleShare)
	}
}

// testEvents has so many events come on all GPUs: such of applications, such that take a GPU out, and such that only degrade it. In the end all are well.
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
	eventually(t, 30*time.Second, "no GPU is kept from anybody", func() (bool, string) {
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

// counted is how many XIDs the plugin has heard since its start.
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

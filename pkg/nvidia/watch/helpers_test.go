package watch

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// watchInterval is the poll interval in tests.
const watchInterval = 100 * time.Millisecond

// watch is a running watcher of a simulated site, with the signals that it has emitted.
type watch struct {
	*watcher
	t       *testing.T
	signals chan device.Signal
	stop    func() error
}

// watchSite watches the site until the test ends or calls stop. change may adapt the watcher before
// it starts.
func watchSite(s nvidiatest.Site, change func(*watcher)) watch {
	s.T.Helper()
	ctx, cancel := context.WithCancel(s.T.Context())
	w := watch{t: s.T, signals: make(chan device.Signal, 10000)}
	w.watcher = newWatcher(Options{Paths: s.Paths(), Command: s.Role("watch"), Interval: watchInterval}, func(signal device.Signal) {
		select { // the last signals come after the context has ended
		case w.signals <- signal:
			return
		default:
		}
		select {
		case w.signals <- signal:
		case <-ctx.Done():
		}
	})
	if change != nil {
		change(w.watcher)
	}
	done := make(chan error, 1)
	go func() { done <- w.run(ctx) }()
	w.stop = func() error {
		cancel()
		err := <-done
		done <- err
		return err
	}
	s.T.Cleanup(func() { _ = w.stop() })
	return w
}

// await returns the first signal for which the function is returns true. what describes this signal
// in the test's error after a timeout.
func (w watch) await(what string, is func(device.Signal) bool) device.Signal {
	w.t.Helper()
	limit := time.NewTimer(nvidiatest.Patience)
	defer limit.Stop()
	var last device.Signal
	for {
		select {
		case s := <-w.signals:
			if is(s) {
				return s
			}
			last = s
		case <-limit.C:
			w.t.Fatalf("timeout waiting for %s; the last signal was %s", what, formatSignal(last))
		}
	}
}

func formatSignal(s device.Signal) string {
	switch {
	case s.Event != nil:
		return fmt.Sprintf("%+v", *s.Event)
	case s.Condition != nil:
		return fmt.Sprintf("%+v", *s.Condition)
	case s.Watcher != nil:
		return fmt.Sprintf("%+v", *s.Watcher)
	}
	return "none"
}

func (w watch) awaitCondition(of device.Card, is func(device.Condition) bool) device.Condition {
	w.t.Helper()
	return *w.await("a condition of "+of.String(), func(s device.Signal) bool {
		return s.Condition != nil && s.Condition.Card == of && is(*s.Condition)
	}).Condition
}

func (w watch) awaitEvent(of device.Card) device.HealthEvent {
	w.t.Helper()
	return *w.await("an event of "+of.String(), func(s device.Signal) bool { return s.Event != nil && s.Event.Card == of }).Event
}

func (w watch) awaitState(is func(device.WatcherState) bool) device.WatcherState {
	w.t.Helper()
	return *w.await("a state of the watcher", func(s device.Signal) bool { return s.Watcher != nil && is(*s.Watcher) }).Watcher
}

// awaitListening returns when the watcher receives the events of all its cards.
func (w watch) awaitListening() device.WatcherState {
	w.t.Helper()
	return w.awaitState(func(s device.WatcherState) bool { return s.Up && s.Events })
}

func answers(c device.Condition) bool { return c.Reach == device.ReachOK }

// killChild lets the child process with NVML die at its next query, as if the kernel's OOM killer
// killed it.
func (w watch) killChild(s nvidiatest.Site) {
	w.t.Helper()
	s.Fault(state.Fault{Kind: state.FaultKill, GPU: state.AnyGPU}, "nvmlDeviceGetUUID", 1)
}

// recorded returns a change of the watcher with which started lists the directories in /proc of all
// child processes that the watcher has started.
func recorded(t *testing.T) (change func(*watcher), started func() []string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "started")
	started = func() []string {
		pids, err := os.ReadFile(file)
		if err != nil {
			t.Error(err)
		}
		var found []string
		for pid := range strings.FieldsSeq(string(pids)) {
			found = append(found, filepath.Join("/proc", pid))
		}
		return found
	}
	return scripted("echo $$ >> " + file), started
}

// scripted makes the watcher start each child process by a shell that first runs script and then
// executes the child's command.
func scripted(script string) func(*watcher) {
	return func(w *watcher) {
		w.options.Command = append([]string{"sh", "-c", script + `; exec "$0" "$@"`}, w.options.Command...)
	}
}

// newWatchedSite watches the site. It returns Partitions that exclude a card from this watch
// while they change its MIG mode, as in the plugin.
func newWatchedSite(s nvidiatest.Site, change func(*watcher)) (watch, *cut.Partitions) {
	s.T.Helper()
	p := cut.New(s.Paths(), nil, s.Role("partition")...)
	s.T.Cleanup(func() { nvidiatest.StopWorkers(p) })
	return watchSite(s, func(w *watcher) {
		w.options.Partitions = p // for watchers of single cards
		w.coordinateWith(p)
		if change != nil {
			change(w)
		}
	}), p
}

// runLockedWatcher runs a child process of Run with a fake NVML library. The library holds one
// lock during a query, and the query of the first card never returns.
func runLockedWatcher() error {
	var lock sync.Mutex
	cards := nvidiatest.TwoCards()
	library := nvidiatest.NVML(cards...)
	find := library.DeviceGetHandleByPciBusIdFunc
	library.DeviceGetHandleByPciBusIdFunc = func(bus string) (nvml.Device, nvml.Return) {
		lock.Lock()
		if bus == cards[0].Bus {
			select {}
		}
		defer lock.Unlock()
		return find(bus)
	}
	return serve(context.Background(), os.Stdin, os.Stdout, func(nvidia.Paths) (nvml.Interface, error) { return library, nil })
}

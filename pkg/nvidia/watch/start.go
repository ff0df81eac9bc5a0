package watch

import (
	"fmt"
	"maps"
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/exclusion"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/onecard"
)

// oneProcessor limits the Go runtime of a child process, so that it does not wake a thread for each
// small task. Long NVML calls get their own threads anyway.
const oneProcessor = "GOMAXPROCS=1"

// watchChild is a child process of [Run].
type watchChild struct {
	*child.Process[device.Signal]
	coverage *exclusion.Coverage
	replaced bool // another process took over, or this one failed to take over
}

// failure returns the error of a child process that has ended without being killed.
func (c *watchChild) failure() error {
	return fmt.Errorf("the watcher process has ended (%w)%s", c.Failure(), c.Stderr())
}

// start starts a watcher process for all cards of this watcher that are not excluded. If none is
// left, it returns errExcluded.
func (w *watcher) start() (*watchChild, error) {
	if !w.excluded.LeavesAny(w.cards()) {
		return nil, errExcluded
	}
	c, ok := w.excluded.Begin(w.only)
	if !ok {
		return nil, errExcluded
	}
	order := watchOrder{
		Paths: w.options.Paths, Interval: w.options.Interval, Wedged: w.wedged,
		Except: append(slices.Clone(w.apart), slices.Sorted(maps.Keys(c.Except))...),
	}
	if w.only != "" {
		order.Only = []device.PCIAddress{w.only}
	}
	process, err := child.Start[device.Signal](
		child.Command{Args: w.options.Command, Env: []string{oneProcessor}, Hidden: w.hiddenNodes(c)}, order)
	if err != nil {
		w.excluded.Ended(c)
		return nil, fmt.Errorf("start the watcher process: %w", err)
	}
	w.excluded.Started(c, process.PID)
	go func() {
		select {
		case <-process.Killed:
			w.excluded.Killed(c)
		case <-process.Gone:
		}
		<-process.Gone
		w.excluded.Ended(c)
	}()
	started := &watchChild{Process: process, coverage: c}
	w.children = append(w.children, started)
	return started, nil
}

// cards lists the cards on the PCI bus that belong to this watcher, including those that are
// excluded now.
func (w *watcher) cards() []device.PCIAddress {
	if w.only != "" {
		return []device.PCIAddress{w.only}
	}
	ours, _ := watchOrder{Paths: w.options.Paths, Except: w.apart}.addresses()
	return ours
}

// hiddenNodes lists the device nodes of the cards that c excludes, and of those that leave NVIDIA's
// driver. They must be hidden, because NVML may open every GPU whose device node it can open. The
// kernel lets a card leave only when no process has it open.
func (w *watcher) hiddenNodes(c *exclusion.Coverage) []string {
	hidden := map[string]bool{}
	for _, e := range c.Except {
		hidden[fmt.Sprintf("nvidia%d", e.Minor)] = true
	}
	for _, a := range w.cards() {
		// The kernel unlinks the driver first. The driver then waits, and lists the card meanwhile.
		if host.Driver(w.options.Paths.Sysfs, a) != "" {
			continue
		}
		if minor, err := host.Minor(w.options.Paths, a); err == nil {
			hidden[fmt.Sprintf("nvidia%d", minor)] = true
		}
	}
	if len(hidden) == 0 {
		return nil
	}
	return onecard.Others(w.options.Paths.DeviceRoot(), func(name string) bool { return !hidden[name] })
}

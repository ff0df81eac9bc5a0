package watch

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/wake"
)

// Command is the plugin's internal subcommand that runs [Serve].
const Command = "watch"

const (
	// initLimit is how long NVML may take to start. It is long because the start wakes all GPUs.
	initLimit = time.Minute
	// minPollInterval is the shortest time between two polls of a card, even if events ask for more
	// polls.
	minPollInterval = 500 * time.Millisecond
)

// watchOrder tells a child process of Run what to do.
type watchOrder struct {
	Paths    nvidia.Paths  `json:"paths"`
	Interval time.Duration `json:"interval"`
	// Wedged is how long a card may take for one query before it counts as hung.
	Wedged time.Duration `json:"wedged"`
	// If Only is not empty, the child watches only these cards. It never watches the cards in
	// Except.
	Only   []device.PCIAddress `json:"only,omitempty"`
	Except []device.PCIAddress `json:"except,omitempty"`
}

// Serve runs in the child process of [Run]. It reads its watchOrder from in and writes
// [device.Signal] values to out, as lines of JSON. It ends when in is closed. It does not shut down
// NVML, because that may hang. The end of the process closes NVML.
func Serve(ctx context.Context, in io.Reader, out io.Writer) error {
	return serve(ctx, in, out, nvmlx.Open)
}

func serve(ctx context.Context, in io.Reader, out io.Writer, open func(nvidia.Paths) (nvml.Interface, error)) error {
	order, ctx, cancel, err := child.Order[watchOrder](ctx, in)
	if err != nil {
		return fmt.Errorf("read what to watch: %w", err)
	}
	defer cancel()
	order.Paths = order.Paths.WithDefaults()
	known := order.incarnations() // before NVML looks, so that a card that comes meanwhile counts as new
	library, err := nvmlx.Bounded(ctx, initLimit, "nvmlInit", func() (nvml.Interface, error) { return open(order.Paths) })
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	w := &watchServer{
		order: order, lib: library, encoder: json.NewEncoder(out), cancel: cancel, opens: nvmlx.NewPendingOpens(),
		stateChanged: wake.New(), known: known,
		cards: map[device.PCIAddress]*watchedGPU{}, foreign: map[device.PCIAddress]bool{},
	}
	w.run(ctx)
	w.sending.Lock() // for good, so that the end of the process cuts no line
	return w.sendError
}

// watchServer watches the GPUs in the child process. Only the goroutine of run uses cards, foreign,
// known and changed.
type watchServer struct {
	order watchOrder
	began time.Time
	lib   nvml.Interface
	// stateChanged gets a value when a card starts or stops delivering events.
	stateChanged wake.Signal
	cards        map[device.PCIAddress]*watchedGPU
	// foreign are the cards bound to another kernel driver for which a signal with ReachNotOurs was
	// already sent.
	foreign map[device.PCIAddress]bool
	// known are the incarnations of the cards that NVIDIA's driver listed when NVML started.
	known map[device.PCIAddress]uint64
	// changed is the last card whose incarnation changed, see [device.WatcherState].
	changed device.PCIAddress
	// opens counts the cards that have not answered this child yet.
	opens *nvmlx.PendingOpens

	sending   sync.Mutex // held while a signal is sent
	encoder   *json.Encoder
	sendError error
	cancel    context.CancelFunc // ends run
}

// send sends a signal to the parent, as a line of JSON. While the parent does not read, send
// blocks, and further events wait in NVML. If the parent is gone, send fails and ends run.
func (w *watchServer) send(s device.Signal) {
	w.sending.Lock()
	defer w.sending.Unlock()
	if err := w.encoder.Encode(s); err != nil {
		w.sendError = fmt.Errorf("send a signal: %w", err)
		w.cancel()
	}
}

// run watches each card. It reports the watcher's state at each interval, as a heartbeat, and when
// the state changes.
func (w *watchServer) run(ctx context.Context) {
	w.began = time.Now()
	tick := time.NewTicker(w.order.Interval)
	defer tick.Stop()
	ours, foreign := w.order.addresses()
	for _, a := range ours {
		w.watch(ctx, a)
	}
	w.dropForeign(foreign)
	for {
		w.send(device.Signal{Watcher: w.state()})
		select {
		case <-ctx.Done():
			return
		case <-w.stateChanged:
		case <-tick.C:
			w.compareCards(ctx)
		}
	}
}

// addresses lists the cards on the PCI bus that the child may watch. ours are bound to NVIDIA's
// driver or to none, foreign to another driver.
func (o watchOrder) addresses() (ours, foreign []device.PCIAddress) {
	onBus, _ := host.GPUs(o.Paths.Sysfs) // the plugin does not start without a readable bus
	for _, a := range onBus {
		if len(o.Only) > 0 && !slices.Contains(o.Only, a) || slices.Contains(o.Except, a) {
			continue
		}
		if driver := host.Driver(o.Paths.Sysfs, a); driver != "" && driver != host.NVIDIADriver {
			foreign = append(foreign, a)
		} else {
			ours = append(ours, a)
		}
	}
	return ours, foreign
}

// incarnations returns the cards that NVIDIA's driver lists now.
func (o watchOrder) incarnations() map[device.PCIAddress]uint64 {
	found := map[device.PCIAddress]uint64{}
	ours, _ := o.addresses()
	for _, a := range ours {
		if i := host.Incarnation(o.Paths, a); i != 0 {
			found[a] = i
		}
	}
	return found
}

// dropForeign stops watching the cards that are now bound to another kernel driver, and reports
// each of them once as ReachNotOurs.
func (w *watchServer) dropForeign(foreign []device.PCIAddress) {
	maps.DeleteFunc(w.foreign, func(a device.PCIAddress, _ bool) bool { return !slices.Contains(foreign, a) })
	for _, a := range foreign {
		if w.foreign[a] {
			continue
		}
		w.foreign[a] = true
		if c := w.cards[a]; c != nil {
			c.stop()
			delete(w.cards, a)
		}
		w.send(device.Signal{Condition: &device.Condition{
			Card: device.Card{PCIAddress: a}, Reach: device.ReachNotOurs, At: time.Now(),
		}})
	}
}

// compareCards looks for cards that came to NVIDIA's driver or began to leave it since NVML
// started. NVML in this process does not know the former. It has the latter open, and the kernel
// may wait until it closes them. A card that has left the bus stays in w.cards and counts as lost.
func (w *watchServer) compareCards(ctx context.Context) {
	ours, foreign := w.order.addresses()
	w.dropForeign(foreign)
	maps.DeleteFunc(w.known, func(a device.PCIAddress, _ uint64) bool { return !slices.Contains(ours, a) })
	for _, a := range ours {
		if host.Incarnation(w.order.Paths, a) != w.known[a] {
			w.changed = a
		}
		if w.cards[a] == nil && host.Driver(w.order.Paths.Sysfs, a) == "" {
			w.watch(ctx, a) // lost, until a driver has it
		}
	}
}

// state returns the watcher's state, with an error that names the cards that deliver no events. It
// leaves out cards that do not answer polls, because their conditions already say so.
func (w *watchServer) state() *device.WatcherState {
	s := &device.WatcherState{Up: true, Events: true, ChangedGPU: w.changed, At: time.Now()}
	var silent []string
	for _, a := range slices.Sorted(maps.Keys(w.cards)) {
		c := w.cards[a]
		reach := c.reach()
		if why := c.events.whyNoEvents(); why != "" && (reach == device.ReachOK || reach == "") {
			silent = append(silent, a.WholeName()+": "+why)
		}
	}
	if len(silent) > 0 {
		s.Events, s.Error = false, strings.Join(silent, "; ")
	}
	return s
}

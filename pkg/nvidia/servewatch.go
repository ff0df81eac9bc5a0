package nvidia

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// WatchCommand is the plugin's subcommand that must call [ServeWatch]. It is not meant for people.
const WatchCommand = "watch"

const (
	// initLimit is how long NVML may take to start: it wakes all GPUs.
	initLimit = time.Minute
	// betweenKicks is how soon a card is asked again at the earliest, however many events come.
	betweenKicks = 500 * time.Millisecond
)

// nvidiaDriver is the name under which the kernel module binds its cards.
const nvidiaDriver = "nvidia"

// watchOrder says what the watcher's child is to watch, and how.
type watchOrder struct {
	Paths    Paths         `json:"paths"`
	Interval time.Duration `json:"interval"`
	// Wedged is how long a card may take for one question.
	Wedged time.Duration `json:"wedged"`
	// Only and Except choose the cards. They are empty for all.
	Only   []device.PCIAddress `json:"only,omitempty"`
	Except []device.PCIAddress `json:"except,omitempty"`
}

// ServeWatch is the child's side of [Watch]: it reads what to watch from in and writes [device.Signal] values to out, as lines of JSON. It ends when in
// ends, or with an error when NVML has to be taken anew. NVML is not given back in order: that may hang, and the end of the process does it.
func ServeWatch(ctx context.Context, in io.Reader, out io.Writer) error {
	return serveWatch(ctx, in, out, openLibrary)
}

func serveWatch(ctx context.Context, in io.Reader, out io.Writer, open func(Paths) (nvml.Interface, error)) error {
	decoder := json.NewDecoder(in)
	var order watchOrder
	if err := decoder.Decode(&order); err != nil {
		return fmt.Errorf("read what to watch: %w", err)
	}
	order.Paths = order.Paths.withDefaults()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, in)
		cancel()
	}()
	library, err := bounded(ctx, initLimit, "nvmlInit", func() (nvml.Interface, error) { return open(order.Paths) })
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	w := &watching{order: order, lib: library, outbox: newOutbox(), restated: make(chan struct{}, 1), back: make(chan device.PCIAddress, 1), cards: map[device.PCIAddress]*watched{}, others: map[device.PCIAddress]bool{}, opening: newOpenings()}
	sent := make(chan error, 1)
	go func() {
		sent <- w.outbox.send(ctx, out)
		cancel()
	}()
	err = w.run(ctx)
	cancel()
	return errors.Join(<-sent, err)
}

// watching is the child at work.
type watching struct {
	order  watchOrder
	began  time.Time
	lib    nvml.Interface
	outbox *outbox
	// restated is told when it may have changed who is listened to.
	restated chan struct{}
	cards    map[device.PCIAddress]*watched // the main loop's
	bus      pciBus                         // the main loop's
	// others are the cards that other kernel drivers have, as far as that was told; the main loop's.
	others map[device.PCIAddress]bool
	// back is told of a card that was off the bus and that NVML does not know now that it is there again.
	back chan device.PCIAddress
	// opening are the cards that have not answered this child yet.
	opening *openings
}

// run starts a watch of each card, and says how well is listened: at each interval, which also shows that the child lives, and when it changes.
func (w *watching) run(ctx context.Context) error {
	w.began = time.Now()
	tick := time.NewTicker(w.order.Interval)
	defer tick.Stop()
	ours, others := w.addresses()
	for _, a := range ours {
		w.watch(ctx, a)
	}
	w.leave(ctx, others)
	for {
		w.outbox.add(ctx, device.Signal{Watcher: w.state()})
		select {
		case <-ctx.Done():
			return nil
		case <-w.restated:
		case a := <-w.back:
			return anew(a)
		case <-tick.C:
			if err := w.newcomers(ctx); err != nil {
				return err
			}
		}
	}
}

// addresses are the cards on the PCI bus that are the NVIDIA driver's, or nobody's, and those that other drivers have. Where the bus cannot be read they are
// those that NVML lists.
func (w *watching) addresses() (ours, others []device.PCIAddress) {
	onBus, err := w.bus.gpus(w.order.Paths.Sysfs, time.Now())
	if err != nil || len(onBus) == 0 {
		onBus = w.listed()
	}
	for _, a := range onBus {
		if len(w.order.Only) > 0 && !slices.Contains(w.order.Only, a) || slices.Contains(w.order.Except, a) {
			continue
		}
		if driver := pciDriver(w.order.Paths.Sysfs, a); driver != "" && driver != nvidiaDriver {
			others = append(others, a)
		} else {
			ours = append(ours, a)
		}
	}
	return ours, others
}

// leave lets go of the cards that somebody has given to other drivers, and says so once.
func (w *watching) leave(ctx context.Context, others []device.PCIAddress) {
	for a := range w.others {
		if !slices.Contains(others, a) {
			delete(w.others, a)
		}
	}
	for _, a := range others {
		if w.others[a] {
			continue
		}
		w.others[a] = true
		if c := w.cards[a]; c != nil {
			c.dismiss()
			delete(w.cards, a)
		}
		w.outbox.add(ctx, device.Signal{Condition: &device.Condition{Card: device.Card{PCIAddress: a}, Reach: device.ReachNotOurs, At: time.Now()}})
	}
}

func (w *watching) listed() []device.PCIAddress {
	count, _ := w.lib.DeviceGetCount()
	var found []device.PCIAddress
	for i := range count {
		if handle, ret := w.lib.DeviceGetHandleByIndex(i); ret == nvml.SUCCESS {
			if info, ret := handle.GetPciInfo(); ret == nvml.SUCCESS {
				if a, err := device.ParsePCIAddress(cString(info.BusId[:])); err == nil {
					found = append(found, a)
				}
			}
		}
	}
	return found
}

// newcomers watches the cards that have come. NVML may list only those that were there when it was started: then it has to be taken anew, which is the
// error. A card that was there and is not listed is no reason for that.
func (w *watching) newcomers(ctx context.Context) error {
	ours, others := w.addresses()
	w.leave(ctx, others)
	for _, a := range ours {
		if w.cards[a] != nil {
			continue
		}
		listed, err := bounded(ctx, w.order.Wedged, "NVML", func() (bool, error) {
			_, ret := w.lib.DeviceGetHandleByPciBusId(busID(a))
			return !isAbsent(ret), nil
		})
		if err == nil && !listed {
			return anew(a)
		}
		w.watch(ctx, a)
	}
	return nil
}

func anew(a device.PCIAddress) error {
	return fmt.Errorf("the GPU at %s has come, and NVML has to be taken anew to see it", a)
}

// state says who is listened to. Events of a card that does not answer are not missed more than the card.
func (w *watching) state() *device.WatcherState {
	s := &device.WatcherState{Up: true, Events: true, At: time.Now()}
	var deaf []string
	for _, a := range slices.Sorted(maps.Keys(w.cards)) {
		c := w.cards[a]
		reach := c.reach()
		if why := c.listener.deaf(); why != "" && (reach == device.ReachOK || reach == "") {
			deaf = append(deaf, a.WholeName()+": "+why)
		}
	}
	if len(deaf) > 0 {
		s.Events, s.Error = false, strings.Join(deaf, "; ")
	}
	return s
}

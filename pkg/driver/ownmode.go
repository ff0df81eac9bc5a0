package driver

import (
	"context"
	"errors"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	// A MIG mode that cannot be turned off, mostly because something has the GPU open, is tried
	// again at first so soon, and in the end so seldom: each try holds the GPU up and replaces the
	// watcher.
	modeRetryFirst = 10 * time.Second
	modeRetryMost  = 10 * time.Minute
	// modesLimit bounds how long an uninstallation waits for GPUs to be whole again.
	modesLimit = 10 * time.Second
)

// modes turns off MIG modes that cuts of ours turned on and that nothing needs any more.
type modes struct {
	turnOff func(context.Context, device.GPU) (off bool, _ error)
	// changed has the inventory look again.
	changed func()

	mu    sync.Mutex
	retry map[string]modeRetry
}

type modeRetry struct {
	at    time.Time
	pause time.Duration
	err   error
}

// Off turns off what can be turned off, on each GPU by itself. One that failed is left alone for a
// while.
func (m *modes) Off(ctx context.Context, gpus []device.GPU) error {
	var wg sync.WaitGroup
	errs := make([]error, len(gpus))
	for i, g := range gpus {
		if due, last := m.due(g.WholeName()); !due {
			errs[i] = last
			continue
		}
		wg.Go(func() {
			off, err := m.turnOff(ctx, g)
			if m.note(g.WholeName(), err); off {
				m.changed()
			}
			errs[i] = err
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// due says whether a GPU is to be tried now, and how the last try failed.
func (m *modes) due(gpu string) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.retry[gpu]
	return !time.Now().Before(r.at), r.err
}

func (m *modes) note(gpu string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err == nil {
		delete(m.retry, gpu)
		return
	}
	pause := max(modeRetryFirst, min(2*m.retry[gpu].pause, modeRetryMost))
	if m.retry == nil {
		m.retry = map[string]modeRetry{}
	}
	m.retry[gpu] = modeRetry{time.Now().Add(pause), pause, err}
}

// modesOff leaves no GPU in a MIG mode of ours when the driver is uninstalled. One that is in use
// keeps its mode, which does not keep the rest from being removed.
func (d *Driver) modesOff(ctx context.Context) {
	done, ok := d.release.Use()
	defer done()
	if !ok {
		return // the hardware is not ours to open
	}
	working, cancel := context.WithTimeout(ctx, modesLimit)
	defer cancel()
	var gpus []device.GPU
	for _, g := range d.preparer.Hardware.Snapshot().Node.GPUs {
		if g.MIG != nil {
			gpus = append(gpus, g.GPU)
		}
	}
	m := &modes{turnOff: d.preparer.ModeOff, changed: func() {}}
	stays := m.Off(working, gpus)
	if stays == nil {
		return
	}
	logger := klog.FromContext(ctx)
	logger.Error(stays, "Failed to turn off MIG mode; turn it off with nvidia-smi -i ADDRESS -mig 0")
	message := "The driver was uninstalled, and " + stays.Error() + "; turn it off with nvidia-smi -i ADDRESS -mig 0"
	if err := d.events.warnLast(ctx, d.client, "MIGModeStays", message); err != nil {
		logger.Error(err, "Failed to write the Event MIGModeStays")
	}
}

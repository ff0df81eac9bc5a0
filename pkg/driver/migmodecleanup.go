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
	// modeRetryFirst and modeRetryMax are the shortest and the longest pause after a failed attempt to
	// switch off MIG mode. The pause doubles with each failure, because each attempt blocks the GPU
	// and restarts the health watcher. Most attempts fail because a process has the GPU open.
	modeRetryFirst = 10 * time.Second
	modeRetryMax   = 10 * time.Minute
	// migModesTimeout limits how long an uninstallation waits for GPUs to leave MIG mode.
	migModesTimeout = 10 * time.Second
)

// migModeCleaner switches off the MIG mode of GPUs if the driver had switched it on and no
// partition needs it any more.
type migModeCleaner struct {
	switchOff func(context.Context, device.GPU) (off bool, _ error)
	// requestScan requests a scan from the inventory after a GPU has left MIG mode.
	requestScan func()

	mu    sync.Mutex
	retry map[string]modeRetry
}

type modeRetry struct {
	at    time.Time
	pause time.Duration
	err   error
}

// Clean switches off the MIG mode of the GPUs in parallel, and returns the errors of all GPUs. A
// GPU whose last attempt failed a short time ago is skipped, and the error of that attempt is
// returned again.
func (m *migModeCleaner) Clean(ctx context.Context, gpus []device.GPU) error {
	var wg sync.WaitGroup
	errs := make([]error, len(gpus))
	for i, g := range gpus {
		if due, last := m.due(g.WholeName()); !due {
			errs[i] = last
			continue
		}
		wg.Go(func() {
			off, err := m.switchOff(ctx, g)
			if m.recordResult(g.WholeName(), err); off {
				m.requestScan()
			}
			errs[i] = err
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// due returns true if the pause after the GPU's last failed attempt is over. The error is that of
// the last attempt, or nil if there was no failure.
func (m *migModeCleaner) due(gpu string) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.retry[gpu]
	return !time.Now().Before(r.at), r.err
}

func (m *migModeCleaner) recordResult(gpu string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err == nil {
		delete(m.retry, gpu)
		return
	}
	pause := max(modeRetryFirst, min(2*m.retry[gpu].pause, modeRetryMax))
	if m.retry == nil {
		m.retry = map[string]modeRetry{}
	}
	m.retry[gpu] = modeRetry{time.Now().Add(pause), pause, err}
}

// switchOffMIGModes switches off MIG mode on the GPUs where the driver had switched it on. It runs
// when the driver is uninstalled. If a GPU is in use, it stays in MIG mode, and an Event asks the
// admin to switch the mode off.
func (d *Driver) switchOffMIGModes(ctx context.Context) {
	done, ok := d.quiesce.Use()
	defer done()
	if !ok {
		return // the hardware is released for a driver upgrade
	}
	working, cancel := context.WithTimeout(ctx, migModesTimeout)
	defer cancel()
	var gpus []device.GPU
	for _, g := range d.preparer.Hardware.Snapshot().Node.GPUs {
		if g.MIG != nil {
			gpus = append(gpus, g.GPU)
		}
	}
	m := &migModeCleaner{switchOff: d.preparer.DisableUnusedMIGMode, requestScan: func() {}}
	failed := m.Clean(working, gpus)
	if failed == nil {
		return
	}
	logger := klog.FromContext(ctx)
	logger.Error(failed, "Failed to switch off MIG mode; switch it off with nvidia-smi -i ADDRESS -mig 0")
	message := "The driver was uninstalled, and " + failed.Error() + "; switch it off with nvidia-smi -i ADDRESS -mig 0"
	if err := d.events.WarnNow(ctx, d.client, "MIGModeStays", message); err != nil {
		logger.Error(err, "Failed to write the Event MIGModeStays")
	}
}

package reconciler

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	// modeRetryFirst and modeRetryMax are the shortest and the longest pause after a failed attempt to
	// switch off MIG mode. The pause doubles with each failure, because each attempt blocks the GPU
	// and restarts the health watcher. Most attempts fail because a process has the GPU open.
	modeRetryFirst = 10 * time.Second
	modeRetryMax   = 10 * time.Minute
)

// modeCleaner switches off the MIG mode of GPUs if the driver had switched it on and no partition
// needs it any more.
type modeCleaner struct {
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
func (m *modeCleaner) Clean(ctx context.Context, gpus []device.GPU) error {
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
func (m *modeCleaner) due(gpu string) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.retry[gpu]
	return !time.Now().Before(r.at), r.err
}

func (m *modeCleaner) recordResult(gpu string, err error) {
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

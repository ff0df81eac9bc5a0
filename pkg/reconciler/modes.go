package reconciler

import (
	"context"
	"errors"
	"sync"
	"time"

	"k8s.io/client-go/util/flowcontrol"

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
// needs it any more. It is not safe for concurrent use.
type modeCleaner struct {
	switchOff func(context.Context, device.GPU) (off bool, _ error)
	// requestScan requests a scan from the inventory after a GPU has left MIG mode.
	requestScan func()
	// retries has the pause of each GPU whose last attempt failed, by name.
	retries *flowcontrol.Backoff
	// last has the error of each GPU's last attempt.
	last map[string]error
}

func newModeCleaner(switchOff func(context.Context, device.GPU) (off bool, _ error), requestScan func()) *modeCleaner {
	return &modeCleaner{switchOff, requestScan, flowcontrol.NewBackOff(modeRetryFirst, modeRetryMax), map[string]error{}}
}

// Clean switches off the MIG mode of the GPUs in parallel, and returns the errors of all GPUs. A
// GPU whose last attempt failed a short time ago is skipped, and the error of that attempt is
// returned again.
func (m *modeCleaner) Clean(ctx context.Context, gpus []device.GPU) error {
	var wg sync.WaitGroup
	errs := make([]error, len(gpus))
	for i, g := range gpus {
		name := g.WholeName()
		if m.retries.IsInBackOffSinceUpdate(name, time.Now()) {
			errs[i] = m.last[name]
			continue
		}
		wg.Go(func() {
			off, err := m.switchOff(ctx, g)
			if off {
				m.requestScan()
			}
			if err != nil {
				m.retries.Next(name, time.Now())
			} else {
				m.retries.DeleteEntry(name)
			}
			errs[i] = err
		})
	}
	wg.Wait()
	clear(m.last)
	for i, g := range gpus {
		m.last[g.WholeName()] = errs[i]
	}
	return errors.Join(errs...)
}

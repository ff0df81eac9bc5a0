package reconcile

import (
	"errors"
	"sync"
)

// parallel runs functions concurrently. wait returns their joined errors.
type parallel struct {
	wg   sync.WaitGroup
	mu   sync.Mutex
	errs []error
}

func (t *parallel) start(work func() error) {
	t.wg.Go(func() {
		err := work()
		t.mu.Lock()
		defer t.mu.Unlock()
		t.errs = append(t.errs, err)
	})
}

func (t *parallel) wait() error {
	t.wg.Wait()
	return errors.Join(t.errs...)
}

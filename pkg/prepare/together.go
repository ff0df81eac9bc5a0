package prepare

import (
	"errors"
	"sync"
)

// together does things side by side and joins their errors.
type together struct {
	wg   sync.WaitGroup
	mu   sync.Mutex
	errs []error
}

func (t *together) do(work func() error) {
	t.wg.Go(func() {
		err := work()
		t.mu.Lock()
		defer t.mu.Unlock()
		t.errs = append(t.errs, err)
	})
}

func (t *together) wait() error {
	t.wg.Wait()
	return errors.Join(t.errs...)
}

package reconcile

import (
	"errors"
	"sync"
)

// inParallel runs the functions concurrently and returns their joined errors.
func inParallel(work []func() error) error {
	var wg sync.WaitGroup
	errs := make([]error, len(work))
	for i, f := range work {
		wg.Go(func() { errs[i] = f() })
	}
	wg.Wait()
	return errors.Join(errs...)
}

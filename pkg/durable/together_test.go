package durable_test

import (
	"errors"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable/durabletest"
)

// countingDisk takes a step for each wait.
type countingDisk struct {
	*durabletest.Disk

	step  chan error
	waits int
}

func (d *countingDisk) SyncDir(string) error {
	d.waits++
	return <-d.step
}

func TestWritesIntoOneDirectoryWaitForItTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := &countingDisk{Disk: durabletest.New(), step: make(chan error)}
		together := durable.NewTogether(disk)
		errs := make([]error, 3)
		var all sync.WaitGroup
		for i, name := range []string{"/state/a", "/state/b", "/state/c"} {
			all.Go(func() { errs[i] = durable.Replace(together, name, []byte("content")) })
			synctest.Wait()
		}
		disk.step <- nil // of the first, which began before the others had written
		disk.step <- syscall.EIO
		all.Wait()
		if disk.waits != 2 || errs[0] != nil || !errors.Is(errs[1], syscall.EIO) || !errors.Is(errs[2], syscall.EIO) {
			t.Errorf("%d waits, %v", disk.waits, errs)
		}
	})
}

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

// countingDisk is a fake disk that counts syncs of directories. Each sync waits until the test
// sends its result to the channel step.
type countingDisk struct {
	*durabletest.Disk

	step  chan error
	waits int
}

func (d *countingDisk) SyncDir(string) error {
	d.waits++
	return <-d.step
}

func TestGroupSyncSharesDirectorySyncs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := &countingDisk{Disk: durabletest.New(), step: make(chan error)}
		group := durable.NewGroupSync(disk)
		errs := make([]error, 3)
		var all sync.WaitGroup
		for i, name := range []string{"/state/a", "/state/b", "/state/c"} {
			all.Go(func() { errs[i] = durable.Replace(group, name, []byte("content")) })
			synctest.Wait()
		}
		disk.step <- nil // result of the first sync, which began before the other files were written
		disk.step <- syscall.EIO
		all.Wait()
		if disk.waits != 2 || errs[0] != nil || !errors.Is(errs[1], syscall.EIO) || !errors.Is(errs[2], syscall.EIO) {
			t.Errorf("%d waits, %v", disk.waits, errs)
		}
	})
}

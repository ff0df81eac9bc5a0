package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// LockCard locks a card, so that two workers never change the same card at once. The lock is on the
// card's sysfs directory, which every plugin instance on the node sees. A worker that was killed
// inside the driver keeps its lock until the driver returns. So the next worker sees the result of
// that call.
//
// The returned file holds the lock until it is closed. It is nil if the card is gone.
func LockCard(p nvidia.Paths, a device.PCIAddress) (*os.File, error) {
	dir, err := os.Open(filepath.Join(p.Sysfs, "bus", "pci", "devices", string(a)))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // NVML reports that the card is gone
	}
	if err != nil {
		return nil, fmt.Errorf("lock the GPU: %w", err)
	}
	for {
		err = unix.Flock(int(dir.Fd()), unix.LOCK_EX)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		_ = dir.Close()
		return nil, fmt.Errorf("lock the GPU: %w", &os.PathError{Op: "flock", Path: dir.Name(), Err: err})
	}
	return dir, nil
}

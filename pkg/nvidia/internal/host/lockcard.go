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

// LockCard locks a card, so that two workers never change the same card at once. The lock is on a
// file in the plugin's state directory, which every plugin instance on the node sees and no other
// user can open. A worker that was killed inside the driver keeps its lock until the driver
// returns. So the next worker sees the result of that call.
//
// The returned file holds the lock until it is closed. A card that is gone can be locked too.
func LockCard(p nvidia.Paths, a device.PCIAddress) (*os.File, error) {
	if p.State == "" {
		return nil, errors.New("lock the GPU: the order names no directory for its lock")
	}
	path := filepath.Join(p.State, a.WholeName()+".lock")
	for {
		file, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
		if err != nil {
			return nil, fmt.Errorf("lock the GPU: %w", err)
		}
		inPlace, err := lockInPlace(file)
		if err == nil && inPlace {
			return file, nil
		}
		_ = file.Close()
		if err != nil {
			return nil, fmt.Errorf("lock the GPU: %w", err)
		}
	}
}

// lockInPlace waits for the lock on the file. If the file was removed meanwhile, inPlace is false:
// other workers lock a new one.
func lockInPlace(file *os.File) (inPlace bool, err error) {
	for {
		err = unix.Flock(int(file.Fd()), unix.LOCK_EX)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return false, &os.PathError{Op: "flock", Path: file.Name(), Err: err}
	}
	locked, err := file.Stat()
	if err != nil {
		return false, err
	}
	named, err := os.Lstat(file.Name())
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(locked, named), err
}

package nvidia

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// PartitionCommand is the plugin's internal subcommand that runs [ServePartitions].
const PartitionCommand = "partition"

// ServePartitions runs in the worker process of [Partitions]. It reads [Paths] and then requests
// from in, and writes an answer to each request to out, as lines of JSON. It opens NVML with the
// first request and keeps it open. It ends when in is closed, even during a request: a worker whose
// parent died must not go on changing GPUs.
func ServePartitions(ctx context.Context, in io.Reader, out io.Writer) error {
	return servePartitions(ctx, in, out, openLibrary)
}

func servePartitions(ctx context.Context, in io.Reader, out io.Writer, open func(Paths) (nvml.Interface, error)) error {
	decoder := json.NewDecoder(in)
	var p Paths
	if err := decoder.Decode(&p); err != nil {
		return fmt.Errorf("read the paths of the host: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	requests := make(chan request)
	go func() {
		defer cancel()
		for {
			var r request
			if decoder.Decode(&r) != nil {
				return
			}
			select {
			case requests <- r:
			case <-ctx.Done():
				return
			}
		}
	}()
	h := &requestHandler{paths: p.withDefaults(), open: open}
	encoder := json.NewEncoder(out)
	for {
		select {
		case <-ctx.Done():
			return nil
		case r := <-requests:
			done := make(chan answer, 1)
			go func() { done <- h.do(r) }()
			select {
			case <-ctx.Done():
				return nil
			case a := <-done:
				if err := encoder.Encode(a); err != nil {
					return fmt.Errorf("answer: %w", err)
				}
			}
		}
	}
}

// requestHandler carries out the requests to a worker one after another. The first request opens
// NVML.
type requestHandler struct {
	paths       Paths
	open        func(Paths) (nvml.Interface, error)
	partitioner *partitioner
}

func (h *requestHandler) do(r request) answer {
	lock, err := lockCard(h.paths, r.Card.PCIAddress)
	if err != nil {
		return answer{Error: r.fail(CodeOther, "%v", err)}
	}
	defer func() { _ = lock.Close() }() // nothing was written, and closing nil is allowed
	if h.partitioner == nil {
		library, err := h.open(h.paths)
		if err != nil {
			code := CodeOther
			if !moduleLoaded(h.paths) {
				code = CodeNoDriver
			}
			return answer{Error: r.fail(code, "%v", err)}
		}
		h.partitioner = &partitioner{migReader: newMIGReader(h.paths, library, func() {})}
	}
	h.partitioner.lock = lock
	return h.partitioner.do(r)
}

// openLibrary loads the driver's NVML library and initializes it.
func openLibrary(p Paths) (nvml.Interface, error) {
	path, err := findLibrary(p)
	if err != nil {
		return nil, err
	}
	s := scanner{paths: p, lib: nvml.New(nvml.WithLibraryPath(path)), path: path}
	return s.lib, s.init()
}

// lockCard locks a card, so that two workers never change the same card at once. The lock is on the
// card's sysfs directory, which every plugin instance on the node sees. A worker that was killed
// inside the driver keeps its lock until the driver returns. So the next worker sees the result of
// that call.
//
// The returned file holds the lock until it is closed. It is nil if the card is gone.
func lockCard(p Paths, a device.PCIAddress) (*os.File, error) {
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

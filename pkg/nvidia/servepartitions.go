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

// PartitionCommand is the plugin's subcommand that must call [ServePartitions]. It is not meant for people.
const PartitionCommand = "partition"

// ServePartitions is the worker's side of [Partitions]: it reads the [Paths] and then requests from in, and writes an answer to each to out, all as lines
// of JSON. It takes NVML with the first request and holds it until it ends, which is when in ends: at once, even in the middle of a call, because
// a worker must not go on cutting when nobody knows of it.
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
	h := &hands{paths: p.withDefaults(), open: open}
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

// hands carry out requests, one after another, with NVML taken at the first.
type hands struct {
	paths  Paths
	open   func(Paths) (nvml.Interface, error)
	cutter *cutter
}

func (h *hands) do(r request) answer {
	lock, err := lockCard(h.paths, r.Card.PCIAddress)
	if err != nil {
		return answer{Error: r.fail(CodeOther, "%v", err)}
	}
	defer func() { _ = lock.Close() }() // nothing was written, and nil may be closed
	if h.cutter == nil {
		library, err := h.open(h.paths)
		if err != nil {
			code := CodeOther
			if !moduleLoaded(h.paths) {
				code = CodeNoDriver
			}
			return answer{Error: r.fail(code, "%v", err)}
		}
		h.cutter = &cutter{migReader: newMIGReader(h.paths, library, func() {})}
	}
	h.cutter.lock = lock
	return h.cutter.do(r)
}

// openLibrary loads and starts NVML.
func openLibrary(p Paths) (nvml.Interface, error) {
	path, err := findLibrary(p)
	if err != nil {
		return nil, err
	}
	s := scanner{paths: p, lib: nvml.New(nvml.WithLibraryPath(path)), path: path}
	return s.lib, s.init()
}

// lockCard keeps two workers from cutting one card at the same time. A worker that was killed inside the driver goes on there until the driver
// lets it go, and with it its lock: so whoever comes after it, in this process or in another, sees what it left behind. The lock lies on
// the card's directory in sysfs, which every instance of the plugin sees.
//
// It is nil where the card is gone.
func lockCard(p Paths, a device.PCIAddress) (*os.File, error) {
	dir, err := os.Open(filepath.Join(p.Sysfs, "bus", "pci", "devices", string(a)))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // NVML will say that the card is gone
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

package cut

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/mig"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
)

// Command is the plugin's internal subcommand that runs [Serve].
const Command = "partition"

// Serve runs in the worker process of [Partitions]. It reads [nvidia.Paths] and then requests
// from in, and writes an answer to each request to out, as lines of JSON. It opens NVML with the
// first request and keeps it open. It ends when in is closed, even during a request: a worker whose
// parent died must not go on changing GPUs.
func Serve(ctx context.Context, in io.Reader, out io.Writer) error {
	return serve(ctx, in, out, nvmlx.Open)
}

func serve(ctx context.Context, in io.Reader, out io.Writer, open func(nvidia.Paths) (nvml.Interface, error)) error {
	decoder := json.NewDecoder(in)
	var p nvidia.Paths
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
	h := &requestHandler{paths: p.WithDefaults(), open: open}
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
	paths       nvidia.Paths
	open        func(nvidia.Paths) (nvml.Interface, error)
	partitioner *partitioner
}

func (h *requestHandler) do(r request) answer {
	lock, err := host.LockCard(h.paths, r.Card.PCIAddress)
	if err != nil {
		return answer{Error: r.fail(device.FailureOther, "%v", err)}
	}
	defer func() { _ = lock.Close() }() // nothing was written, and closing nil is allowed
	if h.partitioner == nil {
		library, err := h.open(h.paths)
		if err != nil {
			code := device.FailureOther
			if !host.ModuleLoaded(h.paths) {
				code = device.FailureNoDriver
			}
			return answer{Error: r.fail(code, "%v", err)}
		}
		h.partitioner = &partitioner{Reader: mig.NewReader(h.paths, library, func() {})}
	}
	h.partitioner.lock = lock
	return h.partitioner.do(r)
}

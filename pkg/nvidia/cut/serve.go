package cut

import (
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
// from in, and writes an answer to each request to out, as lines of JSON. The parent awaits the
// answer before its next request. Serve opens NVML with the first request and keeps it open. It
// ends when in is closed, even during a request: a worker whose parent died must not go on changing
// GPUs.
func Serve(in io.Reader, out io.Writer) error { return serve(in, out, nvmlx.Open) }

func serve(in io.Reader, out io.Writer, open func(nvidia.Paths) (nvml.Interface, error)) error {
	decoder, encoder := json.NewDecoder(in), json.NewEncoder(out)
	var p nvidia.Paths
	if err := decoder.Decode(&p); err != nil {
		return fmt.Errorf("read the paths of the host: %w", err)
	}
	h := &requestHandler{paths: p.WithDefaults(), open: open}
	// The loop reads on during a request. So a request that hangs does not outlive the parent.
	for r := new(request); decoder.Decode(r) == nil; r = new(request) {
		go func() { _ = encoder.Encode(h.do(*r)) }()
	}
	return nil
}

// requestHandler carries out the requests to a worker, never two at once. The first request opens
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
	defer func() { _ = lock.Close() }() // nothing was written
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

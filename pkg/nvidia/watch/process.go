package watch

import (
	"fmt"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/exclusion"
)

// oneProcessor limits the Go runtime of a child process, so that it does not wake a thread for each
// small task. Long NVML calls get their own threads anyway.
const oneProcessor = "GOMAXPROCS=1"

// watchChild is a child process of [Run].
type watchChild struct {
	*child.Process[device.Signal]
	coverage *exclusion.Coverage
	replaced bool // another process took over, or this one failed to take over
}

// failure returns the error of a child process that has ended without being killed.
func (c *watchChild) failure() error {
	return fmt.Errorf("the watcher process has ended (%w)%s", c.Failure(), c.Stderr())
}

package child

import (
	"os/exec"
	"runtime"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/onecard"
)

// startHiding starts command so that it cannot open the device nodes in nodes. If hiding fails, it
// starts command anyway: the process is not asked about these cards, although NVML may open them.
func startHiding(command *exec.Cmd, nodes []string) error {
	if len(nodes) == 0 {
		return command.Start()
	}
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		_ = onecard.Hide(nodes)
		started <- command.Start()
	}()
	return <-started
}

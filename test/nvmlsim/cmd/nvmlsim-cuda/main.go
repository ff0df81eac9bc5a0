// Command nvmlsim-cuda has three stand-ins in one program and chooses one by the name under which
// it was started: nvidia-cuda-mps-control and nvidia-cuda-mps-server are programs of MPS, and
// nvmlsim-cuda is a program that uses CUDA.
//
// In a container only the two MPS programs are installed. There `nvidia-cuda-mps-control
// nvmlsim-cuda` starts the CUDA program.
package main

import (
	"os"
	"path/filepath"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/mps"
)

const programName = "nvmlsim-cuda"

func main() {
	name, args := filepath.Base(os.Args[0]), os.Args[1:]
	switch {
	case len(args) > 0 && args[0] == programName:
		os.Exit(run(args[1:]))
	case name == "nvidia-cuda-mps-control":
		os.Exit(mps.ControlMain(args))
	case name == "nvidia-cuda-mps-server":
		os.Exit(mps.ServerMain(args))
	}
	os.Exit(run(args))
}

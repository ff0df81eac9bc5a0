// Command nvmlsim-cuda is three stand-ins in one program, told apart by the name that it is called by: nvidia-cuda-mps-control and nvidia-cuda-mps-server,
// the programs of MPS, and nvmlsim-cuda, a program that uses CUDA. Where only the first two names are there, as in a container, the third is had by
// nvidia-cuda-mps-control nvmlsim-cuda.
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

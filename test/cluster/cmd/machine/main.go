// Command machine starts one machine of a test cluster (start FOLDER), or is the machine's first
// process (init FOLDER). Only package cluster calls it.
package main

import (
	"fmt"
	"os"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/machine"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 2 {
		switch args[0] {
		case machine.StarterArgument:
			return machine.RunStarter(args[1])
		case machine.InitArgument:
			return machine.RunInit(args[1])
		}
	}
	return fmt.Errorf("usage: machine %s|%s FOLDER (called by the test cluster, not by hand)", machine.StarterArgument, machine.InitArgument)
}

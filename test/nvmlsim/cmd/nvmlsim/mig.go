package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

func newMIG(n *node) []*cobra.Command {
	return []*cobra.Command{newBusy(n), newReset(n), newLock(n), newFabric(n), newBlock(n)}
}

// findPlace parses an argument of the form GPU or GPU/GI/CI. It returns the GPU's number and, in
// the result on, the compute instance if the argument names one.
func findPlace(f *state.File, text string) (gpu int, on state.Process, err error) {
	name, instance, inInstance := strings.Cut(text, "/")
	if gpu, err = f.Find(name); err != nil {
		return 0, on, err
	}
	on.InInstance = inInstance
	if inInstance {
		if got, err := fmt.Sscanf(instance, "%d/%d", &on.Instance, &on.Compute); got != 2 || err != nil {
			return 0, on, fmt.Errorf("%q is not of the form GPU/GI/CI", text)
		}
	}
	return gpu, on, nil
}

func newBusy(n *node) *cobra.Command {
	var clearAll bool
	command := &cobra.Command{
		Use:   "busy GPU[/GI/CI] [PID...]",
		Short: "Make NVML list processes that compute on a GPU, or on one of its compute instances",
		Long: "Makes NVML list processes that compute on a GPU. Without a PID it lists the caller's own.\n" +
			"While they are listed, MIG mode does not change, and their compute instance (without /GI/CI: none of the GPU) is not destroyed: " +
			"IN_USE.\n" + gpuHelp,
		Args: cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			return n.with(func(f *state.File) error {
				gpu, where, err := findPlace(f, args[0])
				if err != nil {
					return err
				}
				if clearAll {
					return f.ClearBusy(gpu)
				}
				pids := args[1:]
				if len(pids) == 0 {
					pids = []string{strconv.Itoa(os.Getppid())}
				}
				var processes []state.Process
				for _, text := range pids {
					pid, err := strconv.ParseUint(text, 10, 32)
					if err != nil {
						return fmt.Errorf("%q is no PID", text)
					}
					p := where
					p.PID = uint32(pid)
					processes = append(processes, p)
				}
				return f.SetBusy(gpu, processes...)
			})
		},
	}
	command.Flags().BoolVar(&clearAll, "clear", false, "clear the list of processes")
	return command
}

func newReset(n *node) *cobra.Command {
	var force bool
	command := redrawing(n, "reset GPU", "Reset a GPU: removes MIG instances, and applies a pending MIG mode or leaves MIG mode",
		func(f *state.File, gpu int) error { return f.Reset(gpu, force) })
	command.Flags().BoolVar(&force, "force", false, "reset the GPU even while processes are listed or compute")
	return command
}

var cutLocks = map[string]uint32{"driver": state.CutLockDriver, "gpu": state.CutLockGPU, "none": state.CutLockNone, "all": state.CutLockAll}

func newLock(n *node) *cobra.Command {
	return &cobra.Command{
		Use:   "lock driver|all|gpu|none",
		Short: "Set how the driver serialises changes of MIG mode and instances",
		Long: "Says how the driver serialises changes of MIG mode and instances: one after the other (driver, the default); the same, and " +
			"every other call\n" +
			"waits too (all); one after the other on each GPU (gpu); or not at all (none).",
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			kind, known := cutLocks[args[0]]
			if !known {
				return fmt.Errorf("%q is none of driver, all, gpu, none", args[0])
			}
			return n.with(func(f *state.File) error { return f.SetCutLock(kind) })
		},
	}
}

func newFabric(n *node) *cobra.Command {
	var settle time.Duration
	var failure string
	command := &cobra.Command{
		Use:   "fabric GPU STATE [DURATION]",
		Short: "Set a GPU's fabric state: notSupported, notStarted, inProgress, completed; permanently, or for a while",
		Long: "Puts a GPU into a fabric state: notSupported, notStarted, inProgress, completed; permanently, or for DURATION.\n" +
			"fabric --settle DURATION says how long a GPU that leaves MIG mode is inProgress.\n" + gpuHelp,
		Args: cobra.MaximumNArgs(3),
		RunE: func(command *cobra.Command, args []string) error {
			return n.with(func(f *state.File) error {
				if command.Flags().Changed("settle") {
					if len(args) > 0 || settle < 0 {
						return fmt.Errorf("use --settle with a duration and without other arguments")
					}
					return f.SetFabricSettle(settle)
				}
				if len(args) < 2 {
					return fmt.Errorf("name a GPU and a fabric state, or use --settle")
				}
				gpu, err := f.Find(args[0])
				if err != nil {
					return err
				}
				fabric, err := state.ParseFabric(args[1])
				if err != nil {
					return err
				}
				var period time.Duration
				if len(args) == 3 {
					if period, err = time.ParseDuration(args[2]); err != nil || period <= 0 {
						return fmt.Errorf("%q is no duration such as 500ms or 10s", args[2])
					}
				}
				status := uint32(0)
				if failure != "" {
					if status, err = state.ParseError(failure); err != nil {
						return err
					}
				}
				return errors.Join(f.SetFabricStatus(gpu, status), f.SetFabric(gpu, fabric, period))
			})
		},
	}
	command.Flags().StringVar(&failure, "error", "", "result of a completed registration, such as NVML_ERROR_UNKNOWN; by default success")
	command.Flags().DurationVar(&settle, "settle", 0, "how long the fabric state is inProgress after a GPU leaves MIG mode")
	return command
}

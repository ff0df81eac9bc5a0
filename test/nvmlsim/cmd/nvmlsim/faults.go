package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/exports"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// scope says to which NVML calls an injected fault applies: calls on which GPU, how many, and
// whether the call fails before or after its effect.
type scope struct {
	gpu   string
	times int
	after bool
}

func (s *scope) flags(command *cobra.Command) {
	command.Flags().StringVar(&s.gpu, "gpu", "", "only for calls on this GPU (index, UUID or PCI address)")
	command.Flags().IntVar(&s.times, "times", 0, "only for this many calls; by default for all calls until clear")
	command.Flags().BoolVar(&s.after, "after", false, "after the call's effect instead of before: only for functions that change something")
}

func (s *scope) add(f *state.File, function string, fault state.Fault) error {
	_, _, sysfs := state.SysfsWrite(function)
	if function != "*" && !exports.Has(function) && !sysfs && !slices.Contains(state.Beyond(), function) {
		return fmt.Errorf(
			"NVML has no function %q, and it is none of %s: a fault for it would never be met",
			function,
			strings.Join(state.Beyond(), ", "),
		)
	}
	if s.after {
		if function != "*" && !state.Changes(function) {
			return fmt.Errorf("%s changes nothing, so no fault can come after its effect: leave out --after", function)
		}
		fault.After = 1
	}
	fault.GPU = state.AnyGPU
	if s.gpu != "" {
		number, err := f.Find(s.gpu)
		if err != nil {
			return err
		}
		fault.GPU = int32(number)
	}
	return f.AddFault(fault, function, s.times)
}

const functionHelp = "FUNC is a function by the name that is really called, or * for every function. Of a name in several versions " +
	"callers,\n" +
	"go-nvml among them, take the newest: nvmlInit_v2, nvmlDeviceGetHandleByIndex_v2, nvmlDeviceGetPciInfo_v3; nvmlDeviceGetName has but one."

func newFaults(n *node) []*cobra.Command {
	return []*cobra.Command{newSlow(n), newFail(n), newKill(n), newIgnore(n), newClear(n)}
}

func newSlow(n *node) *cobra.Command {
	var s scope
	command := &cobra.Command{
		Use:   "slow FUNC DURATION",
		Short: "Make an NVML function slow",
		Long:  "Makes an NVML function slow. A waiting call goes on at once when the fault is cleared.\n" + functionHelp,
		Args:  cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			delay, err := time.ParseDuration(args[1])
			if err != nil || delay <= 0 {
				return fmt.Errorf("%q is no duration such as 500ms or 10s", args[1])
			}
			return n.with(func(f *state.File) error {
				return s.add(f, args[0], state.Fault{Kind: state.FaultSlow, DelayMS: uint64(delay.Milliseconds())})
			})
		},
	}
	s.flags(command)
	return command
}

func newFail(n *node) *cobra.Command {
	var s scope
	command := &cobra.Command{
		Use:   "fail FUNC NVML_ERROR_NAME|ERRNO",
		Short: "Make an NVML function or a write to sysfs fail",
		Long:  "Makes an NVML function fail, say with NVML_ERROR_UNKNOWN, or a write to sysfs, say with EIO.\n" + functionHelp,
		Args:  cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			code, err := parseError(args[0], args[1])
			if err != nil {
				return err
			}
			return n.with(func(f *state.File) error {
				return s.add(f, args[0], state.Fault{Kind: state.FaultFail, Error: code})
			})
		},
	}
	s.flags(command)
	return command
}

func parseError(function, text string) (uint32, error) {
	if _, _, sysfs := state.SysfsWrite(function); sysfs {
		return state.ParseSysfsError(text)
	}
	return state.ParseError(text)
}

func newIgnore(n *node) *cobra.Command {
	var s scope
	command := &cobra.Command{
		Use:   "ignore WRITE",
		Short: "Let a write to sysfs succeed without effect: sysfsOverride, sysfsUnbind, sysfsProbe and so on",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if _, _, sysfs := state.SysfsWrite(args[0]); !sysfs {
				return fmt.Errorf("%s is no write to sysfs", args[0])
			}
			return n.with(func(f *state.File) error { return s.add(f, args[0], state.Fault{Kind: state.FaultIgnore}) })
		},
	}
	command.Flags().StringVar(&s.gpu, "gpu", "", "only for writes about this GPU (index, UUID or PCI address)")
	command.Flags().IntVar(&s.times, "times", 0, "only for this many writes; by default for all until clear")
	return command
}

func newKill(n *node) *cobra.Command {
	var s scope
	var group bool
	command := &cobra.Command{
		Use:   "kill FUNC",
		Short: "Kill (-9) the caller of an NVML function",
		Long:  "Kills the process that calls an NVML function, as kill -9 does, before the call has its effect or after it.\n" + functionHelp,
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			fault := state.Fault{Kind: state.FaultKill}
			if group {
				fault.Group = 1
			}
			return n.with(func(f *state.File) error { return s.add(f, args[0], fault) })
		},
	}
	s.flags(command)
	command.Flags().BoolVar(&group, "group", false, "kill the caller's whole process group")
	return command
}

func newClear(n *node) *cobra.Command {
	return &cobra.Command{
		Use:   "clear",
		Short: "End all slow, fail and kill faults",
		Args:  cobra.NoArgs,
		RunE:  func(*cobra.Command, []string) error { return n.with((*state.File).ClearFaults) },
	}
}

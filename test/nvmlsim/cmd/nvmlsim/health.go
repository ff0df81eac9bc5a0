package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

func newHealth(n *node) []*cobra.Command {
	return []*cobra.Command{
		newLose(n),
		newRestore(n),
		newXID(n),
		newECC(n),
		newRecovery(n),
		newEvent(n),
		newEvents(n),
		newRemap(n),
		newUnplug(n),
		newPlug(n),
	}
}

const gpuHelp = "GPU is an index in the order of PCI addresses, a UUID or a PCI address."

// onGPU returns a command whose first argument names a GPU. The function change gets the GPU's
// number and the remaining arguments.
func onGPU(n *node, use, short string, args int, change func(f *state.File, gpu int, args []string) error) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Long: short + ".\n" + gpuHelp, Args: cobra.ExactArgs(args),
		RunE: func(_ *cobra.Command, args []string) error {
			return n.with(func(f *state.File) error {
				gpu, err := f.Find(args[0])
				if err != nil {
					return err
				}
				return change(f, gpu, args[1:])
			})
		},
	}
}

// lostAnswers are the values of lose --answers.
var lostAnswers = map[string]state.LostAnswer{
	model.LostGPULost: state.LostGone, model.LostGPUUnknown: state.LostUnknown, model.LostGPUSilent: state.LostSilent,
}

func newLose(n *node) *cobra.Command {
	var answers string
	command := onGPU(n, "lose GPU", "Drop a GPU off the bus: XID 79, then GPU_IS_LOST; the next driver load does not find the GPU", 1,
		func(f *state.File, gpu int, _ []string) error {
			if answers == "" {
				return f.Lose(gpu)
			}
			answer, known := lostAnswers[answers]
			if !known {
				return fmt.Errorf("%q is none of lost, unknown, silent", answers)
			}
			return f.LoseAs(gpu, answer)
		})
	command.Flags().StringVar(&answers, "answers", "",
		"what calls return: lost (GPU_IS_LOST), unknown, or silent (after 6 s UNKNOWN and XID 119, and no XID 79); "+
			"default: the node file's lostGPU")
	return command
}

func newRestore(n *node) *cobra.Command {
	return onGPU(n, "restore GPU", "Bring a lost GPU back", 1,
		func(f *state.File, gpu int, _ []string) error { return f.Restore(gpu) })
}

func newXID(n *node) *cobra.Command {
	var count int
	var over time.Duration
	command := &cobra.Command{
		Use: "xid GPU[/GI/CI] CODE", Short: "Report an XID, on a GPU or on one of its compute instances", Long: "Reports an XID.\n" + gpuHelp,
		Args: cobra.ExactArgs(2),
		RunE: func(command *cobra.Command, args []string) error {
			code, err := strconv.ParseUint(args[1], 10, 32)
			if err != nil {
				return fmt.Errorf("%q is no XID code", args[1])
			}
			return n.with(func(f *state.File) error {
				gpu, on, err := findPlace(f, args[0])
				if err != nil {
					return err
				}
				return repeat(command.Context(), count, over, func() error {
					if on.InInstance {
						return f.XIDOn(gpu, on.Instance, on.Compute, code)
					}
					return f.XID(gpu, code)
				})
			})
		},
	}
	command.Flags().IntVar(&count, "count", 1, "number of XIDs to report")
	command.Flags().DurationVar(&over, "over", 0, "time over which to spread the XIDs, instead of reporting them at once")
	return command
}

// repeat calls do count times, evenly spread over the duration over.
func repeat(ctx context.Context, count int, over time.Duration, do func() error) error {
	start := time.Now()
	for i := range count {
		due := time.NewTimer(time.Until(start.Add(over * time.Duration(i) / time.Duration(count))))
		select {
		case <-ctx.Done():
			due.Stop()
			return ctx.Err()
		case <-due.C:
		}
		if err := do(); err != nil {
			return err
		}
	}
	return nil
}

func newECC(n *node) *cobra.Command {
	return onGPU(n, "ecc GPU single|double", "Count and report a memory error", 2, func(f *state.File, gpu int, args []string) error {
		if args[0] != "single" && args[0] != "double" {
			return fmt.Errorf("%q is neither single nor double", args[0])
		}
		return f.ECC(gpu, args[0] == "double")
	})
}

func newRecovery(n *node) *cobra.Command {
	var announce bool
	command := onGPU(
		n,
		"recovery GPU ACTION",
		"Set the recovery action that a GPU asks for: none, gpu-reset, node-reboot, drain-p2p, drain-and-reset, recover-imex-domain, "+
			"bus-reset, system-reboot",
		2,
		func(f *state.File, gpu int, args []string) error {
			action, err := state.ParseRecovery(args[0])
			if err != nil {
				return err
			}
			if announce {
				return f.AnnounceRecovery(gpu, action)
			}
			return f.SetRecovery(gpu, action)
		},
	)
	command.Flags().BoolVar(&announce, "announce", false, "also report the recovery action by XID 154 and by the event recoveryAction")
	return command
}

func newEvent(n *node) *cobra.Command {
	return onGPU(n, "event GPU KIND DATA", "Report an event of any kind: xid, doubleBitEcc, fatalPoison and so on", 3,
		func(f *state.File, gpu int, args []string) error {
			kind, err := model.ParseEventType(args[0])
			if err != nil {
				return err
			}
			data, err := strconv.ParseUint(args[1], 0, 64)
			if err != nil {
				return fmt.Errorf("%q is no number", args[1])
			}
			return f.Event(gpu, uint64(kind), data)
		})
}

func newEvents(n *node) *cobra.Command {
	return onGPU(n, "events GPU KIND,KIND...|none", "Set which kinds of events a GPU supports, instead of the model file's", 2,
		func(f *state.File, gpu int, args []string) error {
			if args[0] == "none" {
				return f.SetEventTypes(gpu, 0)
			}
			mask, err := model.ParseEventTypes(strings.Split(args[0], ","))
			if err != nil {
				return err
			}
			return f.SetEventTypes(gpu, uint64(mask))
		})
}

func newRemap(n *node) *cobra.Command {
	return onGPU(
		n,
		"remap GPU none|pending|failed|both",
		"Set the state of bad memory: a row to remap at the next reset, or a failed remap",
		2,
		func(f *state.File, gpu int, args []string) error {
			if !slices.Contains([]string{"none", "pending", "failed", "both"}, args[0]) {
				return fmt.Errorf("%q is none of none, pending, failed, both", args[0])
			}
			return f.SetRemap(gpu, args[0] == "pending" || args[0] == "both", args[0] == "failed" || args[0] == "both")
		},
	)
}

// redrawing returns a command whose argument names a GPU. The command calls change and then updates
// the simulated node's files on disk, unless it works on a state file alone.
func redrawing(n *node, use, short string, change func(f *state.File, gpu int) error) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Long: short + ".\n" + gpuHelp, Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			do := func(f *state.File) error {
				gpu, err := f.Find(args[0])
				if err != nil {
					return err
				}
				return change(f, gpu)
			}
			if n.statePath != "" {
				return n.with(do)
			}
			return n.withLayout(func(c *layout.Config, f *state.File) error {
				if err := do(f); err != nil {
					return err
				}
				return c.Apply(f)
			})
		},
	}
}

func newUnplug(n *node) *cobra.Command {
	var quiet bool
	command := redrawing(n, "unplug GPU", "Unplug a card: XID 79, then GPU_IS_LOST; its device nodes and sysfs entries are removed",
		func(f *state.File, gpu int) error {
			if !quiet {
				if err := f.XID(gpu, 79); err != nil {
					return err
				}
			}
			return f.Unplug(gpu)
		})
	command.Flags().BoolVar(&quiet, "quiet", false, "report no XID")
	return command
}

func newPlug(n *node) *cobra.Command {
	var uuid string
	command := redrawing(n, "plug GPU", "Plug a card into the empty slot; a process finds it at its next nvmlInit",
		func(f *state.File, gpu int) error { return f.Plug(gpu, uuid) })
	command.Flags().StringVar(&uuid, "uuid", "", "plug in another GPU of the same model, with this UUID")
	return command
}

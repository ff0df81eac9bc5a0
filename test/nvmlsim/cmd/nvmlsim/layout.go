package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

func newLayout(n *node) *cobra.Command {
	command := &cobra.Command{Use: "layout", Short: "Lay a node out on disk"}
	command.AddCommand(newLayoutUp(n), newLayoutDown(n), newLayoutDevices(n))
	return command
}

func newLayoutUp(n *node) *cobra.Command {
	var (
		o               layout.Options
		kind            string
		nodeFile, gpus  string
		flagNoDevices   bool
		flagNoUVM       bool
		flagMountProc   bool
		flagMountRoot   bool
		flagPlain       bool
		dev, libraryDir string
		bootDrivers     map[string]string
	)
	command := &cobra.Command{
		Use:   "up --node NODE.yaml --models DIR --lib libnvidia-ml.so.1",
		Short: "Create the driver root, device nodes, proc and sysfs trees of a node, and its state",
		Long: "Makes a node. A state that lies in the folder already is kept, as over a reboot: the driver is loaded again,\n" +
			"and what is broken stays broken. --fresh makes it anew.",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			var err error
			if o.Models, err = model.ReadGPUs(gpus); err != nil {
				return err
			}
			described, err := model.ReadNode(nodeFile, o.Seed, model.BootDrivers(bootDrivers))
			if err != nil {
				return err
			}
			o.Root = n.root
			o.Config = layout.Config{
				Kind: layout.Kind(kind), Node: described, Dev: dev, LibraryDir: libraryDir,
				NoDevices: flagNoDevices, NoUVM: flagNoUVM, MountProc: flagMountProc, MountRoot: flagMountRoot, PlainDevices: flagPlain,
			}
			if _, err := layout.Up(o); err != nil || !described.Passthrough {
				return err
			}
			return startSysfs(n.root)
		},
	}
	flags := command.Flags()
	flags.StringVar(&nodeFile, "node", "", "node file")
	flags.StringVar(&gpus, "models", "", "folder of GPU model files")
	flags.StringVar(&kind, "kind", string(layout.Host), "how the driver is installed: host, container or bare")
	flags.StringVar(&o.Sources.Library, "lib", "", "path of the built libnvidia-ml.so.1; the folder standin must lie next to it")
	flags.StringVar(&o.Sources.SMI, "smi", "", "path of nvidia-smi; by default the node has no nvidia-smi")
	flags.StringVar(&o.Sources.Hook, "hook", "", "path of nvidia-cdi-hook, to copy into bin/ of the layout's folder")
	flags.StringVar(&o.DriverVersion, "driver-version", "", "driver version instead of the node file's")
	flags.StringVar(&o.CUDAVersion, "cuda-version", "", "CUDA version instead of the node file's")
	flags.StringVar(&o.Seed, "seed", "", "text that UUIDs are derived from, so that two nodes of one file differ")
	flags.StringVar(&dev, "dev", "/dev", "folder of the device nodes")
	flags.StringVar(&libraryDir, "libdir", "", "the libraries' folder below the driver root, instead of the kind's default")
	flags.StringToStringVar(&bootDrivers, "boot-driver", nil,
		"ADDRESS=DRIVER,...: kernel drivers that functions have at boot instead of the node file's, on a node with passthrough")
	flags.BoolVar(&flagPlain, "plain-devices", false, "ordinary files instead of device nodes, where mknod is not allowed")
	flags.BoolVar(&flagNoDevices, "no-devices", false, "create no device nodes yet (layout devices creates them)")
	flags.BoolVar(&flagNoUVM, "no-uvm", false, "create no nvidia-uvm device nodes yet (layout devices --uvm creates them)")
	flags.BoolVar(&o.NoDriver, "no-driver", false, "no driver yet: hardware only (driver back installs it)")
	flags.BoolVar(
		&flagMountProc,
		"mount-proc",
		false,
		"mount the proc tree over /proc/driver and /proc/devices: only in a mount namespace of the node's own",
	)
	flags.BoolVar(
		&flagMountRoot,
		"mount-root",
		false,
		"mount the layout's folder at .udev/nvmlsim in the folder of device nodes, for containers with all device nodes and a read-only "+
			"driver root, and hide ldconfig if the node file says so: only in a mount namespace of the node's own",
	)
	flags.BoolVar(&o.Fresh, "fresh", false, "discard the existing state and create a new one")
	for _, name := range []string{"node", "models", "lib"} {
		_ = command.MarkFlagRequired(name)
	}
	return command
}

func newLayoutDown(n *node) *cobra.Command {
	return &cobra.Command{
		Use:   "down",
		Short: "Remove the layout, its device nodes, mounts and state",
		Args:  cobra.NoArgs,
		RunE:  func(*cobra.Command, []string) error { return layout.Down(n.root) },
	}
}

func newLayoutDevices(n *node) *cobra.Command {
	var uvm bool
	command := &cobra.Command{
		Use:   "devices",
		Short: "Create the device nodes that layout up left out",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return n.withLayout(func(c *layout.Config, f *state.File) error { return c.MakeDevices(f, uvm) })
		},
	}
	command.Flags().BoolVar(&uvm, "uvm", false, "also create the nvidia-uvm device nodes")
	return command
}

// newCompile returns a command that creates a state file without the other files of a simulated
// node. Some tests of the simulated NVML library need no more.
func newCompile() *cobra.Command {
	var nodeFile, gpus, seed string
	command := &cobra.Command{
		Use:   "compile --node NODE.yaml --models DIR STATEFILE",
		Short: "Create only a state file, for use with NVMLSIM_STATE",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			models, err := model.ReadGPUs(gpus)
			if err != nil {
				return err
			}
			described, err := model.ReadNode(nodeFile, seed)
			if err != nil {
				return err
			}
			f, err := state.Create(args[0], state.Spec{
				Node: described, Models: models, Seed: seed, DriverVersion: described.DriverVersion, CUDAVersion: described.CUDAVersion,
			})
			if err != nil {
				return err
			}
			fmt.Printf("%s: %d GPUs\n", args[0], f.GPUCount())
			return f.Close()
		},
	}
	command.Flags().StringVar(&nodeFile, "node", "", "node file")
	command.Flags().StringVar(&gpus, "models", "", "folder of GPU model files")
	command.Flags().StringVar(&seed, "seed", "", "text that UUIDs are derived from")
	_ = command.MarkFlagRequired("node")
	_ = command.MarkFlagRequired("models")
	return command
}

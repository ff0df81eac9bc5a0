package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/persistenced"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/sysfs"
)

func newSysfs(n *node) []*cobra.Command {
	return []*cobra.Command{newServe(n), newVFIO(n), newPersistenced(n)}
}

// readyFD is the descriptor on which serve reports to startSysfs: nothing when the file system is
// mounted, else the error.
const readyFD = 3

func newServe(n *node) *cobra.Command {
	var detached bool
	command := &cobra.Command{
		Use:   "sysfs",
		Short: "Serve the sysfs of a node with passthrough until it is unmounted (layout up does this in the background)",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			server, err := sysfs.Mount(n.root)
			if detached {
				report := os.NewFile(readyFD, "ready")
				if err != nil {
					_, _ = fmt.Fprint(report, err)
				}
				_ = report.Close()
			}
			if err != nil {
				return err
			}
			server.Wait()
			return nil
		},
	}
	command.Flags().BoolVar(&detached, "detached", false, "report on descriptor 3 when the file system is mounted")
	_ = command.Flags().MarkHidden("detached")
	return command
}

// startSysfs starts the server of the node's sysfs as a process of its own, and returns when the
// file system is mounted.
func startSysfs(root string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	ready, report, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = ready.Close() }()
	output, err := os.OpenFile(filepath.Join(root, "sysfs.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		_ = report.Close()
		return err
	}
	defer func() { _ = output.Close() }()
	server := exec.Command(self, "sysfs", "--detached", "--root", root)
	server.Dir, server.Stdout, server.Stderr, server.ExtraFiles = "/", output, output, []*os.File{report}
	server.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = server.Start()
	_ = report.Close()
	if err != nil {
		return fmt.Errorf("start the server of sysfs: %w", err)
	}
	failure, err := io.ReadAll(ready)
	if err != nil {
		return err
	}
	if len(failure) > 0 {
		return fmt.Errorf("serve sysfs: %s", failure)
	}
	return server.Process.Release()
}

func newPersistenced(n *node) *cobra.Command {
	return &cobra.Command{
		Use: "persistenced", Short: "Stand for nvidia-persistenced until a signal comes", Args: cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			daemon, err := persistenced.Start(n.root)
			if err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(command.Context(), syscall.SIGTERM, os.Interrupt)
			defer stop()
			fmt.Println("open")
			return daemon.Serve(ctx)
		},
	}
}

func newVFIO(n *node) *cobra.Command {
	command := &cobra.Command{Use: "vfio", Short: "Load or unload the module of VFIO, or stand for a virtual machine"}
	command.AddCommand(&cobra.Command{
		Use: "load", Short: "Load the module vfio_pci, as modprobe does", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return n.with(func(f *state.File) error { return f.SetVFIO(true) })
		},
	}, &cobra.Command{
		Use: "unload", Short: "Unload the module vfio_pci, as rmmod does, and unbind its PCI functions", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return n.with(func(f *state.File) error { return f.SetVFIO(false) })
		},
	}, &cobra.Command{
		Use: "hold PATH...", Short: "Keep device nodes of VFIO open until a signal comes, as a virtual machine does", Args: cobra.MinimumNArgs(1),
		RunE: func(command *cobra.Command, paths []string) error {
			for _, path := range paths {
				if _, err := unix.Open(path, unix.O_PATH, 0); err != nil {
					return fmt.Errorf("open %s: %w", path, err)
				}
			}
			ctx, stop := signal.NotifyContext(command.Context(), syscall.SIGTERM, os.Interrupt)
			defer stop()
			fmt.Println("open")
			<-ctx.Done()
			return nil
		},
	})
	return command
}

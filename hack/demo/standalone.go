package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// model is the name of the simulated node that the demo shows.
const model = "dgx-h100"

func (d *demo) standaloneRoot() string { return filepath.Join(d.folder(), "node") }

// showStandalone creates the files of a simulated node below build/ and shows the node twice: with
// NVIDIA's nvidia-smi, and with the plugin's inventory command.
func (d *demo) showStandalone(ctx context.Context) (*clusterharness.Simulator, error) {
	root, s, node := d.root, d.screen, d.standaloneRoot()
	s.title("A simulated node with 8 GPUs, " + short(root, "below", node))
	sim, err := clusterharness.BuildSimulator(ctx, root, s.background("simulator"))
	if err != nil {
		return nil, err
	}
	if d.withoutSMI {
		sim.SMI = ""
	}
	if err := d.removeStandalone(ctx); err != nil {
		return nil, err
	}
	// In a driver container's layout, the device nodes are in the driver root's own dev/, so that this
	// machine's /dev stays unchanged.
	argv := sim.LayoutUp(node, model, "--kind", "container")
	if _, err := s.run(command(ctx, root, nil, argv...), short(root, argv...)); err != nil {
		return nil, err
	}
	if err := d.showSMI(ctx, sim); err != nil {
		return nil, err
	}
	s.title("What the plugin would offer to Kubernetes")
	plugin := filepath.Join(root, "build/bin/gpu-kubelet-plugin")
	build := command(ctx, root, nil, "go", "build", "-o", plugin, "./cmd/gpu-kubelet-plugin")
	progress := s.background("plugin")
	build.Stdout, build.Stderr = progress, progress
	if err := build.Run(); err != nil {
		return nil, fmt.Errorf("build the plugin: %w", err)
	}
	argv = []string{
		plugin, "inventory", "--driver-root=" + filepath.Join(node, "driver"),
		"--sysfs-root=" + filepath.Join(node, "sys"), "--proc-root=" + filepath.Join(node, "proc"),
		"--settings=/dev/stdin",
	}
	inventory := command(ctx, root, nil, argv...)
	inventory.Stdin = strings.NewReader("mig: {policy: dynamic}") // as the demo installs the chart later
	_, err = s.run(inventory, short(root, argv...)+" <<< 'mig: {policy: dynamic}'")
	return sim, err
}

// showSMI runs NVIDIA's nvidia-smi on the simulated node. If nvidia-smi is unavailable, it prints
// why.
func (d *demo) showSMI(ctx context.Context, sim *clusterharness.Simulator) error {
	if sim.SMI == "" {
		d.screen.title("NO NVIDIA-SMI: NVIDIA's nvidia-smi cannot be fetched from Debian's archive. The demo shows the rest, " +
			"and the Pod's GPU by its device nodes.")
		return nil
	}
	d.screen.title("The output of NVIDIA's nvidia-smi")
	smi := filepath.Join(d.standaloneRoot(), "driver/usr/bin/nvidia-smi")
	_, err := d.screen.run(command(ctx, d.root, []string{"LD_LIBRARY_PATH=" + libraryDir(d.standaloneRoot())}, smi), short(d.root, smi))
	return err
}

func (d *demo) removeStandalone(ctx context.Context) error {
	node := d.standaloneRoot()
	if _, err := os.Stat(filepath.Join(node, "layout.yaml")); err != nil {
		return os.RemoveAll(node)
	}
	tool := filepath.Join(d.root, "build/nvmlsim/nvmlsim")
	if out, err := exec.CommandContext(ctx, tool, "--root", node, "layout", "down").CombinedOutput(); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("remove the simulated node in %s: %w: %s", node, err, out)
	}
	return os.RemoveAll(node)
}

func libraryDir(node string) string {
	triplet := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	return filepath.Join(node, "driver/usr/lib", triplet)
}

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/stand"
)

// model is the node that the demo shows.
const model = "dgx-h100"

func standaloneRoot(root string) string { return filepath.Join(root, "build", "demo", "node") }

// buildInBackground builds the cluster's programs in a process of the lowest priority, so that what is shown meanwhile does not wait for it.
func buildInBackground(ctx context.Context, root string, s *screen) <-chan error {
	done := make(chan error, 1)
	cmd := command(ctx, root, nil, "nice", "-n", "19", "go", "run", "./test/cluster/cmd/cluster", "build")
	output := s.background("cluster")
	cmd.Stdout, cmd.Stderr = output, output
	// An interrupt, not a kill: go run hands it on to the build.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	go func() {
		if err := cmd.Run(); err != nil {
			done <- fmt.Errorf("build the cluster's programs: %w", err)
			return
		}
		done <- nil
	}()
	return done
}

// showStandalone lays a node out below build/demo and looks at it twice: through NVIDIA's own nvidia-smi and through the plugin.
func showStandalone(ctx context.Context, root string, s *screen) (*stand.Simulator, error) {
	s.title("A simulated node with 8 GPUs, below build/demo/node")
	sim, err := stand.BuildSimulator(ctx, root, s.background("simulator"))
	if err != nil {
		return nil, err
	}
	if sim.SMI == "" {
		return nil, errors.New("NVIDIA's nvidia-smi is what the demo shows, and it cannot be fetched from Debian's archive (see above)")
	}
	node := standaloneRoot(root)
	if err := removeStandalone(ctx, root); err != nil {
		return nil, err
	}
	// A driver root with a dev/ of its own: nothing of this machine is touched.
	argv := sim.LayoutUp(node, model, "--kind", "container")
	if _, err := s.run(command(ctx, root, nil, argv...), short(root, argv...)); err != nil {
		return nil, err
	}
	s.title("What NVIDIA's own nvidia-smi says there")
	smi := filepath.Join(node, "driver/usr/bin/nvidia-smi")
	if _, err := s.run(command(ctx, root, []string{"LD_LIBRARY_PATH=" + libraryDir(node)}, smi), short(root, smi)); err != nil {
		return nil, err
	}
	s.title("What the plugin would offer of it to Kubernetes")
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
	}
	_, err = s.run(command(ctx, root, nil, argv...), short(root, argv...))
	return sim, err
}

func removeStandalone(ctx context.Context, root string) error {
	node := standaloneRoot(root)
	if _, err := os.Stat(filepath.Join(node, "layout.yaml")); err != nil {
		return os.RemoveAll(node)
	}
	tool := filepath.Join(root, "build/nvmlsim/nvmlsim")
	if out, err := exec.CommandContext(ctx, tool, "--root", node, "layout", "down").CombinedOutput(); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("remove the simulated node in %s: %w: %s", node, err, out)
	}
	return os.RemoveAll(node)
}

func libraryDir(node string) string {
	triplet := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	return filepath.Join(node, "driver/usr/lib", triplet)
}

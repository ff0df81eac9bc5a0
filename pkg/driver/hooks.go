package driver

import (
	"bytes"
	"context"
	"os"
	"path/filepath"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/hook"
)

// cdiHookProgram is the file name of nvidia-cdi-hook on the host.
const cdiHookProgram = "nvidia-cdi-hook"

// PlaceHooks installs nvidia-cdi-hook in the first of the configured directories where every user
// of the host can run it, and sets cfg.HookPath. It removes the hooks of earlier plugin versions
// that no claim needs any more. What it cannot do is logged, and [nodeview.HookCheck] reports a
// hook that root cannot run either.
func PlaceHooks(ctx context.Context, cfg *config.Config) {
	logger := klog.FromContext(ctx)
	targets := hookTargets(cfg)
	path, rootOnly, passedOver := hook.Choose(ctx, hostRoot(cfg), cfg.HookSource, targets)
	cfg.HookPath = path
	if rootOnly {
		logger.Error(passedOver, "Found no directory of the host in which every user can run the CDI hook; "+
			"Pods with hostUsers: false cannot start with a GPU. Set hookPath to such a directory", "path", path)
	} else {
		logger.Info("Chose the path of the CDI hook on the host", "path", path, "passedOver", passedOver)
	}
	if err := hook.RemoveUnused(cfg.HookDirs, path, func(dir string) bool { return named(cfg, dir) }); err != nil {
		logger.Error(err, "Failed to remove the hooks of an earlier plugin version")
	}
}

// FindHooks sets cfg.HookPath to what [PlaceHooks] has installed, or would install first. It
// changes nothing on the host.
func FindHooks(cfg *config.Config) {
	targets := append(hookTargets(cfg), cfg.HookPath) // hwcheck has its hook at that very path
	cfg.HookPath = targets[0]
	for _, path := range targets {
		if _, err := os.Stat(path); err == nil {
			cfg.HookPath = path
			return
		}
	}
}

// hookTargets returns the possible paths of nvidia-cdi-hook on the host. If the image lacks a
// program, installing it will fail with an error that names the program.
func hookTargets(cfg *config.Config) (targets []string) {
	name, _ := hook.DirName(cfg.HookSource, cfg.MPSHookSource)
	for _, dir := range cfg.HookDirs {
		targets = append(targets, filepath.Join(dir, name, cdiHookProgram))
	}
	return targets
}

// removeHooks returns a function that removes all hooks from the host.
func removeHooks(cfg *config.Config) func() error {
	return func() error { return hook.RemoveAll(hostRoot(cfg), cfg.HookDirs, config.OwnHookDirs) }
}

// hostRoot is where this process sees the root of the host's file system.
func hostRoot(cfg *config.Config) string { return filepath.Join(cfg.ProcRoot, "1", "root") }

// named reports whether a CDI spec or a record names a file in the directory. A record's edits
// become a CDI spec again if another program removes the spec.
func named(cfg *config.Config, dir string) bool {
	for _, pattern := range []string{filepath.Join(cfg.CDIRoot, cdi.Vendor+"-*"), filepath.Join(cfg.StateDir(), "claims", "*")} {
		files, _ := filepath.Glob(pattern) // The only error is an invalid pattern.
		for _, file := range files {
			if data, err := (durable.OS{}).ReadFile(file); err != nil && !os.IsNotExist(err) || bytes.Contains(data, []byte(dir+"/")) {
				return true
			}
		}
	}
	return false
}

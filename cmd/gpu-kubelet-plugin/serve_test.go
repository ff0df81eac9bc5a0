package main

import (
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
)

func TestMakeDirectoriesLeavesNoProbeFiles(t *testing.T) {
	dir := t.TempDir()
	cfg := config.Default()
	cfg.PluginDir, cfg.CDIRoot, cfg.RegistrarDir = filepath.Join(dir, "plugin"), filepath.Join(dir, "cdi"), dir
	probed := []string{cfg.StateDir(), cfg.CDIRoot}
	for _, d := range probed { // as if a plugin was killed before it removed the file
		if err := os.MkdirAll(d, 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(d, writeProbe), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var all sync.WaitGroup
	for range 8 { // plugin instances that start at the same time
		all.Go(func() {
			for range 100 {
				if err := makeDirectories(cfg); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	for _, d := range probed {
		if left, err := os.ReadDir(d); err != nil || len(left) != 0 {
			t.Errorf("%s: left %v, %v", d, left, err)
		}
	}
}

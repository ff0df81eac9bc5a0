package driver

import (
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func present(t *testing.T, dir string) *presence {
	t.Helper()
	p, err := bePresent(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.End)
	return p
}

func alone(t *testing.T, p *presence) bool {
	t.Helper()
	is, err := p.Alone()
	if err != nil {
		t.Error(err)
	}
	return is
}

func TestOnlyTheLastInstanceIsAlone(t *testing.T) {
	dir := t.TempDir()
	first, second := present(t, dir), present(t, dir)
	if alone(t, first) {
		t.Error("alone beside another one")
	}
	if !alone(t, second) {
		t.Error("the last one is not alone")
	}
}

func TestOfInstancesThatEndAtTheSameTimeOneIsAlone(t *testing.T) {
	for range 200 {
		dir := filepath.Join(t.TempDir(), "plugin")
		instances := []*presence{present(t, dir), present(t, dir), present(t, dir)}
		var cleaning, cleaned atomic.Int32
		var all sync.WaitGroup
		for _, p := range instances {
			all.Go(func() {
				defer p.End()
				if !alone(t, p) {
					return
				}
				if cleaning.Add(1) != 1 {
					t.Error("two are alone at once")
				}
				if _, err := removePluginDir(dir, filepath.Join(dir, "state")); err != nil {
					t.Error(err)
				}
				cleaned.Add(1)
				cleaning.Add(-1)
			})
		}
		all.Wait()
		if _, err := os.Stat(dir); !os.IsNotExist(err) || cleaned.Load() == 0 {
			t.Fatalf("%d instances have cleaned up, the directory: %v", cleaned.Load(), err)
		}
	}
}

func TestAnInstanceThatStartsDuringTheCleaningFindsItsDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "plugin")
	leaves := present(t, dir)
	if !alone(t, leaves) {
		t.Fatal("not alone")
	}
	started := make(chan *presence)
	go func() {
		p, err := bePresent(t.Context(), dir)
		if err != nil {
			t.Error(err)
		}
		started <- p
	}()
	if _, err := removePluginDir(dir, filepath.Join(dir, "state")); err != nil {
		t.Fatal(err)
	}
	leaves.End()
	newcomer := <-started
	defer newcomer.End()
	if !newcomer.named() {
		t.Fatal("the newcomer is not known to others")
	}
	if other := present(t, dir); alone(t, other) {
		t.Error("alone beside the newcomer")
	}
}

func TestNobodyCleansUpUnderAnother(t *testing.T) {
	n := newNode(t)
	other := present(t, n.cfg.PluginDir)
	n.start(t)
	n.register(t)
	eventually(t, "the GPUs are published", func() bool { return len(published(t, n.client)) == 2 })
	if err := n.client.AppsV1().DaemonSets("gpu").Delete(t.Context(), "plugin", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(n.cfg.HookPath); err != nil {
		t.Errorf("the hook is gone under the other instance: %v", err)
	}
	if files := n.cdiFiles(t); len(files) != 1 {
		t.Errorf("CDI files: %v", files)
	}
	if len(published(t, n.client)) != 2 {
		t.Error("the other instance's slices were withdrawn")
	}
	if !alone(t, other) {
		t.Error("the other instance cannot clean up when it ends")
	}
}

package toolchain

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
)

func TestKeyDependsOnEveryPart(t *testing.T) {
	seen := map[string][]string{}
	for _, parts := range [][]string{{}, {""}, {"a"}, {"a", ""}, {"", "a"}, {"ab"}, {"a", "b"}, {"b", "a"}, {"1\na"}, {"a\n1\nb"}} {
		key := Key(parts...)
		if other, taken := seen[key]; taken {
			t.Errorf("%q and %q have the same key, so that one would be used for the other", parts, other)
		}
		seen[key] = parts
	}
	for _, parts := range seen {
		if again := Key(parts...); !slices.Equal(seen[again], parts) {
			t.Errorf("%q has another key the second time, so that nothing would be found again", parts)
		}
	}
}

func TestConcurrentBuildsBuildOnce(t *testing.T) {
	cache := &Cache{Dir: t.TempDir()}
	var built atomic.Int32
	var builders sync.WaitGroup
	for range 8 {
		builders.Go(func() {
			dir, err := cache.Ensure(context.Background(), "tool", "key", func(dir string) error {
				built.Add(1)
				return os.WriteFile(filepath.Join(dir, "program"), []byte("content"), 0o755)
			})
			if err != nil {
				t.Error(err)
				return
			}
			if content, err := os.ReadFile(filepath.Join(dir, "program")); err != nil || string(content) != "content" {
				t.Errorf("artifact holds %q, %v", content, err)
			}
		})
	}
	builders.Wait()
	if built.Load() != 1 {
		t.Errorf("built %d times", built.Load())
	}
}

func TestFailedBuildLeavesNoArtifact(t *testing.T) {
	cache := &Cache{Dir: t.TempDir()}
	broken := errors.New("compiler says no")
	_, err := cache.Ensure(context.Background(), "tool", "key", func(dir string) error {
		if err := os.WriteFile(filepath.Join(dir, "half"), nil, 0o644); err != nil {
			return err
		}
		return broken
	})
	if !errors.Is(err, broken) {
		t.Fatalf("error is %v", err)
	}
	if dir, built := cache.Lookup("tool", "key"); built {
		t.Errorf("%s exists", dir)
	}
	if leftovers, _ := filepath.Glob(filepath.Join(cache.Dir, ".partial-*")); len(leftovers) > 0 {
		t.Errorf("left behind: %v", leftovers)
	}
}

func TestNextBuildRemovesLeftovers(t *testing.T) {
	cache := &Cache{Dir: t.TempDir()}
	killed := filepath.Join(cache.Dir, ".partial-tool-123")
	if err := os.MkdirAll(killed, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := cache.Ensure(context.Background(), "tool", "key", func(string) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(killed); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there (%v)", killed, err)
	}
}

func TestWaitForBuildHonoursContext(t *testing.T) {
	cache := &Cache{Dir: t.TempDir()}
	building, release := make(chan struct{}), make(chan struct{})
	var other sync.WaitGroup
	other.Go(func() {
		_, _ = cache.Ensure(context.Background(), "tool", "key", func(string) error { close(building); <-release; return nil })
	})
	<-building
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := cache.Ensure(ctx, "tool", "other-key", func(string) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v, want that of the context", err)
	}
	close(release)
	other.Wait()
}

func TestDigestIgnoresCheckoutPath(t *testing.T) {
	write := func(dir, content string) string {
		path := filepath.Join(dir, "main.go")
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		digest, err := hashRelative(dir, path)
		if err != nil {
			t.Fatal(err)
		}
		return digest
	}
	here, there := t.TempDir(), t.TempDir()
	first := write(here, "package a")
	if second := write(there, "package a"); second != first {
		t.Error("another checkout with the same files would build anew")
	}
	if changed := write(here, "package b"); changed == first {
		t.Error("the digest is the same after a change of a file")
	}
}

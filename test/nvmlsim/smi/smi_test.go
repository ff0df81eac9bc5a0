package smi

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// On a machine that cannot get nvidia-smi, Fetch must return ErrUnavailable, so that tests skip.
// Any other failure must fail them.
func TestUnavailableWithoutApt(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("PATH", t.TempDir())
	_, err := Fetch(t.Context(), DefaultSuite)
	if !errors.Is(err, ErrUnavailable) {
		t.Errorf("error %v, want ErrUnavailable", err)
	}
	cache, err := CacheDir()
	if err != nil {
		t.Fatal(err)
	}
	if left, err := filepath.Glob(filepath.Join(cache, "fetch-*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v (%v)", left, err)
	}
}

func TestCachedCopyIsUsed(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	t.Setenv("PATH", t.TempDir())
	want := filepath.Join(cache, "gpu-dra-driver/nvidia-smi/some/nvidia-smi")
	if err := errors.Join(os.MkdirAll(filepath.Dir(want), 0o755), os.WriteFile(want, []byte("x"), 0o600)); err != nil {
		t.Fatal(err)
	}
	got, err := Fetch(t.Context(), "some")
	if err != nil || got != want {
		t.Errorf("%s (%v), want %s", got, err, want)
	}
}

package durable

import (
	"os"
	"path/filepath"
	"testing"
)

func TestBootID(t *testing.T) {
	own, err := BootID("/proc")
	if err != nil || own == "" {
		t.Fatalf("%q, %v", own, err)
	}
	proc := t.TempDir()
	if got, err := BootID(proc); err != nil || got != own {
		t.Errorf("proc without a boot ID: %q, %v", got, err)
	}
	file := filepath.Join(proc, "sys/kernel/random/boot_id")
	if err := os.MkdirAll(filepath.Dir(file), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("another\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := BootID(proc); err != nil || got != "another" {
		t.Errorf("%q, %v", got, err)
	}
}

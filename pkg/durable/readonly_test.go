package durable_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

func TestReadOnlyChangesNothing(t *testing.T) {
	dir, disk := t.TempDir(), durable.ReadOnly{}
	there, away := filepath.Join(dir, "file"), filepath.Join(dir, "away")
	write(t, there, 0o600)
	for name, err := range map[string]error{
		"create": disk.Create(away, nil), "replace": durable.Replace(disk, there, nil),
		"rename": disk.Rename(there, away), "remove": disk.Remove(there),
	} {
		if !errors.Is(err, syscall.EROFS) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := durable.MakeDir(disk, away); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing directory: %v", err)
	}
	must(t, durable.MakeDir(disk, dir))
	names, err := os.ReadDir(dir)
	if err != nil || len(names) != 1 {
		t.Errorf("%v: %v", names, err)
	}
	if _, err := disk.ReadFile(there); err != nil {
		t.Error(err)
	}
}

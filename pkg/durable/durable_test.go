package durable_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

const file = "/state/record.json"

func TestPowerCutLeavesOldOrNewContent(t *testing.T) {
	old, fresh := []byte("the old content"), []byte("the new content")
	for n := 1; ; n++ {
		disk := durabletest.New()
		disk.Put(file, old)
		disk.StopAt(n)
		err := durable.Replace(disk, file, fresh)
		if err != nil != disk.Stopped() {
			t.Fatalf("stopped at write %d: %v", n, err)
		}
		if !disk.Stopped() {
			disk.PowerCut()
			if got, _ := disk.ReadFile(file); !bytes.Equal(got, fresh) {
				t.Fatalf("a successful write was lost: %q", got)
			}
			return
		}
		disk.PowerCut()
		if got, _ := disk.ReadFile(file); !bytes.Equal(got, old) && !bytes.Equal(got, fresh) {
			t.Errorf("stopped at write %d: the file has %q", n, got)
		}
		if err := durable.Replace(disk, file, fresh); err != nil {
			t.Errorf("stopped at write %d: the next write fails: %v", n, err)
		}
	}
}

func TestReplaceOverwritesUnfinishedWrite(t *testing.T) {
	disk := durabletest.New()
	disk.StopAt(2) // crash after the temporary file was written
	if err := durable.Replace(disk, file, []byte("content")); err == nil {
		t.Fatal("succeeded")
	}
	disk.Restart()
	names := disk.Names("/state")
	if len(names) != 1 {
		t.Fatalf("left %q", names)
	}
	if base, is := durable.Unfinished(names[0]); !is || base != "record.json" {
		t.Errorf("%q is not recognized: %q", names[0], base)
	}
	if err := durable.Replace(disk, file, []byte("content")); err != nil {
		t.Fatal(err)
	}
	if names := disk.Names("/state"); len(names) != 1 || names[0] != "record.json" {
		t.Errorf("left %q", names)
	}
}

func TestFailedWriteLeavesNothingAndNamesFile(t *testing.T) {
	for n := 1; n <= 2; n++ {
		disk := durabletest.New()
		disk.FailAt(n, syscall.ENOSPC)
		err := durable.Replace(disk, file, []byte("content"))
		if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), file) {
			t.Errorf("write %d: %v", n, err)
		}
		if names := disk.Names("/state"); len(names) != 0 {
			t.Errorf("write %d left %q", n, names)
		}
	}
}

func TestRemovalSurvivesPowerCut(t *testing.T) {
	disk := durabletest.New()
	disk.Put(file, []byte("content"))
	if err := durable.Remove(disk, file); err != nil {
		t.Fatal(err)
	}
	disk.PowerCut()
	if names := disk.Names("/state"); len(names) != 0 {
		t.Errorf("reappeared: %q", names)
	}
	if err := durable.Remove(disk, file); err != nil {
		t.Errorf("missing file: %v", err)
	}
	for n := 1; n <= 2; n++ {
		disk.Put(file, nil)
		disk.FailAt(n, syscall.EROFS)
		if err := durable.Remove(disk, file); !errors.Is(err, syscall.EROFS) {
			t.Errorf("write %d: %v", n, err)
		}
	}
}

func TestOSFileSystem(t *testing.T) {
	disk := durable.OS{}
	dir := filepath.Join(t.TempDir(), "records")
	if err := durable.MakeDir(disk, dir); err != nil {
		t.Fatal(err)
	}
	// With a name of 255 bytes, the temporary file's name must be truncated, because the prefix does
	// not fit. Replace must work all the same.
	for _, name := range []string{"record.json", strings.Repeat("x", 255)} {
		path := filepath.Join(dir, name)
		for _, content := range []string{"first", "second"} {
			if err := durable.Replace(disk, path, []byte(content)); err != nil {
				t.Fatal(err)
			}
			if got, err := disk.ReadFile(path); err != nil || string(got) != content {
				t.Errorf("read %q, %v", got, err)
			}
		}
	}
	if names, err := disk.ReadDir(dir); err != nil || len(names) != 2 {
		t.Errorf("names %q, %v", names, err)
	}
	if err := durable.Remove(disk, filepath.Join(dir, "record.json")); err != nil {
		t.Error(err)
	}
	missing := filepath.Join(dir, "missing")
	if err := durable.Replace(disk, filepath.Join(missing, "a"), nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("in a missing directory: %v", err)
	}
	if err := disk.SyncDir(missing); err == nil {
		t.Error("synced a missing directory")
	}
	if _, err := disk.ReadDir(missing); err == nil {
		t.Error("listed a missing directory")
	}
	inAFile := filepath.Join(dir, strings.Repeat("x", 255), "sub")
	if err := durable.MakeDir(disk, inAFile); err == nil {
		t.Error("created a directory in a file")
	}
}

func TestFailedDirectorySyncIsError(t *testing.T) {
	disk := durabletest.New()
	disk.FailAt(2, syscall.EIO)
	if err := durable.MakeDir(disk, "/state"); !errors.Is(err, syscall.EIO) {
		t.Error(err)
	}
}

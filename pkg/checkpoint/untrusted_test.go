package checkpoint

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

// A record decides what the driver does as root. So a record that another user could have written
// must be as unreadable as one with a wrong checksum. The devices in its file name stay blocked,
// but its content is never used.
func TestRecordWritableByOthersIsUnreadable(t *testing.T) {
	for name, plant := range map[string]func(t *testing.T, path string) error{
		"others may write to it": func(_ *testing.T, path string) error { return os.Chmod(path, 0o606) },
		"it is a link": func(t *testing.T, path string) error {
			t.Helper()
			elsewhere := filepath.Join(t.TempDir(), "record")
			return errors.Join(os.Rename(path, elsewhere), os.Symlink(elsewhere, path))
		},
		"it is a pipe": func(t *testing.T, path string) error { t.Helper(); durabletest.Pipe(t, path); return nil },
		"it is a socket": func(_ *testing.T, path string) error {
			return errors.Join(os.Remove(path), syscall.Mknod(path, syscall.S_IFSOCK|0o600, 0))
		},
		"it belongs to another user": func(t *testing.T, path string) error {
			t.Helper()
			if os.Geteuid() != 0 {
				t.Skip("SKIPPED: only root can make another user's file")
			}
			return os.Chown(path, 65534, 65534)
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "state")
			s, err := Open(dir, durable.OS{})
			if err != nil {
				t.Fatal(err)
			}
			held := Holder{Key: "gpu-0_kind", State: Applied}
			if err := errors.Join(s.Save(newRecord(gpu0)), s.SaveHolder(held), s.Mark(gpu0, "boot-1")); err != nil {
				t.Fatal(err)
			}
			entries, err := s.List()
			if err != nil || len(entries) != 1 {
				t.Fatal(entries, err)
			}
			for _, path := range []string{filepath.Join(s.claims, entries[0].file), filepath.Join(s.holders, "gpu-0_kind.json"),
				filepath.Join(s.marks, gpu0)} {
				if err := plant(t, path); err != nil {
					t.Fatal(err)
				}
			}

			var unreadable *statefile.UnreadableError
			if _, found, err := s.Load(uid); !found || !errors.As(err, &unreadable) {
				t.Errorf("record: %t, %v", found, err)
			}
			if _, found, err := s.Holder("gpu-0_kind"); !found || !errors.As(err, &unreadable) {
				t.Errorf("holder: %t, %v", found, err)
			}
			boot, marked, err := s.Marked(gpu0)
			if !marked || err != nil {
				t.Errorf("an untrusted mark must make the driver read the hardware: %t, %v", marked, err)
			}
			if boot == "boot-1" {
				t.Error("an untrusted mark must not make the mode ours")
			}
			// An admin can quarantine the untrusted record, and the store can then write a new one.
			if _, err := s.Quarantine(uid, time.Now()); err != nil {
				t.Error(err)
			}
			if _, err := s.QuarantineHolder("gpu-0_kind", time.Now()); err != nil {
				t.Error(err)
			}
			if err := errors.Join(s.Unmark(gpu0), s.Save(newRecord(gpu0)), s.SaveHolder(held)); err != nil {
				t.Error(err)
			}
			if _, found, err := s.Load(uid); !found || err != nil {
				t.Errorf("a record of our own: %t, %v", found, err)
			}
		})
	}
}

func TestDirectoryWritableByOthersIsRefused(t *testing.T) {
	for _, sub := range []string{"", "claims", "holders", "mig", "quarantine"} {
		dir := filepath.Join(t.TempDir(), "state")
		if _, err := Open(dir, durable.OS{}); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(filepath.Join(dir, sub), 0o777); err != nil {
			t.Fatal(err)
		}
		var untrusted *durable.UntrustedError
		if _, err := Open(dir, durable.OS{}); !errors.As(err, &untrusted) {
			t.Errorf("%q: %v", sub, err)
		}
	}
}

package cdi

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

func TestRemovedOrChangedSpecsAreWrittenAgain(t *testing.T) {
	claim := claimPrefix + string(claimUID) + suffix
	for name, c := range map[string]struct {
		damage  func(root string) error
		missing []string
	}{
		"base removed":  {func(root string) error { return os.Remove(filepath.Join(root, baseFile)) }, []string{baseFile}},
		"base altered":  {func(root string) error { return os.WriteFile(filepath.Join(root, baseFile), []byte("{}"), 0o600) }, nil},
		"claim removed": {func(root string) error { return os.Remove(filepath.Join(root, claim)) }, []string{claim}},
		"claim altered": {func(root string) error { return os.WriteFile(filepath.Join(root, claim), []byte("{}"), 0o600) }, nil},
		"claim emptied": {func(root string) error { return os.Truncate(filepath.Join(root, claim), 0) }, nil},
		"claim replaced": {func(root string) error {
			if err := os.WriteFile(filepath.Join(root, "x"), []byte("{}"), 0o600); err != nil {
				return err
			}
			return os.Rename(filepath.Join(root, "x"), filepath.Join(root, claim))
		}, nil},
		"directory removed": {os.RemoveAll, []string{baseFile, claim}},
		"directory removed and created again": {func(root string) error {
			return errors.Join(os.RemoveAll(root), os.MkdirAll(root, 0o750))
		}, []string{baseFile, claim}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			content := func() []byte {
				t.Helper()
				must(t, errors.Join(s.WriteBase(commonEdits()), writeClaim(s, claimUID)))
				base, baseErr := os.ReadFile(filepath.Join(s.root, baseFile))
				data, err := os.ReadFile(filepath.Join(s.root, claim))
				must(t, errors.Join(baseErr, err))
				return slices.Concat(base, data)
			}
			before := content()
			if missing := s.Missing([]types.UID{claimUID}); len(missing) > 0 {
				t.Errorf("intact specs are missing: %q", missing)
			}
			must(t, c.damage(s.root))
			if missing := s.Missing([]types.UID{claimUID}); !slices.Equal(missing, c.missing) {
				t.Errorf("missing are %q, want %q", missing, c.missing)
			}
			if !bytes.Equal(content(), before) {
				t.Error("the specs are not as before")
			}
		})
	}
}

// Another program's file at the path of one of our specs must not stop the specs of all claims.
func TestWhatIsNoFileAtASpecsPathIsReplaced(t *testing.T) {
	claim := claimPrefix + string(claimUID) + suffix
	for name, plant := range map[string]func(t *testing.T, path string){
		"a pipe": durabletest.Pipe,
		"a socket": func(t *testing.T, path string) {
			t.Helper()
			must(t, os.Remove(path))
			must(t, syscall.Mknod(path, syscall.S_IFSOCK|0o600, 0))
		},
		"a link": func(t *testing.T, path string) {
			t.Helper()
			must(t, os.Rename(path, path+".theirs"))
			must(t, os.Symlink(path+".theirs", path))
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			must(t, errors.Join(s.WriteBase(commonEdits()), writeClaim(s, claimUID)))
			paths := []string{filepath.Join(s.root, baseFile), filepath.Join(s.root, claim)}
			for _, path := range paths {
				plant(t, path)
			}
			var missing, still []string
			var err error
			durabletest.Returns(t, func() {
				missing = s.Missing([]types.UID{claimUID})
				err = errors.Join(s.WriteBase(commonEdits()), writeClaim(s, claimUID))
				still = s.Missing([]types.UID{claimUID})
			})
			must(t, err)
			if !slices.Equal(missing, []string{baseFile, claim}) || len(still) > 0 {
				t.Errorf("missing are %q, and after the repair %q", missing, still)
			}
			for _, path := range paths {
				if info, err := os.Lstat(path); err != nil || !info.Mode().IsRegular() {
					t.Errorf("%s: %v, %v", path, info.Mode(), err)
				}
			}
		})
	}
}

// A base spec that does not exist yet was not removed by another program.
func TestBaseSpecIsMissingOnlyOnceWritten(t *testing.T) {
	s := newStore(t)
	if missing := s.Missing(nil); len(missing) > 0 {
		t.Errorf("%q", missing)
	}
	must(t, NewStore(s.root).WriteBase(commonEdits()))
	must(t, s.WriteBase(commonEdits())) // changes nothing
	must(t, os.Remove(filepath.Join(s.root, baseFile)))
	if missing := s.Missing(nil); !slices.Equal(missing, []string{baseFile}) {
		t.Errorf("%q", missing)
	}
}

func TestOldTemporaryFilesAreRemoved(t *testing.T) {
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	old, young := filepath.Join(s.root, "."+baseFile+temporary+"1"), filepath.Join(s.root, "."+baseFile+temporary+"2")
	for _, path := range []string{old, young} {
		must(t, os.WriteFile(path, nil, 0o600))
	}
	must(t, os.Chtimes(old, time.Now(), time.Now().Add(-time.Hour)))
	must(t, s.RewriteBase(commonEdits()))
	if _, err := os.Stat(old); err == nil {
		t.Error("the old file still exists")
	}
	if _, err := os.Stat(young); err != nil {
		t.Error("the young file was removed, which another instance may be writing:", err)
	}
}

func TestClaimsListsUnfinishedSpecs(t *testing.T) {
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	uid := types.UID("killed")
	left := filepath.Join(s.root, "."+claimPrefix+string(uid)+suffix+ofClaim)
	leave := func() { must(t, os.WriteFile(left, []byte("{"), 0o600)) }
	gone := func(after string) {
		t.Helper()
		if _, err := os.Stat(left); err == nil {
			t.Error("the file still exists after", after)
		}
	}
	leave()
	if uids, err := s.Claims(); err != nil || !slices.Equal(uids, []types.UID{uid}) {
		t.Errorf("claims %v, %v", uids, err)
	}
	must(t, s.RemoveClaim(uid))
	gone("the removal of the claim's spec")
	leave()
	must(t, writeClaim(s, uid))
	gone("writing the claim's spec")
	if uids, err := s.Claims(); err != nil || !slices.Equal(uids, []types.UID{uid}) {
		t.Errorf("claims %v, %v", uids, err)
	}
}

func TestWriteDoesNotFollowPlantedSymlink(t *testing.T) {
	s := newStore(t)
	must(t, s.WriteBase(commonEdits()))
	elsewhere := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(elsewhere, []byte("theirs"), 0o600))
	must(t, os.Symlink(elsewhere, filepath.Join(s.root, "."+claimPrefix+string(claimUID)+suffix+ofClaim)))
	must(t, writeClaim(s, claimUID))
	if got, err := os.ReadFile(elsewhere); err != nil || string(got) != "theirs" {
		t.Errorf("the symlink's target now has %q, %v", got, err)
	}
	if info, err := os.Lstat(filepath.Join(s.root, claimPrefix+string(claimUID)+suffix)); err != nil || !info.Mode().IsRegular() {
		t.Errorf("the spec is %v, %v", info, err)
	}
}

package hook

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// needRoot skips the test unless it can run a program as another user.
func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can run a program as another user")
	}
}

// openDir returns a directory that all users can enter. Those of t.TempDir are the user's alone.
func openDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "") //nolint:usetesting // see above
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// program is a file that the kernel runs, as the hooks are.
const program = "/bin/true"

// A Pod with hostUsers: false runs the hook as an ordinary user of the host, who can enter neither
// the kubelet's directories nor run a file on a file system mounted noexec.
func TestChooseTakesThePlaceWhereEveryUserCanRunTheHook(t *testing.T) {
	needRoot(t)
	kubelet, noexec, good := filepath.Join(openDir(t), "kubelet"), openDir(t), openDir(t)
	if err := os.Mkdir(kubelet, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", noexec, "tmpfs", unix.MS_NOEXEC, "size=1m,mode=755"); err != nil {
		t.Skipf("SKIPPED: needs permission to mount: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(noexec, unix.MNT_DETACH) })
	below := func(base string) string { return filepath.Join(base, "hooks-1", "nvidia-cdi-hook") }

	got, rootOnly, passedOver := Choose(t.Context(), "/", program, []string{below(kubelet), below(noexec), below(good)})
	if got != below(good) || rootOnly {
		t.Errorf("chose %s, for root only: %t", got, rootOnly)
	}
	for _, why := range []string{"permission denied", "noexec"} {
		if passedOver == nil || !strings.Contains(passedOver.Error(), why) {
			t.Errorf("the reasons lack %q: %v", why, passedOver)
		}
	}
	if err := RemoveUnused([]string{kubelet, noexec, good}, got, func(string) bool { return false }); err != nil {
		t.Error(err)
	}
	if left := installed([]string{kubelet, noexec, good}); len(left) != 1 || left[0] != filepath.Dir(got) {
		t.Errorf("installed: %v", left)
	}

	got, rootOnly, passedOver = Choose(t.Context(), "/", program, []string{below(noexec), below(kubelet)})
	if got != below(kubelet) || !rootOnly || passedOver == nil {
		t.Errorf("without a place for all users: %s, for root only: %t, %v", got, rootOnly, passedOver)
	}
	got, rootOnly, passedOver = Choose(t.Context(), "/", program, []string{below(noexec)})
	if got != below(noexec) || !rootOnly || passedOver == nil {
		t.Errorf("without any place: %s, for root only: %t, %v", got, rootOnly, passedOver)
	}
}

// A directory that the host does not share with the plugin's container is no place for a hook.
func TestChoosePassesOverDirectoryOfTheContainerAlone(t *testing.T) {
	needRoot(t)
	hostRoot, container := openDir(t), openDir(t)
	shared := filepath.Join(hostRoot, "shared")
	alone := filepath.Join(container, "hooks-1", "nvidia-cdi-hook")
	got, rootOnly, _ := Choose(t.Context(), hostRoot, program, []string{alone, filepath.Join(shared, "hooks-1", "nvidia-cdi-hook")})
	if !strings.HasPrefix(got, shared) || !rootOnly {
		t.Errorf("chose %s, for root only: %t", got, rootOnly)
	}
}

func TestDirNameIsOfTheContents(t *testing.T) {
	dir := t.TempDir()
	one, two, same := filepath.Join(dir, "1"), filepath.Join(dir, "2"), filepath.Join(dir, "3")
	write(t, one, "version 1")
	write(t, two, "version 2")
	write(t, same, "version 1")
	names := map[string]bool{}
	for _, programs := range [][]string{{one, two}, {same, two}, {two, one}, {one, one}} {
		name, err := DirName(programs...)
		if err != nil || !strings.HasPrefix(name, dirPrefix) {
			t.Errorf("%q, %v", name, err)
		}
		names[name] = true
	}
	if len(names) != 3 {
		t.Errorf("names: %v", names)
	}
	if _, err := DirName(filepath.Join(dir, "none")); err == nil || !strings.Contains(err.Error(), "none") {
		t.Error(err)
	}
}

func TestRemoveUnusedKeepsWhatSpecsName(t *testing.T) {
	base, other := t.TempDir(), t.TempDir()
	for _, path := range []string{"hooks-1/nvidia-cdi-hook", "hooks-2/nvidia-cdi-hook", "hooks-3/gpu-mps", "tool", "lib/x"} {
		write(t, filepath.Join(base, path), "x")
	}
	write(t, filepath.Join(other, "hooks-2", "nvidia-cdi-hook"), "x")
	named := func(dir string) bool { return dir == filepath.Join(base, "hooks-2") }
	if err := RemoveUnused([]string{base, other}, filepath.Join(base, "hooks-1", "nvidia-cdi-hook"), named); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]bool{
		base + "/hooks-1": true, base + "/hooks-2": true, base + "/hooks-3": false, base + "/tool": true, base + "/lib": true,
		other + "/hooks-2": false,
	} {
		if _, err := os.Stat(path); (err == nil) != want {
			t.Errorf("%s: %v, want it there: %t", path, err, want)
		}
	}
}

func TestRemoveAllLeavesNothing(t *testing.T) {
	hostRoot := t.TempDir()
	own, theirs := filepath.Join("/", "var", "own"), filepath.Join("/", "opt", "bin")
	for _, path := range []string{
		own + "/hooks-1/nvidia-cdi-hook", own + "/hooks-1/.gpu-mps.tmp-x", theirs + "/hooks-1/gpu-mps", theirs + "/tool",
	} {
		write(t, filepath.Join(hostRoot, path), "x")
	}
	bases := []string{filepath.Join(hostRoot, own), filepath.Join(hostRoot, theirs), filepath.Join(hostRoot, "missing")}
	for range 2 { // the second time they are already gone
		if err := RemoveAll("/", bases, bases[:1]); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(bases[0]); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the driver's own directory is left: %v", err)
	}
	if left, err := os.ReadDir(bases[1]); err != nil || len(left) != 1 || left[0].Name() != "tool" {
		t.Errorf("in the admin's directory: %v, %v", left, err)
	}
}

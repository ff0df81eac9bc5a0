package driverroot

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// inRoot returns the path to which the kernel resolves path if root is the root directory. The path
// is empty if the file does not exist.
func inRoot(root, path string) (string, error) {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer func() { _ = unix.Close(dir) }()
	fd, err := unix.Openat2(dir, path, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS})
	if err != nil {
		return "", nil
	}
	defer func() { _ = unix.Close(fd) }()
	return os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
}

// The test expects that Resolve follows symlinks as the kernel does for a process in the driver
// root, and never leaves the driver root.
func FuzzResolve(f *testing.F) {
	for _, c := range [][3]string{
		{"/dir/file", "../dir", "a"}, {"/etc/passwd", "/", "a"}, {"../../../../etc", "..", "dir/b/a"}, {"a", "b", "a"},
		{"dir/b/b", "..", "a/"}, {"./dir/../dir//file", ".", "dir/b/b/../a"}, {"...", "\xff", "/../a"},
	} {
		f.Add(c[0], c[1], c[2])
	}
	root, err := filepath.EvalSymlinks(f.TempDir())
	if err != nil {
		f.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(root, "dir"), 0o700); err != nil {
		f.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "dir", "file"), nil, 0o600); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, first, second, path string) {
		for name, target := range map[string]string{"a": first, "dir/b": second} {
			link := filepath.Join(root, name)
			_ = os.Remove(link)
			if os.Symlink(target, link) != nil {
				return // invalid symlink target
			}
		}
		got, err := Resolve(root, path)
		if err != nil {
			return
		}
		if got != root && !strings.HasPrefix(got, root+"/") {
			t.Fatalf("%q resolves to %s, outside the root", path, got)
		}
		if info, err := os.Lstat(got); err != nil || info.Mode()&os.ModeSymlink != 0 {
			t.Fatalf("%q resolves to %s, which is a symlink or missing: %v", path, got, err)
		}
		want, err := inRoot(root, path)
		if err != nil {
			t.Fatal(err)
		}
		// Compare only clean paths: the kernel rejects a path through a file, such as file/..,
		// while Resolve cleans the path first.
		if want != "" && filepath.Clean("/"+path) == "/"+strings.TrimPrefix(path, "/") && got != want {
			t.Errorf("a links to %q, dir/b to %q: %q resolves to %s, want %s as for the kernel", first, second, path, got, want)
		}
	})
}

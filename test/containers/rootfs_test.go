package containers

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// programs are what the containers run in addition to the driver's programs.
var programs = []string{"/bin/bash", "/sbin/ldconfig", "/bin/cat", "/bin/grep", "/bin/mkdir", "/usr/bin/id", "/usr/bin/stat"}

// image has the files of a container by the user who owns them.
type image map[int]string

// newImage returns an image with the libraries that other programs need.
func newImage(t *testing.T, other ...string) image {
	t.Helper()
	dir := openDir(t)
	i := image{}
	for _, owner := range []int{0, mappedRoot} {
		i[owner] = filepath.Join(dir, strconv.Itoa(owner))
		makeRootfs(t, i[owner], owner, other...)
	}
	return i
}

// unpack makes the folder root with the image's files. They are links, since runtimes and hooks
// replace files and write into none.
func (i image) unpack(t *testing.T, root string, owner int) {
	t.Helper()
	must(t, exec.CommandContext(t.Context(), "cp", "-a", "--link", i[owner], root).Run())
}

// makeRootfs fills the folder root with what a Debian image has: its loader, C library, ldd, and
// programs with the libraries that they and other need. All files belong to the user owner, who is
// root in the container.
func makeRootfs(t *testing.T, root string, owner int, other ...string) {
	t.Helper()
	for _, dir := range []string{
		"dev", "etc/ld.so.conf.d", "proc", "sys", "tmp", "usr/bin", "usr/sbin", "usr/lib/x86_64-linux-gnu", "usr/lib64",
	} {
		must(t, os.MkdirAll(filepath.Join(root, dir), 0o755))
	}
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} {
		must(t, os.Symlink("usr/"+dir, filepath.Join(root, dir)))
	}
	must(t, os.WriteFile(filepath.Join(root, "etc/ld.so.conf"), []byte("include /etc/ld.so.conf.d/*.conf\n"), 0o644))
	must(t, os.WriteFile(filepath.Join(root, "etc/debian_version"), []byte("12\n"), 0o644))
	must(t, os.Symlink("bash", filepath.Join(root, "usr/bin/sh")))
	for _, program := range append(programs, "/usr/bin/ldd") {
		copyInto(t, root, program)
	}
	for _, program := range append(programs, other...) {
		for _, library := range librariesOf(t, program) {
			copyInto(t, root, library)
		}
	}
	must(t, exec.CommandContext(t.Context(), "chown", "-R", "-h", fmt.Sprintf("%d:%d", owner, owner), root).Run())
}

// librariesOf lists the paths of the loader and the libraries that a program needs, but not those
// of the driver.
func librariesOf(t *testing.T, program string) (paths []string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "ldd", program).Output()
	if err != nil {
		t.Fatalf("ldd %s: %v", program, err)
	}
	for line := range strings.Lines(string(out)) {
		for _, word := range strings.Fields(line) {
			if strings.HasPrefix(word, "/") {
				paths = append(paths, word)
			}
		}
	}
	return paths
}

func copyInto(t *testing.T, root, path string) {
	t.Helper()
	to := filepath.Join(root, path)
	if _, err := os.Stat(to); err == nil {
		return
	}
	must(t, os.MkdirAll(filepath.Dir(to), 0o755))
	copyFile(t, path, to)
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	in, err := os.Open(from)
	must(t, err)
	defer func() { _ = in.Close() }()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o755)
	must(t, err)
	_, err = io.Copy(out, in)
	must(t, err)
	must(t, out.Close())
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

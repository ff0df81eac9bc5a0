package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// The packages of Debian 12 have lib and lib64, those of Debian 13 only usr/lib and usr/lib64. Both
// give a root in which a program finds its linker by the same path.
func TestCLibraryOfEachDebian(t *testing.T) {
	for name, c := range map[string]struct{ arch, linker, libcDir string }{
		"12, amd64": {"amd64", "lib64/ld-linux-x86-64.so.2", "lib/x86_64-linux-gnu"},
		"13, amd64": {"amd64", "usr/lib64/ld-linux-x86-64.so.2", "usr/lib/x86_64-linux-gnu"},
		"12, arm64": {"arm64", "lib/ld-linux-aarch64.so.1", "lib/aarch64-linux-gnu"},
		"13, arm64": {"arm64", "usr/lib/ld-linux-aarch64.so.1", "usr/lib/aarch64-linux-gnu"},
	} {
		t.Run(name, func(t *testing.T) {
			bin, dir := t.TempDir(), filepath.Join(t.TempDir(), "c-library")
			write(t, filepath.Join(bin, "apt-get"), []byte(`#!/bin/sh
case "$*" in
*--print-uris*) echo "'http://debian/libc6' libc6_2_all.deb 1 SHA256:1" ;;
*" download "*) touch libc6_2_all.deb ;;
esac
`))
			write(t, filepath.Join(bin, "dpkg-deb"), []byte(`#!/bin/sh
mkdir -p "$3/usr/lib/misc" "$3/$(dirname "$LINKER")" "$3/$LIBC_DIR" && touch "$3/$LINKER" "$3/$LIBC_DIR/libc.so.6"
`))
			unpack := func() {
				cmd := exec.CommandContext(t.Context(), "../c-library.sh", c.arch, dir)
				cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "LINKER="+c.linker, "LIBC_DIR="+c.libcDir)
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
			}
			unpack()
			linker := map[string]string{"amd64": "lib64/ld-linux-x86-64.so.2", "arm64": "lib/ld-linux-aarch64.so.1"}[c.arch]
			root := filepath.Join(dir, "root")
			check := func() {
				if _, err := os.Stat(filepath.Join(root, linker)); err != nil {
					t.Error(err)
				}
				_, inImage, err := findLibrary(root, "libc.so.6")
				if want := "/lib/" + triplets[c.arch] + "/libc.so.6"; err != nil || inImage != want {
					t.Errorf("libc.so.6 is %s in the image, want %s: %v", inImage, want, err)
				}
			}
			check()
			// An earlier version of the script made no links.
			for _, link := range []string{"lib", "lib64"} {
				path := filepath.Join(root, link)
				if info, err := os.Lstat(path); err == nil && info.Mode().Type() == os.ModeSymlink {
					if err := os.Remove(path); err != nil {
						t.Fatal(err)
					}
				}
			}
			unpack()
			check()
		})
	}
}

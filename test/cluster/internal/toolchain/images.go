package toolchain

import (
	"context"
	"debug/elf"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/image"
)

// These are the full names of the images that every node has.
const (
	PauseImage = "localhost/pause:1"
	TestImage  = "localhost/testpod:1"
)

// BuildImages writes the images that every node needs and returns the paths of their archives.
func (c *Cache) BuildImages(ctx context.Context, source string, progress *Progress) ([]string, error) {
	module := filepath.Dir(filepath.Dir(source))
	libraries, err := glibcFiles()
	if err != nil {
		return nil, err
	}
	identity, err := goIdentity(ctx, module)
	if err != nil {
		return nil, err
	}
	inputs := []string{
		filepath.Join(source, "cmd/pause/main.go"),
		filepath.Join(source, "image/image.go"),
		filepath.Join(source, "internal/toolchain/images.go"),
	} // the image changes only with these
	digest, err := hashRelative(module, inputs...)
	if err != nil {
		return nil, err
	}
	libraryIdentity, err := identify(libraries)
	if err != nil {
		return nil, err
	}
	dir, err := c.Ensure(ctx, "images", Key(identity, digest, libraryIdentity), func(dir string) error {
		progress.Printf("building images %s and %s", PauseImage, TestImage)
		if err := writePause(ctx, module, dir, progress); err != nil {
			return err
		}
		busybox, err := c.unpackDebian(ctx, progress, "busybox-static")
		if err != nil {
			return err
		}
		return writeTestImage(filepath.Join(dir, "testpod.tar"), filepath.Join(busybox, "bin/busybox"), libraries)
	})
	return []string{filepath.Join(dir, "pause.tar"), filepath.Join(dir, "testpod.tar")}, err
}

func writePause(ctx context.Context, module, dir string, progress *Progress) error {
	program := filepath.Join(dir, "pause")
	build := goBuild{
		name:     "pause",
		dir:      module,
		packages: []string{"./test/cluster/cmd/pause"},
		ldflags:  stripped,
		output:   program,
		env:      []string{"CGO_ENABLED=0"},
	}
	if err := build.run(ctx, progress); err != nil {
		return err
	}
	pause := &image.Image{Config: v1.ImageConfig{Entrypoint: []string{"/pause"}}}
	pause.File("/pause", program)
	return writeImage(pause, filepath.Join(dir, "pause.tar"), PauseImage)
}

// baseLayout returns an image with the folders of a Debian file system. It has almost no files.
func baseLayout() *image.Image {
	layout := &image.Image{}
	layout.Dir("/tmp", 0o777|fs.ModeSticky)
	layout.Dir("/var/tmp", 0o777|fs.ModeSticky)
	for _, dir := range []string{"dev", "proc", "sys", "run", "root", "usr/bin", "usr/sbin", "usr/lib", "usr/lib64"} {
		layout.Dir(dir, 0o755)
	}
	for _, top := range []string{"bin", "sbin", "lib", "lib64"} {
		layout.Link(top, "usr/"+top)
	}
	layout.Bytes("/etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"))
	layout.Bytes("/etc/group", 0o644, []byte("root:x:0:\nnogroup:x:65534:\n"))
	return layout
}

// writeTestImage creates an image like a small Debian: a shell with the usual commands, and glibc
// for programs that load libraries at run time.
func writeTestImage(archive, busybox string, libraries []library) error {
	applets, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		return fmt.Errorf("list busybox's commands: %w", err)
	}
	test := baseLayout()
	test.Config = v1.ImageConfig{Env: []string{"PATH=/usr/local/bin:/usr/bin:/usr/sbin"}, Cmd: []string{"/bin/sh"}}
	test.File("/usr/bin/busybox", busybox)
	for _, applet := range strings.Fields(string(applets)) {
		if applet != "busybox" && applet != "ldconfig" {
			test.Link("/usr/bin/"+applet, "busybox")
		}
	}
	for _, library := range libraries {
		test.File(library.image, library.host)
	}
	return writeImage(test, archive, TestImage)
}

func writeImage(content *image.Image, archive, name string) error {
	file, err := os.Create(archive)
	if err != nil {
		return fmt.Errorf("write image %s: %w", name, err)
	}
	if err := content.Write(file, name); err != nil {
		_ = file.Close()
		return err
	}
	return file.Close()
}

// library is a file of the host's glibc and its path in an image whose /lib is a link to /usr/lib.
type library struct {
	host, image string
}

// identify returns a text that differs whenever one of the library files differs.
func identify(libraries []library) (string, error) {
	var parts []string
	for _, library := range libraries {
		info, err := os.Stat(library.host)
		if err != nil {
			return "", fmt.Errorf("read the host's glibc: %w", err)
		}
		parts = append(parts, library.host, info.ModTime().UTC().String(), fmt.Sprint(info.Size()))
	}
	return Key(parts...), nil
}

// glibcFiles finds the dynamic loader and the usual libraries of the host's shell.
func glibcFiles() ([]library, error) {
	loader, err := interpreter("/bin/sh")
	if err != nil {
		return nil, err
	}
	files := []library{{host: loader, image: "/usr" + strings.TrimPrefix(loader, "/usr")}}
	libc, err := filepath.Glob("/lib/*-linux-gnu*/libc.so.6")
	if err != nil || len(libc) == 0 {
		return nil, fmt.Errorf("find glibc in /lib/*-linux-gnu*: no libc.so.6 there (a Debian-like host is needed)")
	}
	for _, name := range []string{"libc.so.6", "libdl.so.2", "libpthread.so.0", "libm.so.6", "librt.so.1"} {
		host := filepath.Join(filepath.Dir(libc[0]), name)
		if _, err := os.Stat(host); err != nil {
			continue // from glibc 2.34 on, libc contains this library
		}
		files = append(files, library{host: host, image: "/usr" + host})
	}
	if _, err := os.Stat("/sbin/ldconfig"); err == nil {
		files = append(files, library{host: "/sbin/ldconfig", image: "/usr/sbin/ldconfig"})
	}
	return files, nil
}

// interpreter returns the path of the dynamic loader that the ELF file program names.
func interpreter(program string) (string, error) {
	file, err := elf.Open(program)
	if err != nil {
		return "", fmt.Errorf("find the dynamic loader: %w", err)
	}
	defer func() { _ = file.Close() }()
	for _, segment := range file.Progs {
		if segment.Type != elf.PT_INTERP {
			continue
		}
		name := make([]byte, segment.Filesz)
		if _, err := segment.ReadAt(name, 0); err != nil {
			return "", fmt.Errorf("find the dynamic loader: %w", err)
		}
		return strings.TrimRight(string(name), "\x00"), nil
	}
	return "", fmt.Errorf("find the dynamic loader: %s is statically linked", program)
}

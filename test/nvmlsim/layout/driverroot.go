package layout

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// keepSources copies the built libraries and programs into the root folder of a simulated node. The
// driver can then be reloaded or installed later without the build folder.
func keepSources(root string, s Sources) error {
	files := filepath.Join(root, "files")
	if err := empty(files); err != nil {
		return err
	}
	if s.Library == "" {
		return errors.New("no NVML library: build it with make -C test/nvmlsim, and pass its path with --lib")
	}
	if err := copyFile(s.Library, filepath.Join(files, "libnvidia-ml.so.1"), 0o644); err != nil {
		return err
	}
	standins, err := filepath.Glob(filepath.Join(filepath.Dir(s.Library), "standin", "*.so.1"))
	if err != nil {
		return err
	}
	if len(standins) == 0 {
		return fmt.Errorf("no stand-in libraries in %s: build them with make -C test/nvmlsim", filepath.Join(filepath.Dir(s.Library), "standin"))
	}
	for _, path := range standins {
		if err := copyFile(path, filepath.Join(files, filepath.Base(path)), 0o644); err != nil {
			return err
		}
	}
	for _, name := range cudaPrograms {
		if err := copyFile(filepath.Join(filepath.Dir(s.Library), "standin", cudaPrograms[0]), filepath.Join(files, name), 0o755); err != nil {
			return fmt.Errorf("stand-ins of CUDA programs: build them with make -C test/nvmlsim: %w", err)
		}
	}
	if s.SMI != "" {
		if err := copyFile(s.SMI, filepath.Join(files, "nvidia-smi"), 0o755); err != nil {
			return err
		}
	}
	if s.Hook != "" {
		return copyFile(s.Hook, filepath.Join(root, "bin", "nvidia-cdi-hook"), 0o755)
	}
	return nil
}

// moveLdconfig copies ldconfig to bin/ldconfig of the layout's folder, if the node's host does not
// have it in /sbin. At a second boot the copy is there, and the original is hidden.
func (c *Config) moveLdconfig() error {
	moved := c.path("bin", "ldconfig")
	if _, err := os.Stat(moved); err == nil || !c.Node.NoLdconfig || !c.MountRoot {
		return nil
	}
	return copyFile(ldconfig, moved, 0o755)
}

// applyDriverRoot installs the driver's files under names with the current driver version, and
// removes files of other versions. If no driver is installed, it empties the driver root.
func (c *Config) applyDriverRoot(v view) error {
	if c.NoFiles || (c.Kind == Container && !v.loaded) {
		return empty(c.DriverRoot())
	}
	libraries := c.path("driver", c.LibraryDir)
	if err := os.MkdirAll(libraries, 0o755); err != nil {
		return err
	}
	if err := c.removeOtherVersions(libraries, v.version); err != nil {
		return err
	}
	sources, err := filepath.Glob(c.path("files", "*.so.1"))
	if err != nil {
		return err
	}
	for _, source := range sources {
		name := strings.TrimSuffix(filepath.Base(source), ".1") // such as libcuda.so
		versioned := name + "." + v.version
		if err := copyFile(source, filepath.Join(libraries, versioned), 0o644); err != nil {
			return err
		}
		if err := link(versioned, filepath.Join(libraries, name+".1")); err != nil {
			return err
		}
	}
	if err := link("libcuda.so.1", filepath.Join(libraries, "libcuda.so")); err != nil {
		return err
	}
	if err := c.linkState(v.version); err != nil {
		return err
	}
	return c.installPrograms()
}

// cudaPrograms are the names under which the nvmlsim-cuda binary is installed. The binary chooses
// by its name which program it stands in for.
var cudaPrograms = []string{"nvmlsim-cuda", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"}

func (c *Config) installPrograms() error {
	for _, name := range append([]string{"nvidia-smi"}, cudaPrograms...) {
		source := c.path("files", name)
		if _, err := os.Stat(source); errors.Is(err, os.ErrNotExist) {
			continue // the layout has no nvidia-smi
		}
		if err := copyFile(source, c.path("driver", c.binDir(), name), 0o755); err != nil {
			return err
		}
	}
	return nil
}

func (c *Config) firmware() string { return c.path("driver", "lib", "firmware", "nvidia") }

func (c *Config) removeOtherVersions(libraries, version string) error {
	files, err := filepath.Glob(filepath.Join(libraries, "lib*.so.*.*"))
	if err != nil {
		return err
	}
	for _, file := range files {
		if !strings.HasSuffix(file, ".so."+version) {
			if err := os.Remove(file); err != nil {
				return err
			}
		}
	}
	folders, err := filepath.Glob(filepath.Join(c.firmware(), "*"))
	if err != nil {
		return err
	}
	for _, folder := range folders {
		if filepath.Base(folder) != version {
			if err := os.RemoveAll(folder); err != nil {
				return err
			}
		}
	}
	return nil
}

// linkState creates a hard link to the state file in the driver's firmware folder. A correct link
// is kept, because running containers may use it.
func (c *Config) linkState(version string) error {
	target := filepath.Join(c.firmware(), version, StateFile)
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}
	have, errHave := os.Stat(target)
	want, err := os.Stat(StatePath(c.root))
	if err != nil {
		return err
	}
	if errHave == nil && os.SameFile(have, want) {
		return nil
	}
	if err := os.RemoveAll(target); err != nil {
		return err
	}
	return os.Link(StatePath(c.root), target)
}

// copyFile copies the file at from to the path to, unless an equal file is there. It replaces an
// old file by rename, because a process may have mapped the old file.
func copyFile(from, to string, mode os.FileMode) error {
	if same(from, to, mode) {
		return nil
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	out, err := os.OpenFile(to+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	if err := errors.Join(err, out.Chmod(mode), out.Close()); err != nil {
		return fmt.Errorf("copy %s to %s: %w", from, to, err)
	}
	return os.Rename(to+".new", to)
}

func same(a, b string, mode os.FileMode) bool {
	info, err := os.Lstat(b)
	if err != nil || info.Mode() != mode {
		return false
	}
	one, errOne := os.ReadFile(a)
	other, errOther := os.ReadFile(b)
	return errOne == nil && errOther == nil && string(one) == string(other)
}

// link creates or changes a symbolic link by rename, so that path exists at every moment.
func link(target, path string) error {
	if have, err := os.Readlink(path); err == nil && have == target {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	fresh := path + ".new"
	if err := os.RemoveAll(fresh); err != nil {
		return err
	}
	if err := os.Symlink(target, fresh); err != nil {
		return err
	}
	return os.Rename(fresh, path)
}

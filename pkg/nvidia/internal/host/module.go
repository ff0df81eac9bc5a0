package host

import (
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

// ModuleLoaded reports whether the kernel has the NVIDIA driver's module.
func ModuleLoaded(p nvidia.Paths) bool {
	return hostfile.Exists(filepath.Join(p.Proc, "driver", "nvidia", "version")) || hostfile.Exists(filepath.Join(p.Sysfs, "module", "nvidia"))
}

// DriverLoad returns a value that changes each time the driver's kernel module is loaded. It
// consists of inodes and birth times of the driver's directories in /proc and sysfs. It is empty if
// no driver is loaded.
func DriverLoad(p nvidia.Paths) string {
	p = p.WithDefaults()
	var found string
	for _, path := range []string{filepath.Join(p.Sysfs, "module", "nvidia"), filepath.Join(p.Proc, "driver", "nvidia")} {
		var s unix.Statx_t
		if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_INO|unix.STATX_BTIME, &s); err == nil {
			found += fmt.Sprintf("%d.%d.%d ", s.Ino, s.Btime.Sec, s.Btime.Nsec)
		}
	}
	if found == "" {
		return ""
	}
	return found + hostfile.ReadTrimmed(filepath.Join(p.Proc, "driver", "nvidia", "version"))
}

// Package onecard hides all GPUs but one from a program of the driver. NVIDIA's tools open every
// GPU they see, even if asked about one. Each sleeping GPU takes time to open, and one lost GPU
// makes the tools fail.
//
// The package needs no C library, so that a statically linked program can use it.
package onecard

import (
	"os"
	"path/filepath"
	"regexp"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/thread"
)

var gpuNode = regexp.MustCompile(`^nvidia[0-9]+$`)

// Others lists the device nodes of all GPUs for which keep is false. keep gets names such as
// nvidia0. A library may look in /dev or in the dev of another root, so Others lists the device
// nodes of both.
func Others(devRoot string, keep func(name string) bool) []string {
	dirs := []string{"/dev"}
	if own := filepath.Join(devRoot, "dev"); own != dirs[0] {
		dirs = append(dirs, own)
	}
	var nodes []string
	for _, dir := range dirs {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			if gpuNode.MatchString(e.Name()) && !keep(e.Name()) {
				nodes = append(nodes, filepath.Join(dir, e.Name()))
			}
		}
	}
	return nodes
}

// Hide calls f on a thread that has its own mount namespace, in which the device nodes exist but
// cannot be opened. The device nodes stay visible, because the driver's library, running as root,
// would create missing ones. If hiding fails, f runs anyway, with all GPUs, which usually works.
func Hide(nodes []string, f func()) {
	if len(nodes) == 0 {
		f()
		return
	}
	thread.OnSpare(func() {
		_ = hide(nodes)
		f()
	})
}

func hide(nodes []string) error {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return err
	}
	// Mounts made by this thread must not appear in other namespaces. Unmounts made elsewhere must
	// take effect here.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return err
	}
	for _, node := range nodes {
		if err := unix.Mount(node, node, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		if err := unix.Mount("", node, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_NODEV, ""); err != nil {
			return err
		}
	}
	return nil
}

// Package onecard shows a program of the driver's one GPU alone. NVIDIA's tools open every card that they see, also where they are asked about one: each that sleeps
// costs time, and one that is lost makes them give up on all.
//
// It needs no C library, so that a statically linked program can use it too.
package onecard

import (
	"os"
	"path/filepath"
	"regexp"

	"golang.org/x/sys/unix"
)

var gpuNode = regexp.MustCompile(`^nvidia[0-9]+$`)

// Others are the device nodes of all GPUs but those that keep says, wherever a library may look for them: in /dev, and in dev of another root. keep gets
// names such as nvidia0.
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

// Hide gives the calling thread, which must never be unlocked, a view of the file system of its own in which the nodes are there and cannot be opened. They
// stay there because the driver's library, run by root, makes those anew that are missing.
func Hide(nodes []string) error {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return &os.PathError{Op: "leave the mount namespace of", Path: "/", Err: err}
	}
	// What is mounted here must show nowhere else; what is unmounted elsewhere must go here too.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return &os.PathError{Op: "make a slave mount of", Path: "/", Err: err}
	}
	for _, node := range nodes {
		if err := unix.Mount(node, node, "", unix.MS_BIND, ""); err != nil {
			return &os.PathError{Op: "mount over", Path: node, Err: err}
		}
		if err := unix.Mount("", node, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_NODEV, ""); err != nil {
			return &os.PathError{Op: "mount without devices", Path: node, Err: err}
		}
	}
	return nil
}

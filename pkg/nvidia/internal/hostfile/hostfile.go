// Package hostfile answers simple questions about one file or path.
package hostfile

import (
	"os"
	"strings"
)

// ReadTrimmed returns a file's text without surrounding white space. It is empty if the file cannot
// be read.
func ReadTrimmed(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// Below returns the part of path below root. ok is false if path is not root and not below root.
func Below(root, path string) (rest string, ok bool) {
	if root == "/" {
		return path, strings.HasPrefix(path, "/")
	}
	if path == root {
		return "/", true
	}
	return strings.CutPrefix(path, root+"/")
}

// IsCharDevice reports whether path is a character device. It does not follow symlinks, because
// nvcdi does not either, and both must find the same device nodes.
func IsCharDevice(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// Exists reports whether path exists. It follows symlinks.
func Exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

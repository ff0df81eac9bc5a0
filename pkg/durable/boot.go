package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// BootID returns the kernel's ID of this boot. Memory and hardware settings of an earlier boot are
// gone, while files survive. If procRoot lacks the file, BootID reads this process's /proc.
func BootID(procRoot string) (string, error) {
	const file = "sys/kernel/random/boot_id"
	raw, err := os.ReadFile(filepath.Join(procRoot, file))
	if errors.Is(err, fs.ErrNotExist) {
		raw, err = os.ReadFile(filepath.Join("/proc", file))
	}
	if err != nil {
		return "", fmt.Errorf("read the kernel's boot ID: %w", err)
	}
	return strings.TrimSpace(string(raw)), nil
}

package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// BootID tells this boot of the node from any other: what is on the disk may be of an earlier one, which what is in memory, or was told to the hardware, did not
// outlive. A proc that does not have it (an unusual mount) is no reason to fail: the process's own has.
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

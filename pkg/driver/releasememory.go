package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// releaseMemory keeps on the disk why the Node asked for the hardware when it was last seen. A plugin that starts in the middle of a driver's change, with
// no API server to ask, must not take the hardware.
type releaseMemory struct {
	disk   durable.FS
	path   string
	failed func(error)
}

func newReleaseMemory(stateDir string, failed func(error)) *releaseMemory {
	return &releaseMemory{disk: durable.OS{}, path: filepath.Join(stateDir, "release"), failed: failed}
}

// Last is empty if the Node did not ask.
func (m *releaseMemory) Last() (string, error) {
	if m == nil {
		return "", nil
	}
	raw, err := m.disk.ReadFile(m.path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read what the Node asked for: %w", err)
	}
	return string(raw), nil
}

// Keep is told of each change.
func (m *releaseMemory) Keep(reason string) {
	if m == nil {
		return
	}
	var err error
	if reason == "" {
		err = durable.Remove(m.disk, m.path)
	} else {
		err = durable.Replace(m.disk, m.path, []byte(reason))
	}
	if err != nil {
		m.failed(fmt.Errorf("keep in %s what the Node asks for: %w", m.path, err))
	}
}

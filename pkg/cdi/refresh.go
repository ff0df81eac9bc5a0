package cdi

import (
	"fmt"
	"path/filepath"

	"tags.cncf.io/container-device-interface/specs-go"
)

// RewriteBase is WriteBase, but writes the file even if it says the same already. Container runtimes keep parsed specs, with the numbers that the device
// nodes had at the first injection, until something changes in the directory: after a change of device nodes, that something is this.
func (s *Store) RewriteBase(edits specs.ContainerEdits) error {
	data, err := encode(baseSpec(edits))
	if err != nil {
		return fmt.Errorf("CDI spec %s: %w", baseFile, err)
	}
	defer s.changing(baseFile)()
	if err := replace(filepath.Join(s.root, baseFile), data); err != nil {
		return fmt.Errorf("write CDI spec: %w", err)
	}
	s.wrote(baseFile, data, true)
	return nil
}

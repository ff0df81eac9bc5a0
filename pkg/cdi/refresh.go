package cdi

import (
	"fmt"
	"path/filepath"

	"tags.cncf.io/container-device-interface/specs-go"
)

// RewriteBase writes the base spec even if it is unchanged. Container runtimes cache the device
// numbers that they read at the first injection, until a file in the CDI directory changes. So a
// caller that finds changed device nodes must call RewriteBase.
func (s *Store) RewriteBase(edits specs.ContainerEdits) error {
	data, err := encode(baseSpec(edits))
	if err != nil {
		return fmt.Errorf("CDI spec %s: %w", baseFile, err)
	}
	defer s.lockFile(baseFile)()
	if err := replace(filepath.Join(s.root, baseFile), data); err != nil {
		return fmt.Errorf("write CDI spec: %w", err)
	}
	s.recordWrite(baseFile, data, true)
	return nil
}

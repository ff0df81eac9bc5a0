package container

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// Whatever stands in a container's configuration, it is read as that of its container, or refused.
func FuzzConfig(f *testing.F) {
	for _, config := range []string{`{"root":{"path":"rootfs"}}`, `{"root":{"path":""}}`, `{"root":null}`, `{`, ``, `null`, `{"root":{"path":"../../.."},"linux":{"devices":[{"path":"x"}]}}`, `{"hooks":{"createContainer":[{}]}}`} {
		f.Add([]byte(config))
	}
	bundle := f.TempDir()
	state := []byte(`{"id":"c1","bundle":"` + bundle + `"}`)
	f.Fuzz(func(t *testing.T, config []byte) {
		if err := os.WriteFile(filepath.Join(bundle, "config.json"), config, 0o600); err != nil {
			t.Fatal(err)
		}
		if c, err := Read(bytes.NewReader(state)); err == nil && c.State.ID != "c1" {
			t.Errorf("%q is that of container %q", config, c.State.ID)
		}
	})
}

// No state makes a container whose configuration is not in a bundle.
func FuzzState(f *testing.F) {
	f.Add([]byte(`{"id":"c1","bundle":"/nowhere"}`))
	f.Add([]byte(`{"bundle":[]}`))
	f.Fuzz(func(t *testing.T, state []byte) {
		if c, err := Read(bytes.NewReader(state)); err == nil {
			if _, err := os.Stat(filepath.Join(c.State.Bundle, "config.json")); err != nil {
				t.Error(err)
			}
		}
	})
}

package container

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// Whatever config.json holds, Read fails or returns the container that the state names.
func FuzzConfig(f *testing.F) {
	for _, config := range []string{`{"root":{"path":"rootfs"}}`, `{"root":{"path":""}}`, `{"root":null}`, `{`, ``,
		`null`, `{"root":{"path":"../../.."},"linux":{"devices":[{"path":"x"}]}}`, `{"hooks":{"createContainer":[{}]}}`} {
		f.Add([]byte(config))
	}
	bundle := f.TempDir()
	state := []byte(`{"id":"c1","bundle":"` + bundle + `"}`)
	f.Fuzz(func(t *testing.T, config []byte) {
		if err := os.WriteFile(filepath.Join(bundle, "config.json"), config, 0o600); err != nil {
			t.Fatal(err)
		}
		if c, err := Read(bytes.NewReader(state)); err == nil && c.State.ID != "c1" {
			t.Errorf("%q is accepted for container %q", config, c.State.ID)
		}
	})
}

// Read succeeds only if the state names a bundle directory that has a config.json.
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

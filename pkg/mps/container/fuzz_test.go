package container

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// Whatever stands in a container's configuration, who reads it has a root to work in, or an error.
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
		if c, err := Read(bytes.NewReader(state)); err == nil && !filepath.IsAbs(c.Root()) {
			t.Errorf("%q has root %q", config, c.Root())
		}
	})
}

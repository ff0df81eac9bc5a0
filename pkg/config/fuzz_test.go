package config

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"sigs.k8s.io/yaml"
)

// A configuration that Load accepts from a file must be the same after it is written to a file and
// loaded again.
func FuzzFile(f *testing.F) {
	for _, text := range []string{
		"", "driverRoot: /x\nclaimGrace: 1m\n", "kubeApiQps: .inf", "kubeApiQps: 'nan'", "kubeApiBurst: 1e3", "settings: /dev/null",
		"nodeName: [a]", "a: &a {b: *a}", "claimGrace: -9223372036854775808ns", "settings: null", "cdiRoot: \"/\\0\"", "---\n---",
	} {
		f.Add([]byte(text))
	}
	path := filepath.Join(f.TempDir(), "config.yaml")
	load := func(t *testing.T, raw []byte) (*Config, error) {
		t.Helper()
		if err := os.WriteFile(path, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		return Load("fuzz", []string{"--config", path}, environment{}.lookup, nil)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := load(t, raw)
		if err != nil {
			return
		}
		all := map[string]string{}
		for _, field := range c.Fields() {
			all[field.Key()] = field.Value.String()
		}
		written, err := yaml.Marshal(all)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := load(t, written); err != nil || !reflect.DeepEqual(again, c) {
			t.Errorf("%q is %+v, and %+v when it is read again, %v", raw, c, again, err)
		}
	})
}

package memorylimit

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestReadErrorNamesUnreadablePart(t *testing.T) {
	for name, c := range map[string]struct{ state, config, want string }{
		"no state":             {"", "", "container's state"},
		"not JSON":             {"state", "", "container's state"},
		"no bundle":            {`{"id":"c1"}`, "", "no bundle"},
		"relative bundle":      {`{"id":"c1","bundle":"x"}`, "", "no bundle"},
		"no configuration":     {`{"id":"c1","bundle":"BUNDLE"}`, "", "open its configuration"},
		"broken configuration": {`{"id":"c1","bundle":"BUNDLE"}`, "{", "read its configuration"},
		"empty configuration":  {`{"id":"c1","bundle":"BUNDLE"}`, " ", "read its configuration"},
	} {
		t.Run(name, func(t *testing.T) {
			bundle := t.TempDir()
			if c.config != "" {
				if err := os.WriteFile(filepath.Join(bundle, "config.json"), []byte(c.config), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			_, err := readContainer(strings.NewReader(strings.ReplaceAll(c.state, "BUNDLE", bundle)))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v: %q is missing", err, c.want)
			}
		})
	}
}

package driver

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
)

// placed places the hooks of a plugin version, whose program is source, and returns their path.
func placed(t *testing.T, cfg config.Config, source string) string {
	t.Helper()
	cfg.HookSource, cfg.HookPath = source, ""
	PlaceHooks(t.Context(), &cfg)
	if _, err := os.Stat(cfg.HookPath); err != nil {
		t.Error(err)
	}
	found := cfg
	found.HookPath = ""
	if FindHooks(&found); found.HookPath != cfg.HookPath {
		t.Errorf("FindHooks found %s, PlaceHooks chose %s", found.HookPath, cfg.HookPath)
	}
	return cfg.HookPath
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func TestHooksOfAnEarlierVersionStayWhileASpecOrRecordNamesThem(t *testing.T) {
	cfg := newNode(t).cfg
	specOf := func(path string) specs.ContainerEdits {
		return specs.ContainerEdits{Hooks: []*specs.Hook{{HookName: "createContainer", Path: path}}}
	}
	first := placed(t, *cfg, "/bin/true")
	if err := cdi.NewStore(cfg.CDIRoot).WriteBase(specOf(first)); err != nil {
		t.Fatal(err)
	}
	second := placed(t, *cfg, "/bin/false")
	if first == second || !exists(first) {
		t.Fatalf("%s is gone, which the base spec names; the newer is %s", first, second)
	}
	if err := cdi.NewStore(cfg.CDIRoot).WriteBase(specOf(second)); err != nil {
		t.Fatal(err)
	}
	record := filepath.Join(cfg.StateDir(), "claims", "uid.json")
	if err := os.MkdirAll(filepath.Dir(record), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(record, []byte(`{"edits":{"hooks":[{"path":"`+first+`"}]}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if placed(t, *cfg, "/bin/false"); !exists(first) {
		t.Fatalf("%s is gone, which a record names", first)
	}
	if err := os.Remove(record); err != nil {
		t.Fatal(err)
	}
	if placed(t, *cfg, "/bin/false"); exists(first) || !exists(second) {
		t.Errorf("%s is there: %t, %s: %t", first, exists(first), second, exists(second))
	}
}

// A missing program fails with its name where the hook is checked, not where its path is chosen.
func TestPlaceHooksWithoutAProgramNamesIt(t *testing.T) {
	cfg := *newNode(t).cfg
	cfg.HookSource, cfg.HookPath = filepath.Join(t.TempDir(), "missing"), ""
	PlaceHooks(t.Context(), &cfg)
	if !strings.HasPrefix(cfg.HookPath, cfg.HookDirs[0]) {
		t.Errorf("path %s", cfg.HookPath)
	}
}

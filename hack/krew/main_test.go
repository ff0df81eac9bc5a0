package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

const (
	manifest = "../../deployments/krew/gpu.yaml"
	address  = "https://example.com/v0.1.0"
)

// pack writes an archive with empty files of these names, and returns its checksum.
func pack(t *testing.T, file string, names ...string) string {
	t.Helper()
	var raw bytes.Buffer
	zip := gzip.NewWriter(&raw)
	out := tar.NewWriter(zip)
	for _, name := range names {
		if err := out.WriteHeader(&tar.Header{Name: name, Mode: 0o755}); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(out.Close(), zip.Close(), os.WriteFile(file, raw.Bytes(), 0o600)); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(raw.Bytes())
	return hex.EncodeToString(sum[:])
}

func TestManifestOfARelease(t *testing.T) {
	dir := t.TempDir()
	linux := pack(t, filepath.Join(dir, "kubectl-gpu_v0.1.0_linux_arm64.tar.gz"), "kubectl-gpu", "LICENSE")
	windows := pack(t, filepath.Join(dir, "kubectl-gpu_v0.1.0_windows_amd64.tar.gz"), "./LICENSE", "./kubectl-gpu.exe")
	text, err := fill(manifest, "v0.1.0", dir, address+"/")
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Kind     string
		Metadata struct{ Name string }
		Spec     struct {
			Version, ShortDescription, Description, Homepage string
			Platforms                                        []struct {
				Selector         struct{ MatchLabels map[string]string }
				URI, SHA256, Bin string
			}
		}
	}
	if err := yaml.Unmarshal(text, &got); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if got.Kind != "Plugin" || got.Metadata.Name != "gpu" || got.Spec.Version != "v0.1.0" || len(got.Spec.Platforms) != 2 {
		t.Fatalf("%s", text)
	}
	// The index of krew asks for at most 50 letters.
	if n := len(got.Spec.ShortDescription); n == 0 || n > 50 || got.Spec.Description == "" {
		t.Errorf("the short description has %d letters", n)
	}
	first, second := got.Spec.Platforms[0], got.Spec.Platforms[1]
	if first.SHA256 != linux || second.SHA256 != windows || first.Bin != "kubectl-gpu" || second.Bin != "kubectl-gpu.exe" ||
		first.URI != address+"/kubectl-gpu_v0.1.0_linux_arm64.tar.gz" ||
		first.Selector.MatchLabels["os"] != "linux" || first.Selector.MatchLabels["arch"] != "arm64" {
		t.Errorf("%s", text)
	}
}

func TestManifestNeedsARelease(t *testing.T) {
	empty, other, poor := t.TempDir(), t.TempDir(), t.TempDir()
	pack(t, filepath.Join(other, "kubectl-gpu_v0.2.0_linux_amd64.tar.gz"), "kubectl-gpu", "LICENSE")
	pack(t, filepath.Join(poor, "kubectl-gpu_v0.1.0_linux_amd64.tar.gz"), "kubectl-gpu")
	for _, c := range []struct{ version, folder, address, want string }{
		{"v0.1.0", empty, address, "there is no kubectl-gpu_v0.1.0"},
		{"v0.1.0", other, address, "is no archive of v0.1.0"},
		{"v0.1.0", poor, address, "it lacks LICENSE"},
		{"0.1", other, address, "not of the form"},
		{"v0.2.0", other, "http://example.com", "does not start with https"},
	} {
		if _, err := fill(manifest, c.version, c.folder, c.address); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

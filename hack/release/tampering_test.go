package main

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2"
)

// Each case changes a release as an attacker could who does not have the key.
func TestTamperedFolderIsFound(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*testing.T, made)
		want   string
	}{
		"a layer of the image": {func(t *testing.T, m made) { corrupt(t, m, m.open(t).image, layerOfImage) }, "mismatch"},
		"the chart":            {func(t *testing.T, m made) { corrupt(t, m, m.open(t).chart, layerOfManifest) }, "mismatch"},
		"the chart's archive":  {func(t *testing.T, m made) { appendTo(t, m, "gpu-dra-driver-0.1.0-rc.1.tgz") }, "differ from SHA256SUMS"},
		"an archive of kubectl-gpu": {
			func(t *testing.T, m made) { appendTo(t, m, archiveName(testVersion, clientPlatforms[0])) }, "differ from SHA256SUMS",
		},
		"a list of contents": {
			func(t *testing.T, m made) { appendTo(t, m, "sbom/linux-"+runtime.GOARCH+".cdx.json") }, "differ from SHA256SUMS",
		},
		"the checksums":      {func(t *testing.T, m made) { appendTo(t, m, checksums) }, "signature"},
		"an additional file": {func(t *testing.T, m made) { write(t, filepath.Join(m.dir, "more"), nil) }, "differ from SHA256SUMS"},
		"no signatures":      {func(t *testing.T, m made) { unsigned(t, m) }, "not signed"},
	} {
		t.Run(name, func(t *testing.T) {
			m := makeRelease(t)
			if err := m.verify(t, m.dir); err != nil {
				t.Fatal(err)
			}
			c.change(t, m)
			if err := m.verify(t, m.dir); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error is %v, want one with %q", err, c.want)
			}
		})
	}
}

func unsigned(t *testing.T, m made) {
	t.Helper()
	if err := os.Remove(filepath.Join(m.dir, signatureFile)); err != nil {
		t.Fatal(err)
	}
}

func appendTo(t *testing.T, m made, name string) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(m.dir, name))
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(m.dir, name), append(raw, '\n'))
}

func layerOfManifest(t *testing.T, a artifact, d ocispec.Descriptor) ocispec.Descriptor {
	t.Helper()
	var manifest ocispec.Manifest
	if err := a.read(t.Context(), d, &manifest); err != nil {
		t.Fatal(err)
	}
	return manifest.Layers[len(manifest.Layers)-1]
}

func layerOfImage(t *testing.T, a artifact, _ ocispec.Descriptor) ocispec.Descriptor {
	t.Helper()
	platforms, err := a.platforms(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return layerOfManifest(t, a, platforms[0])
}

// corrupt changes one byte of a layer on disk.
func corrupt(t *testing.T, m made, a artifact, layer func(*testing.T, artifact, ocispec.Descriptor) ocispec.Descriptor) {
	t.Helper()
	digest := layer(t, a, a.root).Digest
	for _, layout := range []string{imageLayout, chartLayout} {
		path := filepath.Join(m.dir, layout, "blobs", "sha256", digest.Encoded())
		raw, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		raw[len(raw)/2] ^= 1
		if err := os.Chmod(path, 0o644); err != nil {
			t.Fatal(err)
		}
		write(t, path, raw)
		return
	}
	t.Fatalf("no layout has %s", digest)
}

// Each case replaces a tag in the registry, as an attacker could who may push but does not have the
// key.
func TestTamperedRegistryIsFound(t *testing.T) {
	m := makeRelease(t)
	address := startRegistry(t)
	for name, c := range map[string]struct {
		repository string
		tag        string
		change     func(*testing.T, oras.Target) ocispec.Descriptor
		want       string
	}{
		"another image": {"gpu-dra-driver", testVersion, pushEmptyIndex, "has no statement https://sigstore.dev/cosign/sign/v1"},
		"another chart": {"charts/gpu-dra-driver", testVersion[1:], pushEmptyIndex, "has no statement https://sigstore.dev/cosign/sign/v1"},
	} {
		t.Run(name, func(t *testing.T) {
			registry := address + "/" + strings.ReplaceAll(name, " ", "-")
			m.run(t, "push", "-to", registry, m.dir)
			if err := m.verify(t, registry); err != nil {
				t.Fatal(err)
			}
			repository, err := openRepository(registry + "/" + c.repository)
			if err != nil {
				t.Fatal(err)
			}
			if err := repository.Tag(t.Context(), c.change(t, repository), c.tag); err != nil {
				t.Fatal(err)
			}
			if err := m.verify(t, registry); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error is %v, want one with %q", err, c.want)
			}
		})
	}
	t.Run("signed with another key", func(t *testing.T) {
		registry := address + "/stranger"
		keys := t.TempDir()
		stranger := made{
			dir: buildRelease(t, t.TempDir(), someCommit), key: filepath.Join(keys, "key"), publicKey: filepath.Join(keys, "public"),
		}
		writeKeys(t, stranger.key, stranger.publicKey)
		stranger.run(t, "sign", "-key", stranger.key, stranger.dir)
		stranger.run(t, "push", "-to", registry, stranger.dir)
		if err := m.verify(t, registry); err == nil || !strings.Contains(err.Error(), "that the key has signed") {
			t.Errorf("error is %v", err)
		}
	})
	t.Run("another version", func(t *testing.T) {
		registry := address + "/older"
		m.run(t, "push", "-to", registry, m.dir)
		for repository, tags := range map[string][2]string{
			"gpu-dra-driver": {testVersion, "v0.2.0"}, "charts/gpu-dra-driver": {testVersion[1:], "0.2.0"},
		} {
			target, err := openRepository(registry + "/" + repository)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := oras.Tag(t.Context(), target, tags[0], tags[1]); err != nil {
				t.Fatal(err)
			}
		}
		err := run(t.Context(), []string{"verify", "-key", m.publicKey, "-version", "v0.2.0", registry})
		if err == nil || !strings.Contains(err.Error(), "is of version "+testVersion) {
			t.Errorf("error is %v", err)
		}
	})
}

func pushEmptyIndex(t *testing.T, target oras.Target) ocispec.Descriptor {
	t.Helper()
	d, err := pushJSON(t.Context(), target, ocispec.MediaTypeImageIndex, ocispec.Index{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex,
	})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// The key's owner signed a list of contents that is wrong.
func TestFileThatIsNotListedIsFound(t *testing.T) {
	m := makeRelease(t)
	m.dir = buildRelease(t, t.TempDir(), someCommit)
	path := filepath.Join(m.dir, "sbom", "linux-"+runtime.GOARCH+".cdx.json")
	replaceIn(t, path, `"/usr/bin/gpu-mps"`, `"/usr/bin/other"`)
	m.signAgain(t)
	if err := m.verify(t, m.dir); err == nil || !strings.Contains(err.Error(), `has hash "" for /usr/bin/gpu-mps`) {
		t.Errorf("error is %v", err)
	}
}

// The key's owner signed archives of kubectl-gpu that are incomplete or from another build.
func TestWrongArchivesAreFound(t *testing.T) {
	linux := archiveName(testVersion, clientPlatforms[0])
	for name, c := range map[string]struct {
		change func(*testing.T, made)
		want   string
	}{
		"a platform is missing": {
			func(t *testing.T, m made) {
				if err := os.Remove(filepath.Join(m.dir, linux)); err != nil {
					t.Fatal(err)
				}
			}, "the release has no kubectl-gpu for linux/amd64",
		},
		"an archive from another build": {func(t *testing.T, m made) { appendTo(t, m, linux) }, "but the provenance names"},
		"a file that is not listed": {
			func(t *testing.T, m made) {
				replaceIn(t, filepath.Join(m.dir, archiveSBOM(linux)), `"name": "/kubectl-gpu"`, `"name": "/other"`)
			}, `has hash "" for /kubectl-gpu`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := makeRelease(t)
			m.dir = buildRelease(t, t.TempDir(), someCommit)
			c.change(t, m)
			m.signAgain(t)
			if err := m.verify(t, m.dir); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error is %v, want one with %q", err, c.want)
			}
		})
	}
}

// signAgain signs the folder of a release that was changed, with checksums of what is there now.
func (m made) signAgain(t *testing.T) {
	t.Helper()
	sums, err := listChecksums(m.dir)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(m.dir, checksums), []byte(sums))
	m.run(t, "sign", "-key", m.key, m.dir)
}

func replaceIn(t *testing.T, path, before, after string) {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(raw, []byte(before)) {
		t.Fatalf("%s has no %s", path, before)
	}
	write(t, path, bytes.ReplaceAll(raw, []byte(before), []byte(after)))
}

// Image and chart are both signed, but from different builds of the version.
func TestChartOfAnotherImageIsFound(t *testing.T) {
	m := makeRelease(t)
	other := made{dir: buildRelease(t, t.TempDir(), otherCommit), key: m.key}
	other.run(t, "sign", "-key", m.key, other.dir)
	registry := startRegistry(t) + "/mixed"
	m.run(t, "push", "-to", registry, m.dir)
	repository, err := openRepository(registry + "/charts/gpu-dra-driver")
	if err != nil {
		t.Fatal(err)
	}
	chart := other.open(t).chart
	if err := copyArtifact(t.Context(), chart.store, chart.tag, repository); err != nil {
		t.Fatal(err)
	}
	if err := m.verify(t, registry); err == nil || !strings.Contains(err.Error(), "the chart installs image") {
		t.Errorf("error is %v", err)
	}
}

package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	slsa "github.com/in-toto/attestation/go/predicates/provenance/v1"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/protobuf/encoding/protojson"
)

func TestSameInputsGiveSameBytes(t *testing.T) {
	first := makeRelease(t)
	second := made{dir: buildRelease(t, t.TempDir(), someCommit), key: first.key, publicKey: first.publicKey}
	second.run(t, "sign", "-key", first.key, second.dir)
	second.run(t, "sign", "-key", first.key, second.dir) // signing again changes nothing
	files := 0
	err := filepath.WalkDir(first.dir, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() || entry.Name() == ocispec.ImageIndexFile {
			return err
		}
		files++
		name, _ := filepath.Rel(first.dir, path)
		one, err := os.ReadFile(path)
		other, otherErr := os.ReadFile(filepath.Join(second.dir, name))
		if otherErr != nil || !bytes.Equal(one, other) {
			t.Errorf("%s differs: %v", name, otherErr)
		}
		return err
	})
	if err != nil || files < 20 {
		t.Errorf("compared %d files: %v", files, err)
	}
	if err := second.verify(t, second.dir); err != nil {
		t.Error(err)
	}
}

func TestReleaseTravelsThroughARegistry(t *testing.T) {
	m := makeRelease(t)
	registry := startRegistry(t) + "/project"
	m.run(t, "push", "-to", registry, m.dir)
	m.run(t, "push", "-to", registry, m.dir)
	if err := m.verify(t, registry); err != nil {
		t.Error(err)
	}
}

// build removes what an earlier one signed, so the folder of a release may have no signatures.
func TestUnsignedReleaseIsNotPushed(t *testing.T) {
	m := makeRelease(t)
	signature := filepath.Join(m.dir, signatureFile)
	raw, err := os.ReadFile(signature)
	if err != nil {
		t.Fatal(err)
	}
	push := func(dir string, flags ...string) error {
		return run(t.Context(), append(append([]string{"push", "-to", startRegistry(t)}, flags...), dir))
	}
	again := buildRelease(t, t.TempDir(), someCommit)
	if err := push(again); err == nil || !strings.Contains(err.Error(), "the checksums are not signed") {
		t.Errorf("a release without signatures: %v", err)
	}
	write(t, filepath.Join(again, signatureFile), raw)
	if err := push(again); err == nil || !strings.Contains(err.Error(), "has no signed statement") {
		t.Errorf("a release of which only the checksums are signed: %v", err)
	}
	if err := push(again, "-unsigned"); err != nil {
		t.Errorf("-unsigned: %v", err)
	}
	unsigned(t, m)
	if err := push(m.dir); err == nil || !strings.Contains(err.Error(), "the checksums are not signed") {
		t.Errorf("a release whose checksums are not signed: %v", err)
	}
}

// A release replaces the one of another version in its folder.
func TestOtherVersionInTheFolderIsReplaced(t *testing.T) {
	dir := t.TempDir()
	m := makeRelease(t)
	m.dir = buildRelease(t, dir, someCommit, func(b *build) {
		b.version = "v0.0.9"
		if err := b.run(t.Context()); err != nil {
			t.Fatal(err)
		}
		b.version = testVersion
	})
	charts, err := filepath.Glob(filepath.Join(m.dir, "*.tgz"))
	if err != nil || len(charts) != 1 || filepath.Base(charts[0]) != "gpu-dra-driver-"+testVersion[1:]+".tgz" {
		t.Errorf("charts %q: %v", charts, err)
	}
	sums, err := os.ReadFile(filepath.Join(m.dir, checksums))
	if err != nil || strings.Count(string(sums), ".tgz") != 1 || strings.Count(string(sums), ".tar.gz") != len(clientPlatforms) {
		t.Errorf("%v:\n%s", err, sums)
	}
	m.run(t, "sign", "-key", m.key, m.dir)
	if err := m.verify(t, m.dir); err != nil {
		t.Error(err)
	}
}

func TestSourceWithChangesIsNotPushed(t *testing.T) {
	m := makeRelease(t)
	path := filepath.Join(m.dir, provenanceFile)
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	write(t, path, bytes.Replace(raw, []byte(`"modified": false`), []byte(`"modified": true`), 1))
	err = run(t.Context(), []string{"push", "-to", startRegistry(t), m.dir})
	if err == nil || !strings.Contains(err.Error(), "differed from its commit") {
		t.Error(err)
	}
}

func TestVersionsThatNoTagCanHaveAreRefused(t *testing.T) {
	for _, version := range []string{"", "0.1.0", "v0.1", "v0.1.0+build", "v0.1.0-5-gabc-dirty+x", "latest"} {
		for _, args := range [][]string{
			{"check", "-version", version},
			{"build", "-version", version, "-registry", "r", "-programs", "p", "-c-library", "c", "-out", t.TempDir(), "-chart", "c", "-helm", "h"},
		} {
			err := run(t.Context(), args)
			if err == nil || !strings.Contains(err.Error(), "want the form") && version != "" {
				t.Errorf("%s %q: %v", args[0], version, err)
			}
		}
	}
}

// The provenance names a version's tag only if the tag is what was built.
func TestTagIsOfTheCommit(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, args := range []string{
		"init -q", "commit -q --allow-empty -m first", "tag v0.1.0", "commit -q --allow-empty -m second", "tag -a -m annotated v0.2.0",
	} {
		user := []string{"-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"}
		cmd := exec.CommandContext(t.Context(), "git", append(user, strings.Fields(args)...)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %s: %v: %s", args, err, out)
		}
	}
	if err := run(t.Context(), []string{"check", "-version", "v0.1.0"}); err == nil || !strings.Contains(err.Error(), "tag v0.1.0 is commit") {
		t.Errorf("the tag of another commit: %v", err)
	}
	for version, want := range map[string]string{
		"v0.2.0": "git+" + repository + "@refs/tags/v0.2.0",
		"v0.3.0": "git+" + repository, // no such tag
	} {
		if err := run(t.Context(), []string{"check", "-version", version}); err != nil {
			t.Error(err)
		}
		s, err := readSource(t.Context(), version)
		if err != nil {
			t.Fatal(err)
		}
		if got := s.dependency(version); got.URI != want || got.Digest["gitCommit"] != s.commit || len(s.commit) != 40 {
			t.Errorf("%s: %v, want %s and commit %s", version, got, want, s.commit)
		}
	}
}

func TestSourceWithChangesIsNotVerified(t *testing.T) {
	m := makeRelease(t)
	m.dir = buildRelease(t, t.TempDir(), someCommit, func(b *build) { b.source.modified = true })
	m.run(t, "sign", "-key", m.key, m.dir)
	if err := m.verify(t, m.dir); err == nil || !strings.Contains(err.Error(), "differed from its commit") {
		t.Errorf("error is %v", err)
	}
	m.run(t, "verify", "-modified", "-key", m.publicKey, "-version", testVersion, m.dir)
}

func TestProvenanceIsValidSLSA(t *testing.T) {
	m := makeRelease(t)
	s, err := m.open(t).provenance()
	if err != nil {
		t.Fatal(err)
	}
	var p slsa.Provenance
	if err := (protojson.UnmarshalOptions{}).Unmarshal(s.Predicate, &p); err != nil {
		t.Fatal(err)
	}
	if err := p.Validate(); err != nil {
		t.Error(err)
	}
}

package main

import (
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/CycloneDX/cyclonedx-go"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2/content"
)

// client is the program that users run on their own machines. A release has an archive of it for
// each platform.
const client = "kubectl-gpu"

// clientPlatforms are the platforms of the client. The Makefile compiles for the same ones.
var clientPlatforms = []ocispec.Platform{
	{OS: "linux", Architecture: "amd64"},
	{OS: "linux", Architecture: "arm64"},
}

// archiveName is the name of the client's archive. Package managers rely on its form.
func archiveName(version string, p ocispec.Platform) string {
	return fmt.Sprintf("%s_%s_%s_%s.tar.gz", client, version, p.OS, p.Architecture)
}

// archiveSBOM is the path of the list of an archive's contents, in the folder of the release.
func archiveSBOM(archive string) string {
	return filepath.Join("sbom", strings.TrimSuffix(archive, ".tar.gz")+".cdx.json")
}

// clientDir is the folder with the client for the platform, and with the list of its modules.
func (b *build) clientDir(p ocispec.Platform) string {
	return filepath.Join(b.programs, client, p.OS+"_"+p.Architecture)
}

// archiveFiles returns the files of the client's archive by their path, which starts with a slash
// like one in an image.
func (b *build) archiveFiles(p ocispec.Platform) map[string]imageFile {
	return map[string]imageFile{
		"/" + client: {filepath.Join(b.clientDir(p), client), 0o755},
		"/LICENSE":   {filepath.Join(b.source.dir, "LICENSE"), 0o644},
	}
}

// packArchives writes the client's archives, and returns their names and digests.
func (b *build) packArchives() ([]subject, error) {
	var packed []subject
	for _, p := range clientPlatforms {
		name := archiveName(b.version, p)
		raw, _, err := packLayer(b.archiveFiles(p), nil, b.source.time)
		if err != nil {
			return nil, fmt.Errorf("make %s: %w", name, err)
		}
		if err := os.WriteFile(filepath.Join(b.out, name), raw, 0o644); err != nil {
			return nil, err
		}
		packed = append(packed, subjectOf(name, content.NewDescriptorFromBytes("", raw)))
	}
	return packed, nil
}

// describeArchives writes a list of contents for each archive.
func (b *build) describeArchives(archives []subject) error {
	for i, p := range clientPlatforms {
		var parts contents
		files := b.archiveFiles(p)
		for _, name := range slices.Sorted(maps.Keys(files)) {
			list := ""
			if name == "/"+client {
				list = filepath.Join(b.clientDir(p), "sbom", client+".cdx.json")
			}
			if err := parts.addFile(name, files[name], list); err != nil {
				return err
			}
		}
		sum := digest.SHA256.String() + ":" + archives[i].Digest[digest.SHA256.String()]
		purl := fmt.Sprintf("pkg:generic/%s@%s?arch=%s&checksum=%s&os=%s", client, b.version, p.Architecture, url.QueryEscape(sum), p.OS)
		bom := parts.bom(cyclonedx.Component{
			BOMRef: purl, Type: cyclonedx.ComponentTypeApplication, Name: client, Version: b.version, PackageURL: purl,
		})
		if err := writeJSON(filepath.Join(b.out, archiveSBOM(archives[i].Name)), bom); err != nil {
			return err
		}
	}
	return nil
}

// archives verifies the client's archives in a folder whose checksums are verified: none is
// missing, each has the files that its list names, and the provenance names each.
func (v *verifier) archives(f *folder) error {
	s, err := f.provenance()
	if err != nil {
		return err
	}
	made := map[string]string{}
	for _, subject := range s.Subject {
		made[subject.Name] = subject.Digest[digest.SHA256.String()]
	}
	for _, p := range clientPlatforms {
		name := archiveName(v.version, p)
		raw, err := os.ReadFile(filepath.Join(f.dir, name))
		if err != nil {
			return fmt.Errorf("the release has no %s for %s/%s: %w", client, p.OS, p.Architecture, err)
		}
		if sum := digest.FromBytes(raw).Encoded(); made[name] != sum {
			return fmt.Errorf("%s has digest %s, but the provenance names %q", name, sum, made[name])
		}
		list, err := os.ReadFile(filepath.Join(f.dir, archiveSBOM(name)))
		if err != nil {
			return err
		}
		found := map[string]string{}
		if err := hashFiles(raw, found); err != nil {
			return fmt.Errorf("unpack %s: %w", name, err)
		}
		if err := compareContents(name, list, found); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

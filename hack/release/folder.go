package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2/content"
	"oras.land/oras-go/v2/content/oci"
)

// Files of a release's folder, apart from the lists of contents in "sbom" and the chart's archive.
const (
	imageLayout    = "image"
	chartLayout    = "chart"
	checksums      = "SHA256SUMS"
	signatureFile  = checksums + ".sigstore.json"
	digestsFile    = "digests.txt"
	provenanceFile = "provenance.json"
)

// artifact is the image or the chart of a release, in a local OCI layout.
type artifact struct {
	// name is the repository, with its registry, and tag the tag there.
	name, tag string
	store     *oci.Store
	root      ocispec.Descriptor
	// created is the time of the commit, as the artifact says it.
	created string
}

// openArtifact finds an artifact by its tag in a layout.
func openArtifact(ctx context.Context, dir, name, tag string) (artifact, error) {
	a := artifact{name: name, tag: tag}
	if _, err := os.Stat(filepath.Join(dir, ocispec.ImageIndexFile)); err != nil {
		return a, fmt.Errorf("%s is no OCI layout: make it with \"make release\": %w", dir, err)
	}
	var err error
	if a.store, err = oci.NewWithContext(ctx, dir); err != nil {
		return a, fmt.Errorf("open %s: %w", dir, err)
	}
	if a.root, err = a.store.Resolve(ctx, tag); err != nil {
		return a, fmt.Errorf("find %s in %s: %w", tag, dir, err)
	}
	a.root = ocispec.Descriptor{MediaType: a.root.MediaType, Digest: a.root.Digest, Size: a.root.Size}
	var manifest struct {
		Annotations map[string]string `json:"annotations"`
	}
	err = a.read(ctx, a.root, &manifest)
	a.created = manifest.Annotations[ocispec.AnnotationCreated]
	return a, err
}

// read decodes a JSON document of the artifact. It fails if the content does not match its digest.
func (a artifact) read(ctx context.Context, d ocispec.Descriptor, into any) error {
	raw, err := content.FetchAll(ctx, a.store, d)
	if err != nil {
		return fmt.Errorf("read %s of %s: %w", d.Digest, a.name, err)
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return fmt.Errorf("read %s of %s: %w", d.Digest, a.name, err)
	}
	return nil
}

// platforms returns the images in the index.
func (a artifact) platforms(ctx context.Context) ([]ocispec.Descriptor, error) {
	var index ocispec.Index
	if err := a.read(ctx, a.root, &index); err != nil {
		return nil, err
	}
	for _, m := range index.Manifests {
		if m.Platform == nil {
			return nil, fmt.Errorf("image %s in the index of %s has no platform", m.Digest, a.name)
		}
	}
	return index.Manifests, nil
}

// folder is a release on disk.
type folder struct {
	dir          string
	image, chart artifact
}

// openFolder opens the folder of a release, which digests.txt describes.
func openFolder(ctx context.Context, dir string) (*folder, error) {
	raw, err := os.ReadFile(filepath.Join(dir, digestsFile))
	if err != nil {
		return nil, fmt.Errorf("%s is no release: make it with \"make release\": %w", dir, err)
	}
	lines := strings.Fields(string(raw))
	if len(lines) != 2 {
		return nil, fmt.Errorf("%s in %s has %d lines, want one for the image and one for the chart", digestsFile, dir, len(lines))
	}
	f := &folder{dir: dir}
	for i, layout := range []string{imageLayout, chartLayout} {
		reference, digest, _ := strings.Cut(lines[i], "@")
		colon := strings.LastIndex(reference, ":")
		if colon < 0 {
			return nil, fmt.Errorf("%s in %s: %q has no tag", digestsFile, dir, lines[i])
		}
		a, err := openArtifact(ctx, filepath.Join(dir, layout), reference[:colon], reference[colon+1:])
		if err != nil {
			return nil, err
		}
		if a.root.Digest.String() != digest {
			return nil, fmt.Errorf("%s has digest %s, but %s names %s", layout, a.root.Digest, digestsFile, digest)
		}
		*[]*artifact{&f.image, &f.chart}[i] = a
	}
	return f, nil
}

func (f *folder) provenance() (statement, error) {
	var s statement
	raw, err := os.ReadFile(filepath.Join(f.dir, provenanceFile))
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(raw, &s); err != nil {
		return s, fmt.Errorf("read %s: %w", provenanceFile, err)
	}
	return s, nil
}

// listChecksums returns a line for each file of a release except the two layouts, whose files are
// named by their digests. digests.txt has the digests of their roots.
func listChecksums(dir string) (string, error) {
	var sums strings.Builder
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		switch {
		case err != nil:
			return err
		case name == imageLayout || name == chartLayout:
			return fs.SkipDir
		case entry.IsDir() || strings.HasPrefix(name, checksums):
			return nil
		}
		raw, err := os.ReadFile(path)
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(raw), filepath.ToSlash(name))
		return err
	})
	return sums.String(), err
}

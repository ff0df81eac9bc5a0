package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2/content/oci"
)

// repository is where the source is, by the name of its Go module.
const repository = "https://github.com/gpu-dra-driver/gpu-dra-driver"

// versionForm is a version of a release: semantic, after a v, without build metadata, because a tag
// must not contain a plus.
var versionForm = regexp.MustCompile(`^v[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$`)

// build makes the artifacts of a release.
type build struct {
	version  string
	registry string
	arches   []string
	// programs and cLibraries are folders with one folder for each architecture: the programs, and
	// what hack/c-library.sh made. The client's programs are in a folder of programs of their own.
	programs, cLibraries string
	chart, helm          string
	out                  string
	source               source
}

func buildCommand(flags *flag.FlagSet) func(context.Context, []string) error {
	b := &build{arches: []string{"amd64", "arm64"}}
	flags.StringVar(&b.version, "version", "", "version of the release, like v0.1.0")
	flags.StringVar(&b.registry, "registry", "", "where users will pull image and chart, like registry.example/project")
	flags.StringVar(&b.programs, "programs", "", "folder with the programs of each architecture")
	flags.StringVar(&b.cLibraries, "c-library", "", "folder with the C library of each architecture, made by hack/c-library.sh")
	flags.StringVar(&b.out, "out", "", "folder for the release")
	flags.StringVar(&b.chart, "chart", "", "folder with the chart's source")
	flags.StringVar(&b.helm, "helm", "", "the program helm")
	return func(ctx context.Context, _ []string) error {
		if err := need(flags, "version", "registry", "programs", "c-library", "out", "chart", "helm"); err != nil {
			return err
		}
		var err error
		if b.source, err = readSource(ctx, b.version); err != nil {
			return err
		}
		return b.run(ctx)
	}
}

func (b *build) run(ctx context.Context) error {
	if err := b.removeOld(); err != nil {
		return err
	}
	images, err := oci.NewWithContext(ctx, filepath.Join(b.out, imageLayout))
	if err != nil {
		return err
	}
	image, err := b.pushIndex(ctx, images)
	if err != nil {
		return err
	}
	if err := images.Tag(ctx, image, b.version); err != nil {
		return err
	}
	archive, err := b.packageChart(ctx, image)
	if err != nil {
		return err
	}
	chartStore, err := oci.NewWithContext(ctx, filepath.Join(b.out, chartLayout))
	if err != nil {
		return err
	}
	chart, err := b.pushChart(ctx, chartStore, archive)
	if err != nil {
		return err
	}
	version := strings.TrimPrefix(b.version, "v")
	if err := chartStore.Tag(ctx, chart, version); err != nil {
		return err
	}
	digests := fmt.Sprintf("%s:%s@%s\n%s:%s@%s\n", b.imageRepository(), b.version, image.Digest, b.chartRepository(), version, chart.Digest)
	if err := os.WriteFile(filepath.Join(b.out, digestsFile), []byte(digests), 0o644); err != nil {
		return err
	}
	archives, err := b.packArchives()
	if err != nil {
		return err
	}
	if err := b.describe(ctx, image, chart, archives); err != nil {
		return err
	}
	sums, err := listChecksums(b.out)
	if err != nil {
		return err
	}
	fmt.Print(digests)
	return os.WriteFile(filepath.Join(b.out, checksums), []byte(sums), 0o644)
}

// removeOld removes only what an earlier call has made: also the chart and the archives of another
// version.
func (b *build) removeOld() error {
	old := []string{imageLayout, chartLayout, "sbom", provenanceFile, digestsFile, checksums, signatureFile}
	for _, pattern := range []string{filepath.Base(b.chart) + "-*.tgz", client + "_*.tar.gz"} {
		named, err := fs.Glob(os.DirFS(b.out), pattern)
		if err != nil {
			return err
		}
		old = append(old, named...)
	}
	for _, name := range old {
		if err := os.RemoveAll(filepath.Join(b.out, name)); err != nil {
			return err
		}
	}
	return nil
}

// describe writes the lists of contents and the provenance, which sign attaches.
func (b *build) describe(ctx context.Context, image, chart ocispec.Descriptor, archives []subject) error {
	f, err := openFolder(ctx, b.out)
	if err != nil {
		return err
	}
	platforms, err := f.image.platforms(ctx)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(b.out, "sbom"), 0o755); err != nil {
		return err
	}
	for _, platform := range platforms {
		bom, err := b.sbom(platform.Platform.Architecture, platform)
		if err != nil {
			return err
		}
		if err := writeJSON(filepath.Join(b.out, "sbom", sbomName(*platform.Platform)), bom); err != nil {
			return err
		}
	}
	if err := b.describeArchives(archives); err != nil {
		return err
	}
	p, err := b.provenance(ctx)
	if err != nil {
		return err
	}
	subjects := append([]subject{subjectOf(b.imageRepository(), image), subjectOf(b.chartRepository(), chart)}, archives...)
	s, err := newStatement(provenancePredicate, p, subjects...)
	if err != nil {
		return err
	}
	return writeJSON(filepath.Join(b.out, provenanceFile), s)
}

func writeJSON(path string, value any) error {
	raw, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(raw, '\n'), 0o644)
}

func (b *build) imageRepository() string { return b.registry + "/gpu-dra-driver" }
func (b *build) chartRepository() string { return b.registry + "/charts/gpu-dra-driver" }

// annotations describe the image, with the keys of the OCI image specification.
func (b *build) annotations() map[string]string {
	return map[string]string{
		ocispec.AnnotationTitle:       "gpu-dra-driver",
		ocispec.AnnotationDescription: "Offers NVIDIA GPUs to Kubernetes through Dynamic Resource Allocation",
		ocispec.AnnotationVersion:     b.version,
		ocispec.AnnotationRevision:    b.source.commit,
		ocispec.AnnotationCreated:     b.source.time.Format(time.RFC3339),
		ocispec.AnnotationSource:      repository,
		ocispec.AnnotationLicenses:    "Apache-2.0",
	}
}

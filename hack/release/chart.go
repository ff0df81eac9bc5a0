package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.yaml.in/yaml/v3"
	"oras.land/oras-go/v2"
	"oras.land/oras-go/v2/content"
)

// Media types of a chart in a registry (https://helm.sh/docs/topics/registries).
const (
	chartConfigType  = "application/vnd.cncf.helm.config.v1+json"
	chartContentType = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
)

// packageChart packages a copy of the chart with helm, and returns the path of the archive. The
// copy has the release's version and names the image by digest.
func (b *build) packageChart(ctx context.Context, image ocispec.Descriptor) (string, error) {
	parent, err := os.MkdirTemp("", "release-chart-")
	if err != nil {
		return "", err
	}
	defer func() { _ = os.RemoveAll(parent) }()
	copied := filepath.Join(parent, filepath.Base(b.chart))
	if err := os.CopyFS(copied, os.DirFS(b.chart)); err != nil {
		return "", fmt.Errorf("copy the chart: %w", err)
	}
	if err := pinImage(filepath.Join(copied, "values.yaml"), b.imageRepository(), image.Digest.String()); err != nil {
		return "", err
	}
	// The archive has the files' times, so all of them get the commit's.
	err = filepath.WalkDir(copied, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Chtimes(path, b.source.time, b.source.time))
	})
	if err != nil {
		return "", err
	}
	version := strings.TrimPrefix(b.version, "v")
	cmd := exec.CommandContext(ctx, b.helm, "package", copied, "--version", version, "--app-version", b.version, "--destination", b.out)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("package the chart: %w: %s", err, out)
	}
	return filepath.Join(b.out, filepath.Base(b.chart)+"-"+version+".tgz"), nil
}

var (
	repositoryLine = regexp.MustCompile(`(?m)^  repository: .*$`)
	digestLine     = regexp.MustCompile(`(?m)^  digest: ""$`)
)

// pinImage sets the image's repository and digest in the file of values. It keeps the comments.
func pinImage(path, repository, digest string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	for _, edit := range []struct {
		line  *regexp.Regexp
		value string
	}{{repositoryLine, "  repository: " + repository}, {digestLine, "  digest: " + digest}} {
		if n := len(edit.line.FindAll(text, -1)); n != 1 {
			return fmt.Errorf("pin the image in %s: %d lines match %s, want one", path, n, edit.line)
		}
		text = edit.line.ReplaceAllLiteral(text, []byte(edit.value))
	}
	return os.WriteFile(path, text, 0o644)
}

// pushChart writes the chart to the store, as "helm push" would.
func (b *build) pushChart(ctx context.Context, store content.Pusher, archive string) (ocispec.Descriptor, error) {
	raw, err := os.ReadFile(archive)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	var metadata map[string]any
	if err := readFromChart(raw, "Chart.yaml", &metadata); err != nil {
		return ocispec.Descriptor{}, err
	}
	manifest := ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest, Annotations: b.annotations(),
	}
	manifest.Annotations[ocispec.AnnotationVersion] = strings.TrimPrefix(b.version, "v")
	if manifest.Config, err = pushJSON(ctx, store, chartConfigType, metadata); err != nil {
		return ocispec.Descriptor{}, err
	}
	layer, err := oras.PushBytes(ctx, store, chartContentType, raw)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	manifest.Layers = []ocispec.Descriptor{layer}
	return pushJSON(ctx, store, ocispec.MediaTypeImageManifest, manifest)
}

// readFromChart decodes a YAML file in the top folder of a chart's archive.
func readFromChart(archive []byte, name string, into any) error {
	unzipped, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		return fmt.Errorf("unpack the chart: %w", err)
	}
	for files := tar.NewReader(unzipped); ; {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			return fmt.Errorf("the chart has no file %s", name)
		}
		if err != nil {
			return fmt.Errorf("unpack the chart: %w", err)
		}
		if _, rest, _ := strings.Cut(header.Name, "/"); rest != name {
			continue
		}
		raw, err := io.ReadAll(files)
		if err != nil {
			return err
		}
		if err := yaml.Unmarshal(raw, into); err != nil {
			return fmt.Errorf("read %s of the chart: %w", name, err)
		}
		return nil
	}
}

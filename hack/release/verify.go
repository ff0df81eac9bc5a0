package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/CycloneDX/cyclonedx-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/sigstore/sigstore-go/pkg/bundle"
	"github.com/sigstore/sigstore-go/pkg/root"
	"github.com/sigstore/sigstore-go/pkg/verify"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sigstore/sigstore/pkg/signature"
	"oras.land/oras-go/v2/content"
	"oras.land/oras-go/v2/content/oci"
	"oras.land/oras-go/v2/registry"
)

func verifyCommand(flags *flag.FlagSet) func(context.Context, []string) error {
	key := flags.String("key", "", "public key, as PEM")
	version := flags.String("version", "", "version of the release, like v0.1.0")
	modified := flags.Bool("modified", false, "accept a release whose source differed from its commit")
	return func(ctx context.Context, args []string) error {
		if err := need(flags, "key", "version"); err != nil {
			return err
		}
		from, err := only(args, "folder or the registry of the release")
		if err != nil {
			return err
		}
		v, err := newVerifier(*key, *version)
		if err != nil {
			return err
		}
		v.modified = *modified
		if info, err := os.Stat(from); err == nil && info.IsDir() {
			return v.folder(ctx, from)
		}
		return v.registry(ctx, from)
	}
}

// verifier verifies releases of one version with one public key.
type verifier struct {
	version    string
	signatures *verify.Verifier
	// modified accepts a release whose source differed from its commit.
	modified bool
}

func newVerifier(keyPath, version string) (*verifier, error) {
	raw, err := os.ReadFile(keyPath)
	if err != nil {
		return nil, fmt.Errorf("read the public key: %w", err)
	}
	key, err := cryptoutils.UnmarshalPEMToPublicKey(raw)
	if err != nil {
		return nil, fmt.Errorf("read the public key in %s: %w", keyPath, err)
	}
	ours, err := signature.LoadDefaultVerifier(key)
	if err != nil {
		return nil, fmt.Errorf("use the public key in %s: %w", keyPath, err)
	}
	trusted := root.NewTrustedPublicKeyMaterial(func(string) (root.TimeConstrainedVerifier, error) {
		return alwaysValid{ours}, nil
	})
	// The key decides, so neither a transparency log nor a timestamp is needed.
	signatures, err := verify.NewVerifier(trusted, verify.WithNoObserverTimestamps())
	return &verifier{version: version, signatures: signatures}, err
}

// folder verifies a release on disk.
func (v *verifier) folder(ctx context.Context, dir string) error {
	sums, err := os.ReadFile(filepath.Join(dir, checksums))
	if err != nil {
		return fmt.Errorf("read the checksums: %w", err)
	}
	signed, err := os.ReadFile(filepath.Join(dir, signatureFile))
	if err != nil {
		return fmt.Errorf("the release is not signed (%s): %w", howToSign, err)
	}
	if _, err := v.bundle(signed, verify.WithArtifact(bytes.NewReader(sums))); err != nil {
		return fmt.Errorf("the signature of %s: %w", checksums, err)
	}
	actual, err := listChecksums(dir)
	if err != nil {
		return err
	}
	if actual != string(sums) {
		return fmt.Errorf("the files in %s differ from %s:\n%s", dir, checksums, actual)
	}
	fmt.Printf("verified the files in %s\n", checksums)
	f, err := openFolder(ctx, dir)
	if err != nil {
		return err
	}
	if err := v.archives(f); err != nil {
		return err
	}
	return v.artifacts(ctx, f.image, f.chart)
}

// registry downloads a release and verifies it.
func (v *verifier) registry(ctx context.Context, from string) error {
	dir, err := os.MkdirTemp("", "release-verify-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	pulled := map[string]artifact{}
	for layout, wanted := range map[string]artifact{
		imageLayout: {name: from + "/gpu-dra-driver", tag: v.version},
		chartLayout: {name: from + "/charts/gpu-dra-driver", tag: strings.TrimPrefix(v.version, "v")},
	} {
		repository, err := openRepository(wanted.name)
		if err != nil {
			return err
		}
		store, err := oci.NewWithContext(ctx, filepath.Join(dir, layout))
		if err != nil {
			return err
		}
		if err := copyArtifact(ctx, repository, wanted.tag, store); err != nil {
			return fmt.Errorf("pull %s:%s: %w", wanted.name, wanted.tag, err)
		}
		if pulled[layout], err = openArtifact(ctx, filepath.Join(dir, layout), wanted.name, wanted.tag); err != nil {
			return err
		}
	}
	return v.artifacts(ctx, pulled[imageLayout], pulled[chartLayout])
}

// artifacts verifies that both artifacts are complete, signed and of this version, that each
// image's list of contents is right, and that the chart installs this image.
func (v *verifier) artifacts(ctx context.Context, image, chart artifact) error {
	for _, a := range []artifact{image, chart} {
		if err := a.readAll(ctx, a.root); err != nil {
			return err
		}
		if err := v.madeFrom(ctx, a); err != nil {
			return err
		}
	}
	platforms, err := image.platforms(ctx)
	if err != nil {
		return err
	}
	for _, platform := range platforms {
		if err := v.contents(ctx, image, platform); err != nil {
			return fmt.Errorf("the image for %s: %w", platform.Platform.Architecture, err)
		}
	}
	return v.installs(ctx, chart, image)
}

// readAll reads everything that a manifest consists of, and so compares it with its digests.
func (a artifact) readAll(ctx context.Context, d ocispec.Descriptor) error {
	if _, err := content.FetchAll(ctx, a.store, d); err != nil {
		return fmt.Errorf("%s of %s: %w", d.Digest, a.name, err)
	}
	parts, err := content.Successors(ctx, a.store, d)
	if err != nil {
		return err
	}
	for _, part := range parts {
		if err := a.readAll(ctx, part); err != nil {
			return err
		}
	}
	return nil
}

// madeFrom verifies an artifact's signature, and that its provenance is of this version.
func (v *verifier) madeFrom(ctx context.Context, a artifact) error {
	if _, err := v.statement(ctx, a, a.root, signaturePredicate); err != nil {
		return err
	}
	raw, err := v.statement(ctx, a, a.root, provenancePredicate)
	if err != nil {
		return err
	}
	var p provenance
	if err := json.Unmarshal(raw, &p); err != nil {
		return fmt.Errorf("read the provenance of %s: %w", a.name, err)
	}
	if got := p.BuildDefinition.ExternalParameters.Version; got != v.version {
		return fmt.Errorf("%s@%s is of version %s by its provenance, not %s", a.name, a.root.Digest, got, v.version)
	}
	if p.BuildDefinition.ExternalParameters.Modified && !v.modified {
		return fmt.Errorf("%s@%s was made from a source that differed from its commit (-modified accepts it)", a.name, a.root.Digest)
	}
	commit := ""
	for _, used := range p.BuildDefinition.ResolvedDependencies {
		commit += used.Digest["gitCommit"]
	}
	fmt.Printf("verified %s:%s@%s\n  signed, and made from commit %s\n", a.name, a.tag, a.root.Digest, commit)
	return nil
}

// contents compares each file in an image with the signed list of its contents.
func (v *verifier) contents(ctx context.Context, image artifact, platform ocispec.Descriptor) error {
	raw, err := v.statement(ctx, image, platform, sbomPredicate)
	if err != nil {
		return err
	}
	found, err := image.files(ctx, platform)
	if err != nil {
		return err
	}
	return compareContents(platform.Platform.OS+"/"+platform.Platform.Architecture, raw, found)
}

// compareContents fails unless the list of contents has exactly these files, with these hashes.
func compareContents(what string, list []byte, found map[string]string) error {
	var bom cyclonedx.BOM
	if err := cyclonedx.NewBOMDecoder(bytes.NewReader(list), cyclonedx.BOMFileFormatJSON).Decode(&bom); err != nil {
		return fmt.Errorf("read its list of contents: %w", err)
	}
	listed := hashesOfFiles(&bom)
	for _, name := range slices.Sorted(maps.Keys(found)) {
		if listed[name] != found[name] {
			return fmt.Errorf("its list of contents has hash %q for %s, which has %s", listed[name], name, found[name])
		}
		delete(listed, name)
	}
	if len(listed) > 0 {
		return fmt.Errorf("it has no %q, which its list of contents names", slices.Sorted(maps.Keys(listed)))
	}
	fmt.Printf("  %s: %d files as listed, %d components\n", what, len(found), len(*bom.Components))
	return nil
}

// files returns the SHA-256 of each file in an image.
func (a artifact) files(ctx context.Context, image ocispec.Descriptor) (map[string]string, error) {
	var manifest ocispec.Manifest
	if err := a.read(ctx, image, &manifest); err != nil {
		return nil, err
	}
	found := map[string]string{}
	for _, layer := range manifest.Layers {
		raw, err := content.FetchAll(ctx, a.store, layer)
		if err != nil {
			return nil, err
		}
		if err := hashFiles(raw, found); err != nil {
			return nil, fmt.Errorf("unpack layer %s: %w", layer.Digest, err)
		}
	}
	return found, nil
}

// hashFiles adds the SHA-256 of each file in an archive, which is a compressed tar.
func hashFiles(archive []byte, found map[string]string) error {
	unzipped, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		return err
	}
	for files := tar.NewReader(unzipped); ; {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if header.Typeflag == tar.TypeDir {
			continue
		}
		hash := sha256.New()
		if _, err := io.Copy(hash, files); err != nil { //nolint:gosec // the archive's digest was verified
			return err
		}
		found["/"+header.Name] = hex.EncodeToString(hash.Sum(nil))
	}
}

// installs verifies that the chart has the release's version and names the image by digest.
func (v *verifier) installs(ctx context.Context, chart, image artifact) error {
	var manifest ocispec.Manifest
	if err := chart.read(ctx, chart.root, &manifest); err != nil {
		return err
	}
	if len(manifest.Layers) != 1 || manifest.Layers[0].MediaType != chartContentType {
		return fmt.Errorf("%s@%s is no chart", chart.name, chart.root.Digest)
	}
	archive, err := content.FetchAll(ctx, chart.store, manifest.Layers[0])
	if err != nil {
		return err
	}
	var metadata struct {
		Version    string `yaml:"version"`
		AppVersion string `yaml:"appVersion"`
	}
	var values struct {
		Image struct {
			Repository string `yaml:"repository"`
			Digest     string `yaml:"digest"`
		} `yaml:"image"`
	}
	if err := errors.Join(readFromChart(archive, "Chart.yaml", &metadata), readFromChart(archive, "values.yaml", &values)); err != nil {
		return err
	}
	if metadata.AppVersion != v.version || "v"+metadata.Version != v.version {
		return fmt.Errorf("the chart has version %s and appVersion %s, want those of %s", metadata.Version, metadata.AppVersion, v.version)
	}
	if values.Image.Digest != image.root.Digest.String() {
		return fmt.Errorf("the chart installs image %s, not %s", values.Image.Digest, image.root.Digest)
	}
	fmt.Printf("  the chart installs %s@%s\n", values.Image.Repository, values.Image.Digest)
	return nil
}

// statement returns what the key's owner signed about a manifest: the content of the statement of
// this type. It ignores referrers that others have attached.
func (v *verifier) statement(ctx context.Context, a artifact, manifest ocispec.Descriptor, predicateType string) (json.RawMessage, error) {
	referrers, err := registry.Referrers(ctx, a.store, manifest, bundleType)
	if err != nil {
		return nil, fmt.Errorf("list what refers to %s: %w", manifest.Digest, err)
	}
	sum, err := hex.DecodeString(manifest.Digest.Encoded())
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, referrer := range referrers {
		var attached ocispec.Manifest
		if err := a.read(ctx, referrer, &attached); err != nil {
			return nil, err
		}
		for _, layer := range attached.Layers {
			raw, err := content.FetchAll(ctx, a.store, layer)
			if err != nil {
				return nil, err
			}
			s, err := v.bundle(raw, verify.WithArtifactDigest("sha256", sum))
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", referrer.Digest, err))
			} else if s.PredicateType == predicateType {
				return s.Predicate, nil
			}
		}
	}
	return nil, errors.Join(append([]error{
		fmt.Errorf("%s@%s has no statement %s that the key has signed", a.name, manifest.Digest, predicateType),
	}, errs...)...)
}

// bundle verifies a signed bundle about an artifact and returns its statement, if it has one.
func (v *verifier) bundle(raw []byte, about verify.ArtifactPolicyOption) (statement, error) {
	var s statement
	var b bundle.Bundle
	if err := b.UnmarshalJSON(raw); err != nil {
		return s, fmt.Errorf("read the bundle: %w", err)
	}
	if _, err := v.signatures.Verify(&b, verify.NewPolicy(about, verify.WithKey())); err != nil {
		return s, err
	}
	envelope := b.GetDsseEnvelope()
	if envelope == nil {
		return s, nil
	}
	return s, json.Unmarshal(envelope.Payload, &s)
}

// alwaysValid is a key without an end of validity.
type alwaysValid struct{ signature.Verifier }

func (alwaysValid) ValidAtTime(time.Time) bool { return true }

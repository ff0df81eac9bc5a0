package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2"
	"oras.land/oras-go/v2/content"
)

// programs are the programs in the image's /usr/bin. The first one is its entry point.
var programs = []string{"gpu-kubelet-plugin", "gpu-mps", "nvidia-cdi-hook"}

// imageFile is a file in the image: a path of this host, and its permissions in the image.
type imageFile struct {
	source string
	mode   int64
}

// imageFiles returns the files of the image for one architecture by their path, the same as the
// Dockerfile's: the C library, and our own.
func (b *build) imageFiles(arch string) (libraries, own map[string]imageFile, err error) {
	found, err := cLibrary(filepath.Join(b.programs, arch, programs[0]), filepath.Join(b.cLibraries, arch, "root"))
	if err != nil {
		return nil, nil, err
	}
	libraries = map[string]imageFile{}
	for name, source := range found {
		libraries[name] = imageFile{source, 0o755}
	}
	own = map[string]imageFile{"/usr/share/doc/gpu-dra-driver/LICENSE": {filepath.Join(b.source.dir, "LICENSE"), 0o644}}
	for _, program := range programs {
		own["/usr/bin/"+program] = imageFile{filepath.Join(b.programs, arch, program), 0o755}
	}
	return libraries, own, nil
}

// pushImage writes the image of one architecture to the store. The C library has its own layer,
// because it changes rarely.
func (b *build) pushImage(ctx context.Context, store content.Pusher, arch string) (ocispec.Descriptor, error) {
	libraries, own, err := b.imageFiles(arch)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	platform := ocispec.Platform{OS: "linux", Architecture: arch}
	config := ocispec.Image{Created: &b.source.time, Platform: platform, RootFS: ocispec.RootFS{Type: "layers"}}
	config.Config = ocispec.ImageConfig{
		Entrypoint: []string{"/usr/bin/" + programs[0]},
		Env:        []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		Labels:     b.annotations(),
	}
	manifest := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest}
	for _, layer := range []struct {
		what  string
		files map[string]imageFile
		dirs  []string
	}{
		// /tmp is for the MPS daemons' file systems, since a container's root is read-only.
		{"Debian's C library", libraries, []string{"tmp"}},
		{"gpu-dra-driver " + b.version, own, nil},
	} {
		packed, unpacked, err := packLayer(layer.files, layer.dirs, b.source.time)
		if err != nil {
			return ocispec.Descriptor{}, fmt.Errorf("make the layer of %s for %s: %w", layer.what, arch, err)
		}
		pushed, err := oras.PushBytes(ctx, store, ocispec.MediaTypeImageLayerGzip, packed)
		if err != nil {
			return ocispec.Descriptor{}, err
		}
		manifest.Layers = append(manifest.Layers, pushed)
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, unpacked)
		config.History = append(config.History, ocispec.History{Created: &b.source.time, CreatedBy: layer.what})
	}
	if manifest.Config, err = pushJSON(ctx, store, ocispec.MediaTypeImageConfig, config); err != nil {
		return ocispec.Descriptor{}, err
	}
	pushed, err := pushJSON(ctx, store, ocispec.MediaTypeImageManifest, manifest)
	pushed.Platform = &platform
	return pushed, err
}

// pushIndex writes the images of all architectures and their index to the store.
func (b *build) pushIndex(ctx context.Context, store content.Pusher) (ocispec.Descriptor, error) {
	index := ocispec.Index{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex, Annotations: b.annotations(),
	}
	for _, arch := range b.arches {
		image, err := b.pushImage(ctx, store, arch)
		if err != nil {
			return image, err
		}
		index.Manifests = append(index.Manifests, image)
	}
	return pushJSON(ctx, store, ocispec.MediaTypeImageIndex, index)
}

func pushJSON(ctx context.Context, store content.Pusher, mediaType string, value any) (ocispec.Descriptor, error) {
	raw, err := json.Marshal(value)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	return oras.PushBytes(ctx, store, mediaType, raw)
}

// packLayer returns a compressed layer with the files and these empty folders, and the digest of
// the layer before compression. Everything belongs to root and has the same time.
func packLayer(files map[string]imageFile, dirs []string, at time.Time) (packed []byte, unpacked digest.Digest, err error) {
	var plain, compressed bytes.Buffer
	out := tar.NewWriter(&plain)
	made := map[string]bool{".": true}
	var makeDir func(string) error
	makeDir = func(dir string) error {
		if made[dir] {
			return nil
		}
		made[dir] = true
		if err := makeDir(path.Dir(dir)); err != nil {
			return err
		}
		return out.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755, ModTime: at})
	}
	for _, dir := range dirs {
		if err := makeDir(dir); err != nil {
			return nil, "", err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		file := files[name]
		raw, err := os.ReadFile(file.source)
		if err != nil {
			return nil, "", err
		}
		name = strings.TrimPrefix(name, "/")
		if err := makeDir(path.Dir(name)); err != nil {
			return nil, "", err
		}
		header := tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: file.mode, Size: int64(len(raw)), ModTime: at}
		if err := out.WriteHeader(&header); err != nil {
			return nil, "", err
		}
		if _, err := out.Write(raw); err != nil {
			return nil, "", err
		}
	}
	if err := out.Close(); err != nil {
		return nil, "", err
	}
	unpacked = digest.FromBytes(plain.Bytes())
	compressor := gzip.NewWriter(&compressed)
	if _, err := plain.WriteTo(compressor); err != nil {
		return nil, "", err
	}
	if err := compressor.Close(); err != nil {
		return nil, "", err
	}
	return compressed.Bytes(), unpacked, nil
}

// Package image writes container images from local files, without registry and container engine. It
// writes an OCI image layout in a tar file with one uncompressed layer, which containerd imports
// under the image's full name. Equal content gives equal bytes, and so an equal digest. It holds
// the layer in memory, so images should be small.
package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// Image collects the content of a container image. The zero value is an empty image.
type Image struct {
	// Config is the image's runtime configuration.
	Config v1.ImageConfig

	layer   bytes.Buffer
	written map[string]bool
	failure error // every error so far; Write returns it
}

// File adds a file of the host with its permissions. Symbolic links are followed.
func (i *Image) File(destination, source string) {
	content, err := os.ReadFile(source)
	if err != nil {
		i.fail(fmt.Errorf("add %s: %w", destination, err))
		return
	}
	info, err := os.Stat(source)
	if err != nil {
		i.fail(fmt.Errorf("add %s: %w", destination, err))
		return
	}
	i.Bytes(destination, info.Mode().Perm(), content)
}

// Bytes adds a file with the given content.
func (i *Image) Bytes(destination string, mode fs.FileMode, content []byte) {
	i.entry(tar.Header{Typeflag: tar.TypeReg, Name: destination, Mode: int64(mode), Size: int64(len(content))}, content)
}

// Link adds a symbolic link.
func (i *Image) Link(destination, target string) {
	i.entry(tar.Header{Typeflag: tar.TypeSymlink, Name: destination, Linkname: target, Mode: 0o777}, nil)
}

// Dir adds a folder. It is needed only for an empty folder or for special permissions, because
// Image adds the folders above a file or link.
func (i *Image) Dir(destination string, mode fs.FileMode) {
	unix := int64(mode.Perm())
	if mode&fs.ModeSticky != 0 {
		unix |= 0o1000
	}
	i.entry(tar.Header{Typeflag: tar.TypeDir, Name: destination, Mode: unix}, nil)
}

func (i *Image) entry(header tar.Header, content []byte) {
	if i.written == nil {
		i.written = map[string]bool{}
	}
	header.Name = strings.TrimPrefix(path.Clean("/"+header.Name), "/")
	if header.Name == "" || i.failure != nil {
		return
	}
	if i.written[header.Name] {
		i.fail(fmt.Errorf("add %s: the image has it already", header.Name))
		return
	}
	if parent := path.Dir(header.Name); parent != "." && !i.written[parent] {
		i.Dir(parent, 0o755)
	}
	i.written[header.Name] = true
	if header.Typeflag == tar.TypeDir {
		header.Name += "/"
	}
	if err := appendTar(&i.layer, header, content); err != nil {
		i.fail(fmt.Errorf("add %s: %w", header.Name, err))
	}
}

// appendTar writes one file to out as a tar entry. It does not end the archive, so that more
// entries can follow.
func appendTar(out io.Writer, header tar.Header, content []byte) error {
	writer := tar.NewWriter(out)
	if err := writer.WriteHeader(&header); err != nil {
		return err
	}
	if _, err := writer.Write(content); err != nil {
		return err
	}
	return writer.Flush()
}

func (i *Image) fail(err error) { i.failure = errors.Join(i.failure, err) }

// Write writes the image under its full name, say localhost/pause:1.
func (i *Image) Write(out io.Writer, name string) error {
	if i.failure != nil {
		return fmt.Errorf("image %s: %w", name, i.failure)
	}
	layout := layout{blobs: map[string][]byte{}}
	layer := slices.Concat(i.layer.Bytes(), make([]byte, 1024)) // two empty records end an archive
	layerDescriptor := layout.add(v1.MediaTypeImageLayer, layer)
	config, err := json.Marshal(v1.Image{
		Platform: v1.Platform{Architecture: runtime.GOARCH, OS: "linux"},
		Config:   i.Config,
		RootFS:   v1.RootFS{Type: "layers", DiffIDs: []digest.Digest{layerDescriptor.Digest}},
	})
	if err != nil {
		return fmt.Errorf("image %s: %w", name, err)
	}
	manifest, err := json.Marshal(v1.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest,
		Config: layout.add(v1.MediaTypeImageConfig, config), Layers: []v1.Descriptor{layerDescriptor},
	})
	if err != nil {
		return fmt.Errorf("image %s: %w", name, err)
	}
	descriptor := layout.add(v1.MediaTypeImageManifest, manifest)
	descriptor.Platform = &v1.Platform{Architecture: runtime.GOARCH, OS: "linux"}
	_, tag, _ := strings.Cut(path.Base(name), ":")
	descriptor.Annotations = map[string]string{"io.containerd.image.name": name, v1.AnnotationRefName: tag}
	if err := layout.write(out, descriptor); err != nil {
		return fmt.Errorf("image %s: %w", name, err)
	}
	return nil
}

// layout collects the files of an OCI image layout, by their digest.
type layout struct {
	blobs map[string][]byte
}

func (l layout) add(mediaType string, content []byte) v1.Descriptor {
	sum := sha256.Sum256(content)
	encoded := hex.EncodeToString(sum[:])
	l.blobs[encoded] = content
	return v1.Descriptor{MediaType: mediaType, Digest: digest.NewDigestFromEncoded(digest.SHA256, encoded), Size: int64(len(content))}
}

func (l layout) write(out io.Writer, manifest v1.Descriptor) error {
	version, err := json.Marshal(v1.ImageLayout{Version: v1.ImageLayoutVersion})
	if err != nil {
		return err
	}
	index, err := json.Marshal(v1.Index{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageIndex, Manifests: []v1.Descriptor{manifest},
	})
	if err != nil {
		return err
	}
	files := map[string][]byte{v1.ImageLayoutFile: version, v1.ImageIndexFile: index}
	for encoded, content := range l.blobs {
		files["blobs/sha256/"+encoded] = content
	}
	names := make([]string, 0, len(files))
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		header := tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(files[name]))}
		if err := appendTar(out, header, files[name]); err != nil {
			return err
		}
	}
	_, err = out.Write(make([]byte, 1024))
	return err
}

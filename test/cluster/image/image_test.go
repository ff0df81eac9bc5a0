package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

func untar(t *testing.T, content []byte) (headers []*tar.Header, files map[string][]byte) {
	t.Helper()
	files = map[string][]byte{}
	reader := tar.NewReader(bytes.NewReader(content))
	for {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return headers, files
		}
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(reader)
		if err != nil {
			t.Fatal(err)
		}
		headers, files[header.Name] = append(headers, header), body
	}
}

func example(t *testing.T) *Image {
	t.Helper()
	source := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(source, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	image := &Image{Config: v1.ImageConfig{Entrypoint: []string{"/usr/bin/program"}}}
	image.Dir("/tmp", 0o777|fs.ModeSticky)
	image.File("/usr/bin/program", source)
	image.Link("/bin", "usr/bin")
	image.Bytes("etc/passwd", 0o644, []byte("root:x:0:0::/:/bin/sh\n"))
	return image
}

func TestIndexReachesEveryBlobByDigest(t *testing.T) {
	var out bytes.Buffer
	if err := example(t).Write(&out, "localhost/example:1"); err != nil {
		t.Fatal(err)
	}
	_, files := untar(t, out.Bytes())
	blob := func(descriptor v1.Descriptor) []byte {
		content, ok := files["blobs/sha256/"+descriptor.Digest.Encoded()]
		if !ok {
			t.Fatalf("no blob %s", descriptor.Digest)
		}
		if sum := sha256.Sum256(content); hex.EncodeToString(sum[:]) != descriptor.Digest.Encoded() || int64(len(content)) != descriptor.Size {
			t.Errorf("blob %s has another digest or size", descriptor.Digest)
		}
		return content
	}
	decode := func(content []byte, into any) {
		if err := json.Unmarshal(content, into); err != nil {
			t.Fatal(err)
		}
	}
	var index v1.Index
	decode(files["index.json"], &index)
	if name := index.Manifests[0].Annotations["io.containerd.image.name"]; name != "localhost/example:1" {
		t.Errorf("containerd would import it as %q", name)
	}
	var manifest v1.Manifest
	decode(blob(index.Manifests[0]), &manifest)
	var config v1.Image
	decode(blob(manifest.Config), &config)
	if config.RootFS.DiffIDs[0] != manifest.Layers[0].Digest {
		t.Error("the layer's digest is not the one that the configuration names")
	}
	if config.Config.Entrypoint[0] != "/usr/bin/program" {
		t.Errorf("entrypoint %v", config.Config.Entrypoint)
	}
	headers, layer := untar(t, blob(manifest.Layers[0]))
	var names []string
	for _, header := range headers {
		names = append(names, header.Name)
	}
	if got, want := strings.Join(names, " "), "tmp/ usr/ usr/bin/ usr/bin/program bin etc/ etc/passwd"; got != want {
		t.Errorf("layer holds %s, want %s: parents first, nothing twice", got, want)
	}
	if headers[0].Mode != 0o1777 || headers[3].Mode != 0o755 || headers[4].Linkname != "usr/bin" {
		t.Errorf("modes or link are wrong: %o %o %q", headers[0].Mode, headers[3].Mode, headers[4].Linkname)
	}
	if string(layer["usr/bin/program"]) != "#!/bin/sh\n" {
		t.Error("content of the program got lost")
	}
}

func TestEqualContentGivesEqualImage(t *testing.T) {
	var first, second bytes.Buffer
	if err := errors.Join(example(t).Write(&first, "localhost/example:1"), example(t).Write(&second, "localhost/example:1")); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("two images of the same files differ, so that a cache would never hit")
	}
}

func TestInvalidImageIsRefused(t *testing.T) {
	for _, test := range []struct {
		name, says string
		mistake    func(*Image)
	}{
		{"missing source", "no such file", func(image *Image) { image.File("/x", "/does/not/exist") }},
		{"the same path twice", "already", func(image *Image) { image.Bytes("/x", 0o644, nil); image.Bytes("x", 0o644, nil) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			image := &Image{}
			test.mistake(image)
			if err := image.Write(io.Discard, "localhost/bad:1"); err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("got error %v, want one that says %q", err, test.says)
			}
		})
	}
}

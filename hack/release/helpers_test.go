package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/distribution/distribution/v3/configuration"
	"github.com/distribution/distribution/v3/registry/handlers"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/inmemory"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sirupsen/logrus"
)

const testVersion = "v0.1.0-rc.1"

// made is a release for tests and its keys. Its programs are small: only their format matters.
type made struct {
	dir, key, publicKey string
}

// original is the release that makeRelease copies. Building it takes seconds.
var original made

// someCommit and otherCommit are commits that a release can be made from.
const someCommit, otherCommit = "1111111111111111111111111111111111111111", "2222222222222222222222222222222222222222"

func TestMain(m *testing.M) {
	code := m.Run()
	_ = os.RemoveAll(filepath.Dir(original.key))
	os.Exit(code)
}

// makeRelease returns a signed release in a folder of its own.
func makeRelease(t *testing.T) made {
	t.Helper()
	if original.dir == "" {
		dir, err := os.MkdirTemp("", "release-test-") //nolint:usetesting // other tests copy it
		if err != nil {
			t.Fatal(err)
		}
		m := made{key: filepath.Join(dir, "key.pem"), publicKey: filepath.Join(dir, "public.pem")}
		writeKeys(t, m.key, m.publicKey)
		m.dir = buildRelease(t, dir, someCommit)
		m.run(t, "sign", "-key", m.key, m.dir)
		original = m
	}
	m := original
	m.dir = filepath.Join(t.TempDir(), "release")
	if err := os.CopyFS(m.dir, os.DirFS(original.dir)); err != nil {
		t.Fatal(err)
	}
	return m
}

func writeKeys(t *testing.T, private, public string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for path, encode := range map[string]func() ([]byte, error){
		private: func() ([]byte, error) { return cryptoutils.MarshalPrivateKeyToPEM(key) },
		public:  func() ([]byte, error) { return cryptoutils.MarshalPublicKeyToPEM(key.Public()) },
	} {
		raw, err := encode()
		if err != nil {
			t.Fatal(err)
		}
		write(t, path, raw)
	}
}

func write(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, content, 0o755); err != nil {
		t.Fatal(err)
	}
}

// buildRelease builds a release for this machine's architecture below dir, and returns its folder.
// change may change what is built.
func buildRelease(t *testing.T, dir, commit string, change ...func(*build)) string {
	t.Helper()
	helm := os.Getenv("HELM")
	if helm == "" {
		t.Skip("SKIPPED: HELM names no helm program (make test-unit and make test-release set it)")
	}
	triplet := triplets[runtime.GOARCH]
	ownProgram := dynamicProgram(t)
	for _, program := range programs {
		source := "/bin/ls"
		if program == programs[0] {
			source = ownProgram
		}
		writeProgram(t, filepath.Join(dir, "programs", runtime.GOARCH), program, source)
	}
	for _, p := range clientPlatforms {
		writeProgram(t, filepath.Join(dir, "programs", client, p.OS+"_"+p.Architecture), client, ownProgram)
	}
	library := filepath.Join(dir, "c-library", runtime.GOARCH)
	write(t, filepath.Join(library, "libc6_2.36-1_"+runtime.GOARCH+".deb"), []byte("package"))
	if err := os.MkdirAll(filepath.Join(library, "root", "lib"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/lib/"+triplet, filepath.Join(library, "root", "lib", triplet)); err != nil {
		t.Fatal(err)
	}
	b := &build{
		version: testVersion, registry: "registry.example/project", arches: []string{runtime.GOARCH}, out: filepath.Join(dir, "out"),
		programs: filepath.Join(dir, "programs"), cLibraries: filepath.Join(dir, "c-library"), helm: helm,
		chart:  "../../deployments/helm/gpu-dra-driver",
		source: source{dir: "../..", commit: commit, time: time.Unix(1_700_000_000, 0).UTC()},
	}
	for _, c := range change {
		c(b)
	}
	if err := b.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	return b.out
}

// writeProgram copies a program into a folder of programs, with a list of modules.
func writeProgram(t *testing.T, dir, name, source string) {
	t.Helper()
	raw, err := os.ReadFile(source)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, name), raw)
	write(t, filepath.Join(dir, "sbom", name+".cdx.json"), fmt.Appendf(nil,
		`{"bomFormat":"CycloneDX","specVersion":"1.6","metadata":{"component":{"type":"application","name":%q}},`+
			`"components":[{"bom-ref":"pkg:golang/example.com/m@v1.0.0","type":"library","name":"example.com/m"}]}`, name))
}

// dynamicProgram builds a small Go program that is linked with the C library.
func dynamicProgram(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "main.go"), []byte("package main\n\nimport \"C\"\n\nfunc main() {}\n"))
	out := filepath.Join(dir, "program")
	build := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-o", out, filepath.Join(dir, "main.go"))
	if text, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build a program: %v: %s", err, text)
	}
	return out
}

func (m made) run(t *testing.T, args ...string) {
	t.Helper()
	if err := run(t.Context(), args); err != nil {
		t.Fatalf("%q: %v", args, err)
	}
}

// verify verifies the release in from, a folder or a registry.
func (m made) verify(t *testing.T, from string) error {
	t.Helper()
	return run(t.Context(), []string{"verify", "-key", m.publicKey, "-version", testVersion, from})
}

func (m made) open(t *testing.T) *folder {
	t.Helper()
	f, err := openFolder(t.Context(), m.dir)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// startRegistry starts the CNCF's registry on this host, and returns its address.
func startRegistry(t *testing.T) string {
	t.Helper()
	logrus.SetOutput(io.Discard)
	log.SetOutput(io.Discard)
	config := &configuration.Configuration{Storage: configuration.Storage{"inmemory": nil}}
	config.HTTP.Secret = "test"
	config.Catalog.MaxEntries = 100
	server := httptest.NewServer(handlers.NewApp(context.WithoutCancel(t.Context()), config))
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

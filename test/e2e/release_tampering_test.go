package e2e

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// mirror forwards requests to a registry. It changes one byte of the part that an attacker chose.
type mirror struct {
	address string
	changes atomic.Value // the digest of the part, or ""
}

// startMirror starts a mirror of the registry on an address of the host.
func startMirror(t *testing.T, address, registry string) *mirror {
	t.Helper()
	m := &mirror{}
	m.changes.Store("")
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: registry})
	proxy.ModifyResponse = func(response *http.Response) error {
		digest := m.changes.Load().(string)
		if digest == "" || !strings.HasSuffix(response.Request.URL.Path, "/"+digest) || response.Request.Method != http.MethodGet {
			return nil
		}
		body, err := io.ReadAll(response.Body)
		if err != nil {
			return err
		}
		if len(body) > 0 {
			body[len(body)/2] ^= 1
		}
		response.Body = io.NopCloser(bytes.NewReader(body))
		return nil
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(address, "0"))
	if err != nil {
		t.Fatal(err)
	}
	server := &httptest.Server{Listener: listener, Config: &http.Server{Handler: proxy, ReadHeaderTimeout: time.Minute}}
	server.Start()
	t.Cleanup(server.Close)
	m.address = listener.Addr().String()
	return m
}

// signedRelease is a release that its maker signed, and the registry that users pull it from.
type signedRelease struct {
	tool, folder, publicKey, version, registry string
}

// signRelease copies a release, and signs the copy with a new key.
func (w *world) signRelease(t *testing.T, folder, version, registry string) signedRelease {
	t.Helper()
	dir := t.TempDir()
	r := signedRelease{
		tool: w.buildReleaseTool(t, "."), folder: filepath.Join(dir, "release"), publicKey: filepath.Join(dir, "public.pem"),
		version: version, registry: registry,
	}
	if err := os.CopyFS(r.folder, os.DirFS(folder)); err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	privateKey := filepath.Join(dir, "key.pem")
	for path, block := range map[string]pem.Block{
		privateKey: {Type: "PRIVATE KEY", Bytes: private}, r.publicKey: {Type: "PUBLIC KEY", Bytes: public},
	} {
		if err := os.WriteFile(path, pem.EncodeToMemory(&block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.CommandContext(t.Context(), r.tool, "sign", "-key", privateKey, r.folder).CombinedOutput(); err != nil {
		t.Fatalf("sign the release: %v\n%s", err, out)
	}
	return r
}

// chart is the chart's address for helm.
func (r signedRelease) chart() string { return "oci://" + r.registry + "/charts/gpu-dra-driver" }

func (r signedRelease) push(t *testing.T) {
	t.Helper()
	push := exec.CommandContext(t.Context(), r.tool, "push", "-modified", "-to", r.registry, r.folder)
	if out, err := push.CombinedOutput(); err != nil {
		t.Fatalf("push the release: %v\n%s", err, out)
	}
}

// verify is what a user does before the installation. It returns the output of "release verify".
func (r signedRelease) verify(t *testing.T) (string, error) {
	t.Helper()
	verify := exec.CommandContext(t.Context(), r.tool, "verify", "-modified", "-key", r.publicKey, "-version", r.version, r.registry)
	out, err := verify.CombinedOutput()
	return string(out), err
}

// readManifest reads a manifest of a layout in the release's folder.
func readManifest(t *testing.T, folder, layout, digest string, into any) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(folder, layout, "blobs", strings.ReplaceAll(digest, ":", "/")))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, into); err != nil {
		t.Fatal(err)
	}
}

type layers struct {
	Layers []struct {
		Digest string `json:"digest"`
	} `json:"layers"`
}

// topLayer returns the digest of the image's last layer for this architecture.
func topLayer(t *testing.T, folder string, image released) string {
	t.Helper()
	var index struct {
		Manifests []struct {
			Digest   string `json:"digest"`
			Platform struct {
				Architecture string `json:"architecture"`
			} `json:"platform"`
		} `json:"manifests"`
	}
	readManifest(t, folder, "image", image.digest, &index)
	for _, m := range index.Manifests {
		if m.Platform.Architecture == runtime.GOARCH {
			var found layers
			readManifest(t, folder, "image", m.Digest, &found)
			return found.Layers[len(found.Layers)-1].Digest
		}
	}
	t.Fatalf("image %s has no platform %s", image.digest, runtime.GOARCH)
	return ""
}

// refusesChangedImage starts a Pod with the image while its mirror changes the index, and another
// one while it changes a layer. Neither may run before the mirror is honest again.
func (u tenant) refusesChangedImage(on *mirror, folder string, image released) {
	u.t.Helper()
	for _, changed := range []struct{ part, digest string }{
		{"index", image.digest}, {"layer", topLayer(u.t, folder, image)},
	} {
		on.changes.Store(changed.digest)
		u.pod(changed.part, func(p *corev1.Pod) {
			p.Spec.Containers = []corev1.Container{{
				Name: "main", Image: image.repository + "@" + image.digest, Command: []string{"gpu-kubelet-plugin", "version"},
			}}
		})
		eventually(u.t, 60*time.Second, "an Event says that the "+changed.part+" does not match its digest", func() (bool, string) {
			said := u.events(u.t, u.namespace, changed.part)
			return strings.Contains(said, "unexpected commit digest") && strings.Contains(said, "expected "+changed.digest), said
		})
		if status := u.get(changed.part).Status; status.Phase != corev1.PodPending || status.ContainerStatuses[0].ImageID != "" {
			u.t.Errorf("Pod %s is %s with image %q, want no image", changed.part, status.Phase, status.ContainerStatuses[0].ImageID)
		}
	}
	on.changes.Store("")
	eventually(u.t, 90*time.Second, "both Pods run once the mirror is honest", func() (bool, string) {
		index, layer := u.get("index").Status.Phase, u.get("layer").Status.Phase
		return index == corev1.PodSucceeded && layer == corev1.PodSucceeded, fmt.Sprint(index, layer)
	})
}

// refusesChangedChart pulls the chart from a mirror that changes its archive.
func (w *world) refusesChangedChart(t *testing.T, on *mirror, folder, project string, chart released) {
	t.Helper()
	var manifest layers
	readManifest(t, folder, "chart", chart.digest, &manifest)
	pull := func() (string, error) {
		return w.Helm(t.Context(), "pull", "oci://"+on.address+"/"+project+"/charts/gpu-dra-driver", "--version", chart.tag,
			"--plain-http", "--destination", t.TempDir())
	}
	on.changes.Store(manifest.Layers[0].Digest)
	if out, err := pull(); err == nil || !strings.Contains(err.Error(), "digest") {
		t.Errorf("helm pulled a changed chart: %v\n%s", err, out)
	}
	on.changes.Store("")
	if out, err := pull(); err != nil {
		t.Errorf("helm does not pull the chart: %v\n%s", err, out)
	}
}

// findsReplacedChart lets an attacker who may push, but has no key, replace the chart by one with
// another image. Verification must find that, and the digest must still name the original. Then the
// maker pushes the release again.
func (w *world) findsReplacedChart(t *testing.T, r signedRelease, chart released) {
	t.Helper()
	if out, err := r.verify(t); err != nil {
		t.Fatalf("the release as it was pushed: %v\n%s", err, out)
	}
	dir := t.TempDir()
	values := filepath.Join(dir, "gpu-dra-driver", "values.yaml")
	run := func(args ...string) {
		t.Helper()
		if out, err := w.Helm(t.Context(), args...); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	run("pull", r.chart(), "--version", chart.tag, "--plain-http", "--untar", "--untardir", dir)
	raw, err := os.ReadFile(values)
	if err != nil {
		t.Fatal(err)
	}
	changed := regexp.MustCompile(`digest: sha256:[0-9a-f]{64}`).ReplaceAll(raw, []byte("digest: sha256:"+strings.Repeat("0", 64)))
	if bytes.Equal(raw, changed) {
		t.Fatalf("the chart names no digest:\n%s", raw)
	}
	if err := os.WriteFile(values, changed, 0o644); err != nil {
		t.Fatal(err)
	}
	run("package", filepath.Dir(values), "--destination", dir)
	run("push", filepath.Join(dir, "gpu-dra-driver-"+chart.tag+".tgz"), strings.TrimSuffix(r.chart(), "/gpu-dra-driver"), "--plain-http")
	out, err := r.verify(t)
	if want := "charts/gpu-dra-driver@"; err == nil || !strings.Contains(out, want) || !strings.Contains(out, "has no statement") {
		t.Errorf("verification of a replaced chart: %v\n%s", err, out)
	}
	by := t.TempDir()
	run("pull", r.chart()+"@"+chart.digest, "--plain-http", "--destination", by)
	original, err := os.ReadFile(filepath.Join(r.folder, "gpu-dra-driver-"+chart.tag+".tgz"))
	if err != nil {
		t.Fatal(err)
	}
	archives, err := filepath.Glob(filepath.Join(by, "*.tgz"))
	if err != nil || len(archives) != 1 {
		t.Fatalf("helm pulled %q by the digest: %v", archives, err)
	}
	if pulled, err := os.ReadFile(archives[0]); err != nil || !bytes.Equal(pulled, original) {
		t.Errorf("helm did not pull the original by its digest: %v", err)
	}
	r.push(t)
	if out, err := r.verify(t); err != nil || !strings.Contains(out, fmt.Sprintf("%s@%s", chart.tag, chart.digest)) {
		t.Errorf("after another push: %v\n%s", err, out)
	}
}

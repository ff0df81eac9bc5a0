package fleet

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/fleettest"
)

const secret = "hunter2"

// secretive returns a cluster with a secret at every place that Kubernetes users put one.
func secretive() *fleettest.Cluster {
	c := fleettest.New()
	c.Node("n1", fleettest.H100, 1, "static", "").Annotations = map[string]string{"token": secret}
	claim := c.Claim("a", fleettest.Request("gpu", "gpu.nvidia.com", 1))
	claim.Annotations = map[string]string{"kubectl.kubernetes.io/last-applied-configuration": secret}
	claim.Spec.Devices.Config = []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{
		Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: "other.example.com", Parameters: runtime.RawExtension{Raw: []byte(`{"k":"` + secret + `"}`)},
		},
	}}}
	p := c.Pod("p", "a")
	p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "TOKEN", Value: secret}}
	p.Spec.Containers[0].Args = []string{secret}
	p.Spec.Containers[0].Image = secret
	p.Spec.NodeSelector = map[string]string{"disk": "fast"}
	return c
}

func readFrom(t *testing.T, client *fake.Clientset) (*Snapshot, error) {
	t.Helper()
	return Read(t.Context(), client, func(context.Context) ([]byte, error) {
		return []byte("kubernetes_feature_enabled{name=\"DRADeviceTaints\",stage=\"\"} 0\nother 1\n"), nil
	})
}

func archive(t *testing.T, s *Snapshot, o ArchiveOptions) ([]byte, Manifest) {
	t.Helper()
	var b bytes.Buffer
	m, err := s.WriteArchive(&b, o)
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes(), m
}

func content(t *testing.T, packed []byte) string {
	t.Helper()
	zip, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	files := tar.NewReader(zip)
	for {
		if _, err := files.Next(); errors.Is(err, io.EOF) {
			return all.String()
		} else if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(&all, files); err != nil {
			t.Fatal(err)
		}
	}
}

func TestArchiveHasNoSecrets(t *testing.T) {
	s, err := readFrom(t, fake.NewClientset(secretive().Objects()...))
	if err != nil {
		t.Fatal(err)
	}
	for _, pods := range []bool{false, true} {
		packed, _ := archive(t, s, ArchiveOptions{Time: time.Unix(0, 0), Pods: pods})
		text := content(t, packed)
		if strings.Contains(text, secret) {
			t.Errorf("pods=%v: the archive has the secret", pods)
		}
		if strings.Contains(text, "fast") != pods {
			t.Errorf("pods=%v: the Pod's node selector is in the archive: %v", pods, !pods)
		}
		back, err := readArchive(bytes.NewReader(packed))
		if err != nil {
			t.Fatal(err)
		}
		if back.Pod(fleettest.Namespace, "p") == nil || back.Claim(fleettest.Namespace, "a") == nil || back.On(GateTaints) {
			t.Error("the archive lacks a Pod, a claim or a feature gate")
		}
	}
}

func TestArchiveIsBounded(t *testing.T) {
	s, err := readFrom(t, fake.NewClientset(secretive().Objects()...))
	if err != nil {
		t.Fatal(err)
	}
	_, whole := archive(t, s, ArchiveOptions{})
	limit := whole.Files[0].Bytes + whole.Files[1].Bytes
	_, m := archive(t, s, ArchiveOptions{MaxBytes: limit})
	total := 0
	for _, f := range m.Files {
		total += f.Bytes
	}
	if total > limit || len(m.Files) == 0 || m.Files[0].Name != "resourceslices.json" || len(m.LeftOut) == 0 {
		t.Errorf("%d of %d bytes, left out %v", total, limit, m.LeftOut)
	}
}

func TestDamagedArchivesAreErrors(t *testing.T) {
	const manifestOfPods = `{"format":1,"files":[{"name":"pods.json",` +
		`"sha256":"4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945"}]}`
	packed := func(files map[string]string) []byte {
		var b bytes.Buffer
		zip := gzip.NewWriter(&b)
		out := tar.NewWriter(zip)
		for name, text := range files {
			if err := out.WriteHeader(&tar.Header{Name: name, Mode: 0o600, Size: int64(len(text))}); err != nil {
				t.Fatal(err)
			}
			if _, err := out.Write([]byte(text)); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(out.Close(), zip.Close()); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	for name, c := range map[string]struct {
		archive []byte
		want    string
	}{
		"no archive":   {[]byte("text"), "EOF"},
		"no manifest":  {packed(map[string]string{"pods.json": "[]"}), "it has no manifest.json"},
		"other format": {packed(map[string]string{"manifest.json": `{"format":2}`}), "its format is 2"},
		"lost file":    {packed(map[string]string{"manifest.json": manifestOfPods}), "file pods.json is missing or altered"},
		"altered file": {packed(map[string]string{"manifest.json": manifestOfPods, "pods.json": "[ ]"}), "file pods.json is missing or altered"},
		"bad JSON":     {packed(map[string]string{"manifest.json": `{"format":1}`, "pods.json": "{"}), "file pods.json"},
	} {
		if _, err := readArchive(bytes.NewReader(c.archive)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", name, err, c.want)
		}
	}
	s, err := readArchive(bytes.NewReader(packed(map[string]string{
		"manifest.json": `{"format":1}`, "pods.json": "[null]", "resourceslices.json": "[null]", "nodes.json": "null",
	})))
	if err != nil || len(s.Pods)+len(s.Slices)+len(s.Nodes) != 0 {
		t.Errorf("null objects: %v, %v", s, err)
	}
	if _, err := readArchive(bytes.NewReader(packed(map[string]string{"manifest.json": manifestOfPods, "pods.json": "[]"}))); err != nil {
		t.Errorf("complete archive: %v", err)
	}
}

// What is above the limit counts as not read. Without slices, claims or nodes there is no answer.
func TestArchiveWithoutSlicesOrClaimsIsRefused(t *testing.T) {
	s, err := readFrom(t, fake.NewClientset(secretive().Objects()...))
	if err != nil {
		t.Fatal(err)
	}
	_, whole := archive(t, s, ArchiveOptions{})
	for limit, want := range map[int]string{
		whole.Files[0].Bytes:     "what could not be read: ResourceClaims: the",
		whole.Files[0].Bytes - 1: "what could not be read: ResourceSlices: the",
	} {
		path := filepath.Join(t.TempDir(), "a.tar.gz")
		packed, _ := archive(t, s, ArchiveOptions{MaxBytes: limit})
		if err := os.WriteFile(path, packed, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadArchive(path); err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), want) {
			t.Errorf("%d bytes: %v, want %q", limit, err, want)
		}
	}
}

func TestErrorsOfTheAPIServerNameTheKind(t *testing.T) {
	for resource, c := range map[string]struct {
		err  error
		want string
	}{
		"resourceslices": {apierrors.NewNotFound(schema.GroupResource{}, ""), "use Kubernetes 1.34 or later"},
		"resourceclaims": {errors.New("forbidden"), "list ResourceClaims: forbidden"},
		"nodes":          {errors.New("forbidden"), "list Nodes: forbidden"},
	} {
		client := fake.NewClientset()
		client.PrependReactor("list", resource, func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, c.err })
		if _, err := readFrom(t, client); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", resource, err, c.want)
		}
	}
}

func TestUnreadableObjectsAreListed(t *testing.T) {
	client := fake.NewClientset(secretive().Objects()...)
	deny := func(resource string) {
		client.PrependReactor("list", resource, func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, nil, errors.New("forbidden")
		})
	}
	deny("pods")
	s, err := readFrom(t, client)
	if err != nil || len(s.Missing) != 1 || !strings.HasPrefix(s.Missing[0], "Pods: forbidden") {
		t.Errorf("%v, missing %v", err, s.Missing)
	}
	deny("resourceclaims")
	if _, err := readFrom(t, client); err == nil {
		t.Error("read a cluster without its claims")
	}
}

func TestGatesFollowVersionAndMetrics(t *testing.T) {
	for _, c := range []struct {
		version string
		gates   map[string]bool
		want    bool
	}{
		{"v1.35.2", nil, false}, {"v1.36.0", nil, true}, {"", nil, true}, {"v1.35.2", map[string]bool{GatePartitions: true}, true},
		{"v1.36.0", map[string]bool{GatePartitions: false}, false},
	} {
		s := &Snapshot{Version: c.version, Gates: c.gates}
		if got := s.Features().PartitionableDevices; got != c.want {
			t.Errorf("%s %v: %v", c.version, c.gates, got)
		}
	}
}

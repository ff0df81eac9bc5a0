package chart

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
)

const (
	chartDir  = "../../deployments/helm/gpu-dra-driver"
	release   = "gpus"
	namespace = "gpu-system"
	// plugin is the name of the DaemonSet and of all that belongs to it.
	plugin = "gpus-gpu-dra-driver-kubelet-plugin"
	// uninstaller is the name of the pre-delete Job and of all that belongs to it.
	uninstaller = "gpus-gpu-dra-driver-uninstall"
)

// helm finds the binary, and skips only where nobody promised one.
func helm(t *testing.T) string {
	t.Helper()
	if named := os.Getenv("HELM"); named != "" {
		return named
	}
	if path, err := exec.LookPath("helm"); err == nil {
		return path
	}
	if cache, err := os.UserCacheDir(); err == nil {
		if found, _ := filepath.Glob(filepath.Join(cache, "gpu-dra-driver", "cluster", "helm-*", "helm")); len(found) > 0 {
			return found[len(found)-1]
		}
	}
	t.Skip("no helm in $HELM, PATH or the test cluster's cache: `make test-unit` builds one")
	return ""
}

// template runs helm template; args are further arguments such as --set.
func template(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := exec.Command(helm(t), append([]string{"template", release, chartDir, "--namespace", namespace}, args...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", errors.New(stderr.String())
	}
	return stdout.String(), nil
}

// render returns what the chart makes of the values, each object decoded without tolerance for unknown or repeated fields.
// Kinds that this module has no type for are returned as text only.
func render(t *testing.T, args ...string) (objects []runtime.Object, text string) {
	t.Helper()
	text, err := template(t, args...)
	if err != nil {
		t.Fatalf("helm template %s: %v", strings.Join(args, " "), err)
	}
	return decode(t, text), text
}

func decode(t *testing.T, manifests string) []runtime.Object {
	t.Helper()
	strict := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	var objects []runtime.Object
	documents := yaml.NewDocumentDecoder(io.NopCloser(strings.NewReader(manifests)))
	defer func() { _ = documents.Close() }()
	for buffer := make([]byte, 1<<20); ; {
		n, err := documents.Read(buffer)
		if errors.Is(err, io.EOF) {
			return objects
		}
		if err != nil {
			t.Fatalf("split the manifests: %v", err)
		}
		document := buffer[:n]
		if !bytes.Contains(document, []byte("kind:")) || bytes.Contains(document, []byte("kind: PodMonitor")) {
			continue
		}
		object, _, err := strict.Decode(document, nil, nil)
		if err != nil {
			t.Fatalf("decode strictly: %v\n%s", err, document)
		}
		objects = append(objects, object)
	}
}

// only returns the one object of type T that has the name.
func only[T interface {
	runtime.Object
	GetName() string
}](t *testing.T, objects []runtime.Object, name string) T {
	t.Helper()
	var found []T
	for _, object := range objects {
		if typed, ok := object.(T); ok && typed.GetName() == name {
			found = append(found, typed)
		}
	}
	if len(found) != 1 {
		var none T
		t.Fatalf("the chart renders %d objects of type %T with the name %s, want 1", len(found), none, name)
	}
	return found[0]
}

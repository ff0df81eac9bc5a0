package chart

import (
	"bytes"
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

const (
	chartDir  = "../../deployments/helm/gpu-dra-driver"
	release   = "gpus"
	namespace = "gpu-system"
	// plugin is the name of the plugin's DaemonSet and of the objects that belong to it.
	plugin = "gpus-gpu-dra-driver-kubelet-plugin"
	// uninstaller is the name of the pre-delete Job and of the objects that belong to it.
	uninstaller = "gpus-gpu-dra-driver-uninstall"
)

// helm returns the path of the helm program. If there is none, it skips the test.
func helm(t *testing.T) string {
	t.Helper()
	path, found := clusterharness.FindHelm()
	if !found {
		t.Skip("no helm in $HELM, PATH or the test cluster's cache: run `make test-unit`, which builds one")
	}
	return path
}

// template runs `helm template` with these additional arguments, such as --set. It returns the
// rendered text, or helm's error.
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

// render returns the objects that the chart renders, and their text. Unknown or repeated fields
// fail the test. The objects of prometheus-operator have no Go type here, so they are only
// in the text.
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
		if !bytes.Contains(document, []byte("kind:")) || bytes.Contains(document, []byte("\napiVersion: monitoring.coreos.com/")) {
			continue
		}
		object, _, err := strict.Decode(document, nil, nil)
		if err != nil {
			t.Fatalf("decode strictly: %v\n%s", err, document)
		}
		objects = append(objects, object)
	}
}

// only returns the object of type T with this name. It fails the test unless there is exactly one.
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

package toolchain

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestReleaseModuleHasItsLibraries(t *testing.T) {
	const original = `module k8s.io/kubernetes

go 1.26.0

require (
	github.com/spf13/cobra v1.10.0
	k8s.io/api v0.0.0
	k8s.io/klog/v2 v2.140.0
)

replace (
	example.com/fork => example.com/fixed v1.2.3
	k8s.io/api => ./staging/src/k8s.io/api
)
`
	got, err := releaseModule([]byte(original), kubernetesModule, "v1.37.0")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"module cluster.test/release\n", "\tk8s.io/kubernetes v1.37.0\n", "\tk8s.io/api => k8s.io/api v0.37.0\n",
		"\tgithub.com/spf13/cobra v1.10.0\n", "\tk8s.io/klog/v2 v2.140.0\n", "\texample.com/fork => example.com/fixed v1.2.3\n",
	} {
		if !strings.Contains(string(got), want) {
			t.Errorf("the module lacks %q:\n%s", want, got)
		}
	}
	if strings.Contains(string(got), "staging") {
		t.Errorf("the module needs a folder of Kubernetes' repository:\n%s", got)
	}
}

func TestVersionMustBeRelease(t *testing.T) {
	cache := &Cache{Dir: t.TempDir()}
	for _, version := range []string{"1.37.0", "v1.37", "v1.37.0-rc.1", "master", "v1.37.0@x", "../v1.37.0"} {
		if _, err := cache.release(t.Context(), t.TempDir(), tools[0], version, NewProgress(nil)); err == nil ||
			!strings.Contains(err.Error(), "v1.37.0") {
			t.Errorf("%q: error is %v, want one that shows what a version looks like", version, err)
		}
	}
}

func TestPinnedVersionComesFromPinnedModule(t *testing.T) {
	const pinned = "module example.com/tools\n\ngo 1.26.0\n\nrequire k8s.io/kubernetes v1.36.3\n"
	source, cache := t.TempDir(), &Cache{Dir: t.TempDir()}
	if err := os.WriteFile(filepath.Join(source, "go.mod"), []byte(pinned), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(source, "kubernetes"), 0o755); err != nil {
		t.Fatal(err)
	}
	main := []byte("package main\n")
	if err := os.WriteFile(filepath.Join(source, "kubernetes", "main.go"), main, 0o600); err != nil {
		t.Fatal(err)
	}
	// Put the module of another Kubernetes version into the cache, so that no download is needed.
	files := map[string]string{"kubernetes/main.go": string(main)}
	other := filepath.Join(cache.Dir, "release-kubernetes-"+Key("v1.37.0", fmt.Sprint(files)))
	if err := os.Mkdir(other, 0o755); err != nil {
		t.Fatal(err)
	}
	for wanted, want := range map[string]string{"": source, "v1.36.3": source, "v1.37.0": other} {
		got, err := cache.moduleOf(t.Context(), tools[0], source, wanted, NewProgress(nil))
		if err != nil || got != want {
			t.Errorf("Kubernetes %q is built in %s (%v), want %s", wanted, got, err, want)
		}
	}
	for _, tool := range tools {
		got := Versions{Kubernetes: "v1.37.0", Containerd: "v1.7.35", ContainerToolkit: "v1.19.1"}.of(tool)
		if want := map[string]string{"kubernetes": "v1.37.0", "containerd": "v1.7.35", "nvidia-ctk": "v1.19.1"}[tool.name]; got != want {
			t.Errorf("%s is built in version %q, want %q", tool.name, got, want)
		}
	}
}

func TestPinnedVersionsAreThoseOfToolModule(t *testing.T) {
	for _, tool := range tools {
		want := map[string]string{"kubernetes": PinnedKubernetes, "containerd": PinnedContainerd}[tool.name]
		if want == "" {
			continue
		}
		if got, err := moduleVersion(filepath.Join("../../tools", tool.own), tool.module); err != nil || got != want {
			t.Errorf("its tool module pins %s %s (%v), this package names %s", tool.name, got, err, want)
		}
	}
}

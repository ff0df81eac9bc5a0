package toolchain

import (
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
	got, err := releaseModule([]byte(original), "v1.37.0")
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

func TestKubernetesVersionMustBeRelease(t *testing.T) {
	cache := &Cache{Dir: t.TempDir()}
	for _, version := range []string{"1.37.0", "v1.37", "v1.37.0-rc.1", "master", "v1.37.0@x", "../v1.37.0"} {
		if _, err := cache.release(t.Context(), t.TempDir(), version, NewProgress(nil)); err == nil || !strings.Contains(err.Error(), "v1.37.0") {
			t.Errorf("%q: error is %v, want one that shows what a version looks like", version, err)
		}
	}
}

func TestOtherKubernetesReplacesOnlyKubernetes(t *testing.T) {
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
	other := filepath.Join(cache.Dir, "release-"+Key("v1.37.0", string(main)))
	if err := os.Mkdir(other, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ program, kubernetes, want string }{
		{"kube-scheduler", "", source},
		{"kube-scheduler", "v1.36.3", source}, // the pinned version is built from the pinned module
		{"kube-scheduler", "v1.37.0", other},
		{"etcd", "v1.37.0", source},
	} {
		for _, tool := range tools {
			if !tool.wanted([]string{test.program}) {
				continue
			}
			got, err := cache.moduleOf(t.Context(), tool, source, test.kubernetes, NewProgress(nil))
			if err != nil || got != test.want {
				t.Errorf("%s of Kubernetes %q is built in %s (%v), want %s", test.program, test.kubernetes, got, err, test.want)
			}
		}
	}
}

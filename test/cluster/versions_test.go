package cluster

import (
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/toolchain"
)

func TestVersionNamesLineOrRelease(t *testing.T) {
	for _, test := range []struct{ kubernetes, containerd, wantKubernetes, wantContainerd string }{
		{"", "", "", ""},
		{"1.37", "1.7", "v1.37.2", "v1.7.35"},
		{"v1.34", "v2.3", "v1.34.4", "v2.3.7"},
		{"1.35.1", "1.7.1", "v1.35.1", "v1.7.1"},
	} {
		got, err := Options{Kubernetes: test.kubernetes, Containerd: test.containerd}.versions()
		if want := (toolchain.Versions{Kubernetes: test.wantKubernetes, Containerd: test.wantContainerd}); err != nil || got != want {
			t.Errorf("%+v becomes %v (%v), want %v", test, got, err, want)
		}
	}
}

func TestPinnedVersionsAreTested(t *testing.T) {
	if got := releaseOf("").Version; got != toolchain.PinnedKubernetes {
		t.Errorf("the pinned Kubernetes is %s, the tested one of its line is %s", toolchain.PinnedKubernetes, got)
	}
	if got, err := exact("containerd", line(toolchain.PinnedContainerd), containerds); err != nil || got != toolchain.PinnedContainerd {
		t.Errorf("the pinned containerd is %s, the tested one of its line is %s (%v)", toolchain.PinnedContainerd, got, err)
	}
}

func TestEachReleaseHasItsGates(t *testing.T) {
	older, newer := releaseOf("v1.34.9"), releaseOf("v1.37.2")
	if !older.featureGates()["DRADeviceTaints"] || newer.featureGates()["DRADeviceTaints"] {
		t.Errorf("DRADeviceTaints is off by default in 1.34 and on in 1.37, but the gates are %v and %v", older.gates, newer.gates)
	}
	if config := newer.runtimeConfig(); !strings.Contains(config, "scheduling.k8s.io/v1beta1=true,") {
		t.Errorf("gate GenericWorkload of 1.37 needs scheduling.k8s.io/v1beta1, the API server serves %s", config)
	}
}

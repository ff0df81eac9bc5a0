package toolchain

import (
	"slices"
	"strings"
	"sync/atomic"
	"testing"
)

func TestToolIsSelectedByItsPrograms(t *testing.T) {
	wanted := func(names ...string) (found []string) {
		for _, tool := range tools {
			if tool.wanted(names) {
				found = append(found, tool.name)
			}
		}
		return found
	}
	if got := wanted("kubectl"); !slices.Equal(got, []string{"kubernetes"}) {
		t.Errorf("kubectl comes from %v", got)
	}
	if got := wanted("helm", "runc"); !slices.Equal(got, []string{"runc", "helm"}) {
		t.Errorf("helm and runc come from %v", got)
	}
	if got := wanted("nvidia-ctk"); !slices.Equal(got, []string{"nvidia-ctk"}) {
		t.Errorf("nvidia-ctk comes from %v", got)
	}
	if got := wanted(); len(got) != len(tools)-1 || slices.Contains(got, "nvidia-ctk") {
		t.Errorf("with no names %v would be built, want all but nvidia-ctk", got)
	}
}

func TestKubernetesVersionIsLinked(t *testing.T) {
	flags := kubernetesVersionFlags("v1.36.3")
	for _, want := range []string{"k8s.io/component-base/version.gitVersion=v1.36.3", "k8s.io/component-base/version.gitMajor=1",
		"k8s.io/component-base/version.gitMinor=36"} {
		if !strings.Contains(flags, "-X "+want) {
			t.Errorf("%q lacks %q", flags, want)
		}
	}
}

func TestCompilerOutputIsSplit(t *testing.T) {
	const output = "go: downloading example.com/x v1.0.0\ninternal/abi\nexample.com/x\n# example.com/x\nx/y.go:3:4: undefined: z\n"
	var compiled atomic.Int64
	if complaints := follow(strings.NewReader(output), &compiled); complaints != "# example.com/x\nx/y.go:3:4: undefined: z\n" {
		t.Errorf("the error would say %q", complaints)
	}
	if compiled.Load() != 2 {
		t.Errorf("%d packages counted, want 2", compiled.Load())
	}
}

package faults

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2/ktesting"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nodeharness"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

var gpuNode = regexp.MustCompile(`/dev/nvidia[0-9]+`)

func (s *testNode) specFile(uid types.UID) string {
	return filepath.Join(s.Config().CDIRoot, fmt.Sprintf("k8s.gpu.nvidia.com-claim_%s.json", uid))
}

// deviceNodes returns the GPU device nodes in a claim's CDI spec. Without a spec it returns nil.
func (s *testNode) deviceNodes(uid types.UID) ([]string, error) {
	spec, err := os.ReadFile(s.specFile(uid))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return slices.Compact(gpuNode.FindAllString(string(spec), -1)), err
}

// A GPU falls off the bus, and the driver is loaded again in the same boot. The GPU that is left
// then has the lost one's number, and the kubelet restarts containers without a Prepare.
func TestNoClaimKeepsTheNumberOfAnotherGPU(t *testing.T) {
	wholeGPU, partition := nodeharness.Claim("lost", gpu0), nodeharness.Claim("lost", gpu0+"-mig-19-0")
	for name, c := range map[string]struct {
		lost *resourceapi.ResourceClaim
		// meanwhile means that the driver is loaded while no plugin runs, noSpec that the claim's CDI
		// spec is missing then.
		meanwhile, noSpec bool
	}{
		"a whole GPU":                       {lost: wholeGPU},
		"a partition":                       {lost: partition},
		"a claim that has the other, too":   {lost: nodeharness.Claim("lost", gpu0, gpu1+"-mig-19-5")},
		"a whole GPU, while no plugin runs": {lost: wholeGPU, meanwhile: true},
		"a partition, while no plugin runs": {lost: partition, meanwhile: true},
		"a claim whose CDI spec is missing": {lost: wholeGPU, noSpec: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newTestNode(t)
			must := func(what string, err error) {
				t.Helper()
				if err != nil {
					t.Fatalf("%s: %v", what, err)
				}
			}
			_, ctx := ktesting.NewTestContext(t)
			d, err := s.Start(ctx, s.api)
			must("start", err)
			defer func() { must("stop", d.Stop()) }()
			kept := nodeharness.Claim("kept", gpu1+"-mig-19-6")
			for _, claim := range []*resourceapi.ResourceClaim{c.lost, kept} {
				must("allocate", s.api.Allocate(ctx, claim))
				must("prepare", eventually(ctx, func(ctx context.Context) error { return d.Prepare(ctx, claim) }))
			}
			if nodes, err := s.deviceNodes(kept.UID); err != nil || !slices.Equal(nodes, []string{"/dev/nvidia1"}) {
				t.Fatalf("before: %v, %v", nodes, err)
			}

			if c.meanwhile {
				must("stop", d.Stop())
			}
			must("lose the GPU", s.Change(func(f *state.File) error { return f.Lose(0) }))
			must("reload", eventually(ctx, func(context.Context) error { return s.reload() }))
			if c.noSpec {
				if err := os.Remove(s.specFile(c.lost.UID)); !errors.Is(err, fs.ErrNotExist) { // the plugin may be faster
					must("remove the spec", err)
				}
			}
			if c.meanwhile {
				d, err = s.Start(ctx, s.api)
				must("start again", err)
			}
			must("after the reload", eventually(ctx, func(context.Context) error {
				left, err := s.deviceNodes(kept.UID)
				gone, err2 := s.deviceNodes(c.lost.UID)
				if err := errors.Join(err, err2); err != nil {
					return err
				}
				if !slices.Equal(left, []string{"/dev/nvidia0"}) || gone != nil {
					return fmt.Errorf("the claim whose GPU is left has %v, want /dev/nvidia0; the other has %v, want no CDI spec", left, gone)
				}
				return nil
			}))
		})
	}
}

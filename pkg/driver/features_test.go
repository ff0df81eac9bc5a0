package driver

import (
	"errors"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// server answers a dry run as an API server whose feature gates drop fields does.
func server(drop func(*resourceapi.ResourceSliceSpec) error) *fake.Clientset {
	client := fake.NewClientset()
	client.PrependReactor("create", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		create, ok := a.(clienttesting.CreateActionImpl)
		if !ok || len(create.CreateOptions.DryRun) == 0 {
			return true, nil, errors.New("the probe must be a dry run")
		}
		slice := create.GetObject().(*resourceapi.ResourceSlice).DeepCopy()
		if err := drop(&slice.Spec); err != nil {
			return true, nil, err
		}
		return true, slice, nil
	})
	return client
}

func TestProbeTellsWhichFieldsSurvive(t *testing.T) {
	for name, c := range map[string]struct {
		drop func(*resourceapi.ResourceSliceSpec) error
		want Features
	}{
		"everything": {func(*resourceapi.ResourceSliceSpec) error { return nil }, Features{true, true, true, true, true}},
		"no taints": {func(s *resourceapi.ResourceSliceSpec) error {
			for i := range s.Devices {
				s.Devices[i].Taints = nil
			}
			return nil
		}, Features{false, true, true, true, false}},
		"no taints that only inform": {func(s *resourceapi.ResourceSliceSpec) error {
			for _, d := range s.Devices {
				if len(d.Taints) > 0 && d.Taints[0].Effect == resourceapi.DeviceTaintEffectNone {
					return apierrors.NewInvalid(schema.GroupKind{Kind: "ResourceSlice"}, "probe", nil)
				}
			}
			return nil
		}, Features{true, true, true, true, false}},
		"no consumable capacity": {func(s *resourceapi.ResourceSliceSpec) error {
			for i := range s.Devices {
				s.Devices[i].AllowMultipleAllocations = nil
			}
			return nil
		}, Features{true, true, true, false, true}},
		"no partition types": {func(s *resourceapi.ResourceSliceSpec) error { s.PartitionTypeAttribute = nil; return nil }, Features{true, true, false, true, true}},
		"partition types refused": {func(s *resourceapi.ResourceSliceSpec) error {
			if s.PartitionTypeAttribute != nil {
				return apierrors.NewInvalid(schema.GroupKind{Kind: "ResourceSlice"}, "probe", nil)
			}
			return nil
		}, Features{true, true, false, true, true}},
		"counters dropped": {func(s *resourceapi.ResourceSliceSpec) error { s.SharedCounters = nil; return nil }, Features{true, false, false, true, true}},
		"counters dropped, and the empty slice refused": {func(s *resourceapi.ResourceSliceSpec) error {
			if len(s.Devices) == 0 {
				return apierrors.NewInvalid(schema.GroupKind{Kind: "ResourceSlice"}, "probe", nil)
			}
			return nil
		}, Features{true, false, false, true, true}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := probeFeatures(t.Context(), server(c.drop), "node")
			if err != nil || got != c.want {
				t.Errorf("got %+v, %v; want %+v", got, err, c.want)
			}
		})
	}
}

func TestProbeThatCannotBeMadeIsAnError(t *testing.T) {
	away := errors.New("the server is away")
	for name, drop := range map[string]func(*resourceapi.ResourceSliceSpec) error{
		"at once": func(*resourceapi.ResourceSliceSpec) error { return away },
		"at the counters": func(s *resourceapi.ResourceSliceSpec) error {
			if len(s.Devices) == 0 {
				return away
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := probeFeatures(t.Context(), server(drop), "node"); !errors.Is(err, away) {
				t.Errorf("got %v", err)
			}
		})
	}
}

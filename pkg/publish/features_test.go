package publish

import (
	"bytes"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fakeapi"
)

// serverDroppingFields returns a fake API server for dry runs. The function drop removes fields
// from a slice, as an API server with disabled feature gates does, or returns the error with which
// the server rejects the slice.
func serverDroppingFields(drop func(*resourceapi.ResourceSliceSpec) error) *fake.Clientset {
	client := fake.NewClientset()
	fakeapi.Prepend(client, "create", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
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

func TestProbeReportsFieldsTheServerKeeps(t *testing.T) {
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
		"no partition types": {func(s *resourceapi.ResourceSliceSpec) error {
			s.PartitionTypeAttribute = nil
			return nil
		}, Features{true, true, false, true, true}},
		"partition types refused": {func(s *resourceapi.ResourceSliceSpec) error {
			if s.PartitionTypeAttribute != nil {
				return apierrors.NewInvalid(schema.GroupKind{Kind: "ResourceSlice"}, "probe", nil)
			}
			return nil
		}, Features{true, true, false, true, true}},
		"counters dropped": {func(s *resourceapi.ResourceSliceSpec) error {
			s.SharedCounters = nil
			return nil
		}, Features{true, false, false, true, true}},
		"Kubernetes 1.34 with all gates": {fakeapi.Kubernetes134, Features{true, false, false, true, false}},
		"Kubernetes 1.35 with all gates": {fakeapi.Kubernetes135, Features{true, true, false, true, true}},
		"counters refused together with consumable capacity": {func(s *resourceapi.ResourceSliceSpec) error {
			for _, d := range s.Devices {
				if ptr.Deref(d.AllowMultipleAllocations, false) && len(d.ConsumesCounters) > 0 {
					return fakeapi.Invalid(field.Invalid(field.NewPath("spec", "devices"), d.Name, "not both"))
				}
			}
			return nil
		}, Features{true, false, false, true, true}},
		"consumed counters dropped": {func(s *resourceapi.ResourceSliceSpec) error {
			for i := range s.Devices {
				s.Devices[i].ConsumesCounters = nil
			}
			return nil
		}, Features{true, false, false, true, true}},
		"counters dropped, and the empty slice refused": {func(s *resourceapi.ResourceSliceSpec) error {
			if len(s.Devices) == 0 {
				return apierrors.NewInvalid(schema.GroupKind{Kind: "ResourceSlice"}, "probe", nil)
			}
			return nil
		}, Features{true, false, false, true, true}},
	} {
		t.Run(name, func(t *testing.T) {
			got, _, err := probeFeatures(t.Context(), serverDroppingFields(c.drop), "node")
			if err != nil || got != c.want {
				t.Errorf("got %+v, %v; want %+v", got, err, c.want)
			}
		})
	}
}

func TestRejectedProbeIsLoggedOncePerChange(t *testing.T) {
	var logged bytes.Buffer
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&logged))))
	var upgraded atomic.Bool
	p := newPublishingNode(t, serverDroppingFields(func(s *resourceapi.ResourceSliceSpec) error {
		if upgraded.Load() {
			return fakeapi.Kubernetes135(s)
		}
		return fakeapi.Kubernetes134(s)
	}), inventory.Snapshot{}).publisher
	probe := func(times, logs int) {
		t.Helper()
		for range times {
			if _, known := p.waitForFeatures(ctx); !known {
				t.Fatal("the API server does not answer")
			}
		}
		if n := strings.Count(logged.String(), "spec.devices[0].consumesCounters"); n != logs {
			t.Errorf("logged %d times, not %d:\n%s", n, logs, logged.String())
		}
	}
	probe(3, 1)
	upgraded.Store(true)
	probe(2, 1)
	upgraded.Store(false)
	probe(2, 2)
}

func TestProbeFailsWhenServerIsAway(t *testing.T) {
	away := errors.New("the API server is away")
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
			if _, _, err := probeFeatures(t.Context(), serverDroppingFields(drop), "node"); !errors.Is(err, away) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// An admin who enables a feature gate restarts the API server, and its version stays the same.
func TestFeatureGateThatIsEnabledLaterIsUsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var enabled atomic.Bool
		client := fakeapi.New()
		fakeapi.Prepend(client, "create", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
			slice := a.(clienttesting.CreateAction).GetObject().(*resourceapi.ResourceSlice)
			for i := range slice.Spec.Devices {
				if !enabled.Load() {
					slice.Spec.Devices[i].Taints = nil
				}
			}
			return false, nil, nil
		})
		u := startPublishingNode(t, client, readyWith("0000:1b:00.0"))
		defer u.stop()
		u.setXIDs(t, 79)
		advance(time.Minute)
		if n := u.taints(t); n != 0 {
			t.Fatalf("%d taints in a cluster without taints", n)
		}
		enabled.Store(true)
		advance(probeInterval + versionInterval)
		if n := u.taints(t); n != 1 {
			t.Errorf("%d taints after the feature gate was enabled", n)
		}
	})
}

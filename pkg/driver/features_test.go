package driver

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// serverDroppingFields returns a fake API server for dry runs. The function drop removes fields
// from a slice, as an API server with disabled feature gates does, or returns the error with which
// the server rejects the slice.
func serverDroppingFields(drop func(*resourceapi.ResourceSliceSpec) error) *fake.Clientset {
	client := fake.NewClientset()
	prependReactor(client, "create", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
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
		"Kubernetes 1.34 with all gates": {kubernetes134, Features{true, false, false, true, false}},
		"Kubernetes 1.35 with all gates": {kubernetes135, Features{true, true, false, true, true}},
		"counters refused together with consumable capacity": {func(s *resourceapi.ResourceSliceSpec) error {
			for _, d := range s.Devices {
				if ptr.Deref(d.AllowMultipleAllocations, false) && len(d.ConsumesCounters) > 0 {
					return invalid(field.Invalid(field.NewPath("spec", "devices"), d.Name, "not both"))
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

func invalid(errs ...*field.Error) error {
	if len(errs) == 0 {
		return nil
	}
	return apierrors.NewInvalid(schema.GroupKind{Group: "resource.k8s.io", Kind: "ResourceSlice"}, "00000-"+rand.String(5), errs)
}

// kubernetes134 validates a slice like Kubernetes 1.34.4 (pkg/apis/resource/validation) with all
// feature gates: a counter set must be in the same slice as the devices that consume it.
func kubernetes134(s *resourceapi.ResourceSliceSpec) error {
	s.PartitionTypeAttribute = nil // an unknown field
	sets := map[string]map[string]resourceapi.Counter{}
	for _, set := range s.SharedCounters {
		sets[set.Name] = set.Counters
	}
	var errs field.ErrorList
	for i, d := range s.Devices {
		path := field.NewPath("spec", "devices").Index(i)
		for _, taint := range d.Taints {
			if taint.Effect != resourceapi.DeviceTaintEffectNoSchedule && taint.Effect != resourceapi.DeviceTaintEffectNoExecute {
				errs = append(errs, field.NotSupported(path.Child("taints").Index(0).Child("effect"),
					taint.Effect, []string{"NoExecute", "NoSchedule"}))
			}
		}
		for j, consumed := range d.ConsumesCounters {
			path := path.Child("consumesCounters").Index(j)
			counters, exists := sets[consumed.CounterSet]
			if !exists {
				errs = append(errs, field.Invalid(path.Child("counterSet"), consumed.CounterSet,
					"must reference a counterSet defined in the ResourceSlice sharedCounters"))
				continue
			}
			for name := range consumed.Counters {
				if _, exists := counters[name]; !exists {
					errs = append(errs, field.Invalid(path.Child("counters"), name,
						"must reference a counter defined in the ResourceSlice sharedCounters"))
				}
			}
		}
	}
	return invalid(errs...)
}

// kubernetes135 validates a slice like Kubernetes 1.35.3 and 1.36.3 with all feature gates: a slice
// has counter sets or devices, not both.
func kubernetes135(s *resourceapi.ResourceSliceSpec) error {
	s.PartitionTypeAttribute = nil // an unknown field
	var errs field.ErrorList
	if s.SharedCounters != nil && s.Devices != nil {
		errs = append(errs, field.Invalid(field.NewPath("spec"), "", "only one of `sharedCounters` or `devices` is allowed"))
	}
	return invalid(errs...)
}

// validateSlices makes the fake API server call validate for each slice, in dry runs and in real
// writes.
func validateSlices(client *fake.Clientset, validate func(*resourceapi.ResourceSliceSpec, bool) error) {
	prependReactor(client, "*", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		written, ok := a.(interface{ GetObject() runtime.Object })
		if !ok {
			return false, nil, nil
		}
		slice, ok := written.GetObject().(*resourceapi.ResourceSlice)
		if !ok {
			return false, nil, nil
		}
		create, ok := a.(clienttesting.CreateActionImpl)
		if err := validate(&slice.Spec, ok && len(create.CreateOptions.DryRun) > 0); err != nil {
			return true, nil, err
		}
		return false, nil, nil
	})
}

// oneMIGCapableGPU returns a scan result with one MIG-capable GPU, which the driver can offer as a
// whole and in partitions.
func oneMIGCapableGPU() (nvidia.Node, error) {
	all, err := twoGPUs()
	all.GPUs = all.GPUs[:1]
	all.GPUs[0].ProductName, all.GPUs[0].MIG = "NVIDIA H100", snapshotOfHalves().Node.GPUs[0].MIG
	return all, err
}

func TestKubernetes134GetsWholeGPUs(t *testing.T) {
	n := newNode(t)
	n.setHardware("cuttable", oneMIGCapableGPU)
	n.cfg.MIGPolicy = "dynamic"
	validateSlices(n.client, func(s *resourceapi.ResourceSliceSpec, _ bool) error { return kubernetes134(s) })
	n.start(t)
	eventually(t, "the whole GPU is published", func() bool { return slices.Equal(published(t, n.client), []string{firstGPU}) })
	n.expectEvent(t, "Node", "node", "GPUsLimited", "Kubernetes 1.35")
}

func TestKubernetes135GetsAllShapes(t *testing.T) {
	n := newNode(t)
	n.setHardware("cuttable", oneMIGCapableGPU)
	n.cfg.MIGPolicy = "dynamic"
	validateSlices(n.client, func(s *resourceapi.ResourceSliceSpec, _ bool) error { return kubernetes135(s) })
	n.start(t)
	eventually(t, "the GPU and its partitions are published", func() bool { return len(published(t, n.client)) == 3 })
}

func TestRejectedSlicesAreAnEvent(t *testing.T) {
	n := newHealthNode(t)
	n.setHardware("cuttable", oneMIGCapableGPU)
	n.cfg.MIGPolicy = "dynamic"
	validateSlices(n.client, func(s *resourceapi.ResourceSliceSpec, dry bool) error {
		if dry {
			return nil
		}
		return kubernetes134(s)
	})
	n.startPlugin(t)
	n.expectEvent(t, "Node", "node", "SlicesRejected", "must reference a counterSet")
	if !n.metric(t, "gpu_dra_publish_errors_total") {
		t.Error("the error is not counted")
	}
}

func TestRejectedSlicesTriggerProbe(t *testing.T) {
	n := newNode(t)
	n.setHardware("cuttable", oneMIGCapableGPU)
	n.cfg.MIGPolicy = "dynamic"
	var downgraded atomic.Bool
	validateSlices(n.client, func(s *resourceapi.ResourceSliceSpec, dry bool) error {
		if dry && !downgraded.Load() {
			return kubernetes135(s)
		}
		downgraded.Store(true)
		return kubernetes134(s)
	})
	n.start(t)
	eventually(t, "the whole GPU is published", func() bool { return slices.Equal(published(t, n.client), []string{firstGPU}) })
}

func TestRejectedProbeIsLoggedOncePerChange(t *testing.T) {
	var logged bytes.Buffer
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&logged))))
	var upgraded atomic.Bool
	p := &publisher{nodeName: "node", client: serverDroppingFields(func(s *resourceapi.ResourceSliceSpec) error {
		if upgraded.Load() {
			return kubernetes135(s)
		}
		return kubernetes134(s)
	})}
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

func TestRejectedProbeIsAnEvent(t *testing.T) {
	n := newHealthNode(t)
	validateSlices(n.client, func(_ *resourceapi.ResourceSliceSpec, dry bool) error {
		if dry {
			return invalid(field.Invalid(field.NewPath("spec"), "probe", "a policy refuses it"))
		}
		return nil
	})
	n.startPlugin(t)
	n.expectEvent(t, "Node", "node", "SlicesRejected", "rejects the plugin's test slices (dry run)")
}

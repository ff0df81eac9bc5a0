package fakeapi

import (
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Invalid returns the error with which an API server rejects a slice, or nil if there are no
// errors.
func Invalid(errs ...*field.Error) error {
	if len(errs) == 0 {
		return nil
	}
	return apierrors.NewInvalid(schema.GroupKind{Group: "resource.k8s.io", Kind: "ResourceSlice"}, "00000-"+rand.String(5), errs)
}

// Kubernetes134 validates a slice like Kubernetes 1.34.4 (pkg/apis/resource/validation) with all
// feature gates: a counter set must be in the same slice as the devices that consume it.
func Kubernetes134(s *resourceapi.ResourceSliceSpec) error {
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
	return Invalid(errs...)
}

// Kubernetes135 validates a slice like Kubernetes 1.35.3 and 1.36.3 with all feature gates: a slice
// has counter sets or devices, not both.
func Kubernetes135(s *resourceapi.ResourceSliceSpec) error {
	s.PartitionTypeAttribute = nil // an unknown field
	var errs field.ErrorList
	if s.SharedCounters != nil && s.Devices != nil {
		errs = append(errs, field.Invalid(field.NewPath("spec"), "", "only one of `sharedCounters` or `devices` is allowed"))
	}
	return Invalid(errs...)
}

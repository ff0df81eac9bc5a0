package driver

import (
	"reflect"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"
)

func kept(t *testing.T, all []resourceslice.Slice) []keptSlice {
	t.Helper()
	k, err := keep(all)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func unkept(t *testing.T, all []keptSlice) []resourceslice.Slice {
	t.Helper()
	s, err := unkeep(all)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// A field that a later version of the library adds must not get lost on its way to the controller.
func TestNothingOfASliceIsLostByKeepingIt(t *testing.T) {
	whole := resourceslice.Slice{
		Devices: []resourceapi.Device{{
			Name:       "gpu",
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"a": {StringValue: ptr.To("x")}, "b": {BoolValue: ptr.To(false)}},
			Capacity:   map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("80Gi")}},
			Taints:     []resourceapi.DeviceTaint{{Key: "k", Effect: resourceapi.DeviceTaintEffectNoSchedule}},
		}},
		SharedCounters:         []resourceapi.CounterSet{{Name: "gpu", Counters: map[string]resourceapi.Counter{"memory": {Value: resource.MustParse("80Gi")}}}},
		PerDeviceNodeSelection: ptr.To(true),
		PartitionTypeAttribute: ptr.To(resourceapi.FullyQualifiedName("gpu.nvidia.com/partitionType")),
		SkipNodeOperations:     []resourceapi.SkipNodeOperation{"x"},
	}
	for i, v := 0, reflect.ValueOf(whole); i < v.NumField(); i++ {
		if v.Field(i).IsZero() {
			t.Errorf("the field %s is not looked at", v.Type().Field(i).Name)
		}
	}
	all := []resourceslice.Slice{whole, {}}
	first := kept(t, all)
	if back := unkept(t, first); !apiequality.Semantic.DeepEqual(back, all) {
		t.Errorf("got %v", back)
	}
	if again := kept(t, unkept(t, first)); !reflect.DeepEqual(first, again) {
		t.Error("the same slices are kept as other bytes")
	}
}

func TestWhatIsNotASliceIsRefused(t *testing.T) {
	if _, err := unkeep([]keptSlice{"\xff"}); err == nil {
		t.Error("taken for a slice")
	}
}

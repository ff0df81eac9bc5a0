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

func mustEncode(t *testing.T, all []resourceslice.Slice) []encodedSlice {
	t.Helper()
	encoded, err := encodeSlices(all)
	if err != nil {
		t.Fatal(err)
	}
	return encoded
}

func mustDecode(t *testing.T, all []encodedSlice) []resourceslice.Slice {
	t.Helper()
	s, err := decodeSlices(all)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// The encoding must keep every field of a slice, including fields that a later version of the
// library adds. If a new field has no value in this test, the test fails, so that someone adds it.
func TestEncodedSliceKeepsEveryField(t *testing.T) {
	whole := resourceslice.Slice{
		Devices: []resourceapi.Device{{
			Name:       "gpu",
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"a": {StringValue: ptr.To("x")}, "b": {BoolValue: ptr.To(false)}},
			Capacity:   map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("80Gi")}},
			Taints:     []resourceapi.DeviceTaint{{Key: "k", Effect: resourceapi.DeviceTaintEffectNoSchedule}},
		}},
		SharedCounters: []resourceapi.CounterSet{{
			Name: "gpu", Counters: map[string]resourceapi.Counter{"memory": {Value: resource.MustParse("80Gi")}},
		}},
		PerDeviceNodeSelection: ptr.To(true),
		PartitionTypeAttribute: ptr.To(resourceapi.FullyQualifiedName("gpu.nvidia.com/partitionType")),
		SkipNodeOperations:     []resourceapi.SkipNodeOperation{"x"},
	}
	for i, v := 0, reflect.ValueOf(whole); i < v.NumField(); i++ {
		if v.Field(i).IsZero() {
			t.Errorf("the test does not set the field %s", v.Type().Field(i).Name)
		}
	}
	all := []resourceslice.Slice{whole, {}}
	first := mustEncode(t, all)
	if back := mustDecode(t, first); !apiequality.Semantic.DeepEqual(back, all) {
		t.Errorf("got %v", back)
	}
	if again := mustEncode(t, mustDecode(t, first)); !reflect.DeepEqual(first, again) {
		t.Error("equal slices have different bytes")
	}
}

func TestDecodeRejectsGarbage(t *testing.T) {
	if _, err := decodeSlices([]encodedSlice{"\xff"}); err == nil {
		t.Error("garbage was decoded as a slice")
	}
}

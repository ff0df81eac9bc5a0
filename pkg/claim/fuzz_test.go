package claim

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// FuzzRead expects that Read never panics and that every error is short enough for an Event. Every
// result must have a valid configuration, unless this driver does not know the form of its device
// name.
func FuzzRead(f *testing.F) {
	f.Add("r", gpu0, "r", []byte(slice("Long")), []byte(kind("MigDeviceConfig")), true)
	f.Add("r/s", gpu0+"-mig-19-0", "r", []byte(kind("GpuConfig")), []byte(kind("MigDeviceConfig")), false)
	f.Add("r/s", gpu0+"-share", "r/s", []byte(kind("VfioDeviceConfig")), []byte(slice("Eternal")), true)
	f.Add("", gpu0+"-mig-9-4-ci-0-share", "", []byte("{"), []byte(nil), false)
	f.Add("r", "", "s", []byte(`null`), []byte(`{"apiVersion":7}`), true)
	f.Add(
		"/",
		"\n",
		"/",
		[]byte(
			`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS",`+
				`"mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"0":"1e99"}}}}`,
		),
		[]byte("\xff"),
		false,
	)
	f.Fuzz(func(t *testing.T, request, name, configured string, first, second []byte, fromClass bool) {
		source := theClaim
		if fromClass {
			source = class
		}
		one, two := config(source, string(first), configured), config(theClaim, string(second))
		if len(second) == 0 {
			two.Opaque = nil
		}
		shared := allocated(request, name)
		shared.ShareID = ptr.To(types.UID("share"))
		foreign := allocated(request, name)
		foreign.Driver = "net.example.com"
		a, err := Read(newClaim([]resourceapi.DeviceRequestAllocationResult{allocated(request, name), foreign, shared}, one, two), driver)
		if err != nil {
			// A long request name makes the error long. The API server keeps these names short, so only
			// errors with short names are checked.
			if s := err.Error(); len(request)+len(configured)+len(name) < 200 && len(s) > 1000 {
				t.Errorf("no short error: %q", s)
			}
			return
		}
		if len(a) != 2 {
			t.Fatalf("%d results: %+v", len(a), a)
		}
		parsed, ours := device.ParseName(name)
		for _, r := range a {
			if r.Device != name || r.Request != request || (r.Config != nil) != ours || r.Group < NoGroup || r.Group > 1 {
				t.Errorf("a result is %+v", r)
			}
			if r.Config == nil {
				continue
			}
			if _, mig := r.Config.(*v1beta1.MigDeviceConfig); mig != (parsed.Partition != nil) {
				t.Errorf("%s takes a %s", name, r.Config.Kind())
			}
			if err := r.Config.Validate(); err != nil {
				t.Errorf("%s takes what is not valid: %v", name, err)
			}
		}
	})
}

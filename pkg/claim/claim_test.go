package claim

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	driver = "gpu.nvidia.com"
	gpu0   = "gpu-0000-1b-00-0"
	gpu1   = "gpu-0000-1c-00-0"

	class    = resourceapi.AllocationConfigSourceClass
	theClaim = resourceapi.AllocationConfigSourceClaim
)

func allocated(request, device string) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Request: request, Driver: driver, Pool: "node", Device: device}
}

func config(from resourceapi.AllocationConfigSource, raw string, requests ...string) resourceapi.DeviceAllocationConfiguration {
	return resourceapi.DeviceAllocationConfiguration{Source: from, Requests: requests, DeviceConfiguration: resourceapi.DeviceConfiguration{
		Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(raw)}},
	}}
}

// slice returns a GpuConfig with this time slice interval. Tests recognize the configuration by its
// interval.
func slice(interval v1beta1.TimeSliceInterval) string {
	return `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing",` +
		`"timeSlicingConfig":{"interval":"` + string(interval) + `"}}}`
}

func kind(k string) string { return `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"` + k + `"}` }

func newClaim(results []resourceapi.DeviceRequestAllocationResult,
	configs ...resourceapi.DeviceAllocationConfiguration) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c", UID: "uid"},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{Results: results, Config: configs},
		}},
	}
}

func TestReadKeepsDriverResultsInOrder(t *testing.T) {
	foreign := allocated("nic", "eth0")
	foreign.Driver = "net.example.com"
	shared := allocated("b/large", gpu0)
	shared.ShareID = ptr.To(types.UID("share"))
	shared.AdminAccess = ptr.To(true)
	shared.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("18Gi"),
		"cores": resource.MustParse("25")}
	foreignConfig := config(theClaim, "not even JSON")
	foreignConfig.Opaque.Driver = "net.example.com"
	empty := resourceapi.DeviceAllocationConfiguration{Source: theClaim}

	got, err := Read(newClaim([]resourceapi.DeviceRequestAllocationResult{allocated("a", gpu1), foreign, shared}, foreignConfig, empty),
		driver)
	if err != nil {
		t.Fatal(err)
	}
	plain := &v1beta1.GpuConfig{}
	plain.Default()
	want := []Result{
		{Request: "a", Pool: "node", Device: gpu1, Config: plain, Group: NoGroup},
		{
			Request: "b/large", Pool: "node", Device: gpu0, ShareID: ptr.To(types.UID("share")), AdminAccess: true, Config: plain, Group: NoGroup,
			Capacity: map[string]resource.Quantity{"memory": resource.MustParse("18Gi"), "cores": resource.MustParse("25")},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestEffectiveConfiguration(t *testing.T) {
	for _, c := range []struct {
		name    string
		configs []resourceapi.DeviceAllocationConfiguration
		request string
		want    v1beta1.TimeSliceInterval // empty means that no interval is set
	}{
		{"none", nil, "r", ""},
		{"class", []resourceapi.DeviceAllocationConfiguration{config(class, slice("Short"), "r")}, "r", "Short"},
		{"later class entry", []resourceapi.DeviceAllocationConfiguration{config(class, slice("Short")), config(class, slice("Long"))},
			"r", "Long"},
		{"claim overrides class", []resourceapi.DeviceAllocationConfiguration{config(class, slice("Short")),
			config(theClaim, slice("Long"))}, "r", "Long"},
		{"claim overrides a later class entry", []resourceapi.DeviceAllocationConfiguration{config(theClaim, slice("Long")),
			config(class, slice("Short"))}, "r", "Long"},
		{"later claim entry", []resourceapi.DeviceAllocationConfiguration{config(theClaim, slice("Long"), "r"),
			config(theClaim, slice("Medium"))}, "r", "Medium"},
		{"another request's", []resourceapi.DeviceAllocationConfiguration{config(theClaim, slice("Long"), "other")}, "r", ""},
		{"request's entry applies to its subrequest", []resourceapi.DeviceAllocationConfiguration{config(theClaim, slice("Long"), "r")},
			"r/large", "Long"},
		{"subrequest's", []resourceapi.DeviceAllocationConfiguration{config(theClaim, slice("Long"), "other", "r/large")}, "r/large",
			"Long"},
		{"another subrequest's", []resourceapi.DeviceAllocationConfiguration{config(theClaim, slice("Long"), "r/small")}, "r/large", ""},
		{"subrequest's entry ignores a request with the same prefix",
			[]resourceapi.DeviceAllocationConfiguration{config(theClaim, slice("Long"), "r/large")}, "r", ""},
		{"class entry of another kind with the request's name",
			[]resourceapi.DeviceAllocationConfiguration{config(class, slice("Short"), "r"),
				config(class, kind("MigDeviceConfig"), "r")}, "r", "Short"},
		{"another kind for all requests", []resourceapi.DeviceAllocationConfiguration{config(class, slice("Short")),
			config(theClaim, kind("MigDeviceConfig"))}, "r", "Short"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := Read(newClaim([]resourceapi.DeviceRequestAllocationResult{allocated(c.request, gpu0)}, c.configs...), driver)
			if err != nil {
				t.Fatal(err)
			}
			gpu, ok := got[0].Config.(*v1beta1.GpuConfig)
			if !ok {
				t.Fatalf("%T", got[0].Config)
			}
			var interval v1beta1.TimeSliceInterval
			if gpu.Sharing != nil {
				interval = gpu.Sharing.TimeSlicing.Interval
			}
			if interval != c.want {
				t.Errorf("%q holds, want %q", interval, c.want)
			}
		})
	}
}

// clearedRequests returns a claim with a MigDeviceConfig for each element of wanted, which has the
// requests that the entry names. As Kubernetes 1.37 does, the allocation has one for all requests.
func clearedRequests(results []resourceapi.DeviceRequestAllocationResult, wanted ...[]string) *resourceapi.ResourceClaim {
	c := newClaim(results, config(theClaim, kind("MigDeviceConfig")))
	for _, requests := range wanted {
		of := config(theClaim, kind("MigDeviceConfig")).DeviceConfiguration
		c.Spec.Devices.Config = append(c.Spec.Devices.Config, resourceapi.DeviceClaimConfiguration{Requests: requests, DeviceConfiguration: of})
	}
	return c
}

func TestReadSkipsAnotherKindForAllRequests(t *testing.T) {
	got, err := Read(clearedRequests([]resourceapi.DeviceRequestAllocationResult{allocated("r", gpu0)}, []string{"r"}, nil), driver)
	if err != nil || got[0].Config.Kind() != "GpuConfig" {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestReadErrors(t *testing.T) {
	results := []resourceapi.DeviceRequestAllocationResult{allocated("r", gpu0)}
	unallocated := newClaim(nil)
	unallocated.Status.Allocation = nil
	for _, c := range []struct {
		name  string
		claim *resourceapi.ResourceClaim
		says  []string
	}{
		{"not allocated", unallocated, []string{"not allocated"}},
		{"malformed", newClaim(results, config(theClaim, "{")), []string{"the claim's configuration"}},
		{"malformed, in the class", newClaim(results, config(class, "{", "r", "s")), []string{"the DeviceClass's configuration", "r, s"}},
		{"malformed for another driver's request", newClaim(nil, config(theClaim, "{", "nic")), []string{"nic"}},
		{"unknown interval", newClaim(results, config(theClaim, slice("Eternal"))),
			[]string{"the claim's configuration is not valid: GpuConfig: sharing.timeSlicingConfig.interval is \"Eternal\""}},
		{"an unknown field", newClaim(results, config(theClaim, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","shraing":{}}`)),
			[]string{"shraing"}},
		{"wrong kind for its request", newClaim(results, config(theClaim, kind("MigDeviceConfig"), "r")),
			[]string{"request r", "MigDeviceConfig", gpu0, "GpuConfig"}},
		{"wrong kind for its request, whose name the scheduler cleared", clearedRequests(results, []string{"r"}),
			[]string{"configuration for request r", "MigDeviceConfig", gpu0, "GpuConfig"}},
		{"passthrough kind for its request", newClaim(results, config(theClaim, kind("VfioDeviceConfig"), "r")),
			[]string{"request r", "VfioDeviceConfig", gpu0, "GpuConfig"}},
		{"too long", newClaim(results, config(theClaim, strings.Repeat(" ", resourceapi.OpaqueParametersMaxLength+1))),
			[]string{"the claim's configuration"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Read(c.claim, driver)
			if err == nil {
				t.Fatal("accepted")
			}
			for _, want := range c.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
		})
	}
}

// If a result has an unknown device name, Read must return it without a configuration. It must not
// fail: package prepare reports that the device does not exist.
func TestUnknownDeviceNameHasNoConfiguration(t *testing.T) {
	for _, name := range []string{"", "gpu-0", gpu0 + "-mig-19", gpu0 + "-mig-019-0", "gpu-0000-1b-00-9", "x" + gpu0} {
		got, err := Read(newClaim([]resourceapi.DeviceRequestAllocationResult{allocated("r", name)}, config(theClaim, slice("Long"), "r")),
			driver)
		if err != nil || len(got) != 1 || got[0].Config != nil || got[0].Device != name {
			t.Errorf("%q: %+v, %v", name, got, err)
		}
	}
}

// A DeviceClass may have configurations for whole GPUs and for MIG devices, because its author does
// not know which of them a claim gets. Each device must use the one for its kind.
func TestPartitionsTakeMigDeviceConfigAndWholeGPUsGpuConfig(t *testing.T) {
	const partition, part = gpu1 + "-mig-19-0", gpu1 + "-mig-9-4-ci-0"
	both := []resourceapi.DeviceRequestAllocationResult{allocated("whole", gpu0), allocated("parts/small", partition),
		allocated("parts/large", part)}
	mig := func(strategy string) string {
		return `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"` + strategy + `"}}`
	}
	for _, c := range []struct {
		name    string
		configs []resourceapi.DeviceAllocationConfiguration
		want    []v1beta1.SharingStrategy // empty means no sharing
	}{
		{"none", nil, []v1beta1.SharingStrategy{"", "", ""}},
		{"one of each kind for all requests", []resourceapi.DeviceAllocationConfiguration{config(theClaim, slice("Long")),
			config(theClaim, mig("MPS"))}, []v1beta1.SharingStrategy{"TimeSlicing", "MPS", "MPS"}},
		{"only for partitions", []resourceapi.DeviceAllocationConfiguration{config(theClaim, mig("MPS"), "parts")},
			[]v1beta1.SharingStrategy{"", "MPS", "MPS"}},
		{"for one alternative", []resourceapi.DeviceAllocationConfiguration{config(theClaim, mig("MPS"), "parts/large")},
			[]v1beta1.SharingStrategy{"", "", "MPS"}},
		{"class has both kinds, claim one", []resourceapi.DeviceAllocationConfiguration{config(class, slice("Short")),
			config(class, mig("TimeSlicing")), config(theClaim, mig("MPS"), "parts")}, []v1beta1.SharingStrategy{"TimeSlicing", "MPS", "MPS"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := Read(newClaim(both, c.configs...), driver)
			if err != nil {
				t.Fatal(err)
			}
			for i, kind := range []string{"GpuConfig", "MigDeviceConfig", "MigDeviceConfig"} {
				r := got[i]
				if r.Config == nil || r.Config.Kind() != kind {
					t.Fatalf("%s takes %+v, want a %s", r.Device, r.Config, kind)
				}
				shared, ok := r.Config.(interface {
					SharingStrategy() v1beta1.SharingStrategy
				})
				if !ok {
					t.Fatalf("a %s says nothing of sharing", kind)
				}
				if s := shared.SharingStrategy(); s != c.want[i] {
					t.Errorf("%s is shared by %q, want %q", r.Device, s, c.want[i])
				}
			}
		})
	}
	for request, wrong := range map[string]string{"whole": mig("MPS"), "parts": slice("Long")} {
		if _, err := Read(newClaim(both, config(theClaim, wrong, request)), driver); err == nil ||
			!strings.Contains(err.Error(), "request "+request) {
			t.Errorf("a configuration of the other kind for request %s: %v", request, err)
		}
	}
}

func TestConfigurationKindFollowsDeviceName(t *testing.T) {
	for _, address := range []string{"0000:1b:00.0", "00000008:01:00.0", "10000:ff:1f.7"} {
		a, err := device.ParsePCIAddress(address)
		if err != nil {
			t.Fatal(err)
		}
		whole := device.Name{GPU: a.WholeName()}
		part := device.Name{GPU: a.WholeName(), Partition: &device.PartitionName{ProfileID: 19, Start: 3, Compute: ptr.To(uint32(1))}}
		for want, name := range map[string]device.Name{"GpuConfig": whole, "MigDeviceConfig": part} {
			for _, shared := range []bool{false, true} {
				name.Share = shared
				got, err := Read(newClaim([]resourceapi.DeviceRequestAllocationResult{allocated("a", name.String())}), driver)
				if err != nil || got[0].Config.Kind() != want {
					t.Errorf("%s: %+v, %v", name, got, err)
				}
			}
		}
	}
}

// Results that use the same configuration entry must have the same group, because one MPS daemon
// serves the group.
func TestResultsWithOneConfigurationShareAGroup(t *testing.T) {
	const partition = gpu1 + "-mig-19-0"
	results := []resourceapi.DeviceRequestAllocationResult{allocated("a", gpu0), allocated("b", gpu1), allocated("c", partition),
		allocated("a", gpu0+"-share")}
	foreign := config(theClaim, "{}")
	foreign.Opaque.Driver = "net.example.com"
	short, long, mig := slice("Short"), slice("Long"), kind("MigDeviceConfig")
	for _, c := range []struct {
		name    string
		configs []resourceapi.DeviceAllocationConfiguration
		want    []int
	}{
		{"no configuration", nil, []int{NoGroup, NoGroup, NoGroup, NoGroup}},
		{"one for all applies to its kind", []resourceapi.DeviceAllocationConfiguration{config(theClaim, short)}, []int{0, 0, NoGroup, 0}},
		{"one of each kind", []resourceapi.DeviceAllocationConfiguration{foreign, config(theClaim, mig), config(theClaim, short)},
			[]int{2, 2, 1, 2}},
		{"only for some requests", []resourceapi.DeviceAllocationConfiguration{config(theClaim, short, "a")}, []int{0, NoGroup, NoGroup, 0}},
		{"equal entries are two groups", []resourceapi.DeviceAllocationConfiguration{config(theClaim, short, "a"),
			config(theClaim, short, "b")}, []int{0, 1, NoGroup, 0}},
		{"class entry is one group for all requests", []resourceapi.DeviceAllocationConfiguration{foreign, config(class, short, "a"),
			config(class, short, "b")}, []int{1, 1, NoGroup, 1}},
		{"two class entries", []resourceapi.DeviceAllocationConfiguration{config(class, short, "a"), config(class, long, "b"),
			config(class, short, "b")}, []int{0, 0, NoGroup, 0}},
		{"equal entries of claim and class", []resourceapi.DeviceAllocationConfiguration{config(class, short, "a", "b"),
			config(theClaim, short, "b")}, []int{0, 1, NoGroup, 0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := Read(newClaim(results, c.configs...), driver)
			if err != nil {
				t.Fatal(err)
			}
			var groups []int
			for _, r := range got {
				groups = append(groups, r.Group)
			}
			if diff := cmp.Diff(c.want, groups); diff != "" {
				t.Error(diff)
			}
		})
	}
}

package chart

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	dracel "k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// takes reports whether the CEL selectors of the DeviceClass select device d of the driver with
// this name.
func takes(t *testing.T, class *resourceapi.DeviceClass, driver string, d resourceapi.Device) bool {
	t.Helper()
	compiled := dracel.GetCompiler(dracel.Features{}).CompileCELExpression(class.Spec.Selectors[0].CEL.Expression, dracel.Options{})
	if compiled.Error != nil {
		t.Fatal(compiled.Error)
	}
	matches, _, err := compiled.DeviceMatches(t.Context(), dracel.Device{Driver: driver, Attributes: d.Attributes, Capacity: d.Capacity})
	if err != nil {
		t.Errorf("class %s: %v", class.Name, err)
	}
	return matches
}

// partition returns a MIG device of this profile, as the driver publishes it, with only the
// attributes that DeviceClasses use.
func partition(profile string) resourceapi.Device {
	return resourceapi.Device{Name: "part", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"type": {StringValue: ptr.To("mig")}, "profile": {StringValue: &profile},
	}}
}

func TestDeviceClassesSelectOwnDevicesOnly(t *testing.T) {
	objects, _ := render(t, "--set-json", twoShares, "--set-json",
		`deviceClasses.migProfiles=[{"profile":"1g.10gb"},{"profile":"1g.10gb+me"}]`)
	whole := device.Whole{}.Device(device.Driver{})
	shareOf := func(d resourceapi.Device, kind string) resourceapi.Device {
		share := *d.DeepCopy()
		share.Attributes["type"] = resourceapi.DeviceAttribute{StringValue: &kind}
		return share
	}
	const small, media = "mig-1g.10gb.nvidia.com", "mig-1g.10gb.me.nvidia.com"
	for name, c := range map[string]struct {
		driver  string
		device  resourceapi.Device
		classes []string
	}{
		"a GPU that this driver offers whole": {"gpu.nvidia.com", whole, []string{"gpu.nvidia.com"}},
		"a share of a GPU":                    {"gpu.nvidia.com", shareOf(whole, "gpu-share"), []string{"shared.gpu.nvidia.com"}},
		"a share of a part": {"gpu.nvidia.com", shareOf(partition("1g.10gb"), "mig-share"),
			[]string{"shared.gpu.nvidia.com"}},
		"a share of another driver's":          {"tpu.example.com", shareOf(whole, "gpu-share"), nil},
		"a part of a GPU":                      {"gpu.nvidia.com", partition("1g.10gb"), []string{"mig.nvidia.com", small}},
		"a part with the media engines":        {"gpu.nvidia.com", partition("1g.10gb+me"), []string{"mig.nvidia.com", media}},
		"a part of a profile without a class":  {"gpu.nvidia.com", partition("7g.80gb"), []string{"mig.nvidia.com"}},
		"another driver's GPU":                 {"tpu.example.com", whole, nil},
		"another driver's part":                {"tpu.example.com", partition("1g.10gb"), nil},
		"another driver's, without attributes": {"tpu.example.com", resourceapi.Device{}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			var classes []string
			for _, class := range []string{"gpu.nvidia.com", "mig.nvidia.com", "shared.gpu.nvidia.com", small, media} {
				if takes(t, only[*resourceapi.DeviceClass](t, objects, class), c.driver, c.device) {
					classes = append(classes, class)
				}
			}
			if diff := cmp.Diff(c.classes, classes); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// resources renders the chart and returns the extended resource of each DeviceClass, by the class's
// name.
func resources(t *testing.T, args ...string) map[string]string {
	t.Helper()
	objects, _ := render(t, args...)
	found := map[string]string{}
	for _, object := range objects {
		if class, ok := object.(*resourceapi.DeviceClass); ok {
			found[class.Name] = ptr.Deref(class.Spec.ExtendedResourceName, "")
		}
	}
	return found
}

func TestDeviceClassExtendedResources(t *testing.T) {
	both := func(more map[string]string) map[string]string {
		all := map[string]string{"gpu.nvidia.com": "nvidia.com/gpu", "mig.nvidia.com": ""}
		for class, resource := range more {
			all[class] = resource
		}
		return all
	}
	for name, c := range map[string]struct {
		args []string
		want map[string]string
	}{
		"GPUs have the device plugin's resource": {nil, both(nil)},
		"another resource for GPUs": {
			[]string{"--set", "deviceClasses.gpu.extendedResourceName=example.com/gpu"},
			both(map[string]string{"gpu.nvidia.com": "example.com/gpu"}),
		},
		"no resource for GPUs": {[]string{"--set", "deviceClasses.gpu.extendedResourceName="}, both(map[string]string{"gpu.nvidia.com": ""})},
		"profiles have the device plugin's resources": {
			[]string{"--set-json", `deviceClasses.migProfiles=[{"profile":"1g.10gb"},{"profile":"1g.10gb+me"},{"profile":"1g.24gb-me"}` +
				`,{"profile":"2g.48gb+me.all"},{"profile":"1c.3g.40gb"}]`},
			both(map[string]string{
				"mig-1g.10gb.nvidia.com": "nvidia.com/mig-1g.10gb", "mig-1g.10gb.me.nvidia.com": "nvidia.com/mig-1g.10gb.me",
				"mig-1g.24gb-me.nvidia.com": "nvidia.com/mig-1g.24gb-me", "mig-2g.48gb.me.all.nvidia.com": "nvidia.com/mig-2g.48gb.me.all",
				"mig-1c.3g.40gb.nvidia.com": "nvidia.com/mig-1c.3g.40gb",
			}),
		},
		"a profile takes the GPU's resource": {
			[]string{"--set-json", `deviceClasses.migProfiles=[{"profile":"1g.10gb","name":"small.example.com",` +
				`"extendedResourceName":"nvidia.com/gpu"}]`},
			both(map[string]string{"gpu.nvidia.com": "", "small.example.com": "nvidia.com/gpu"}),
		},
		"a class without a resource": {
			[]string{"--set-json", `deviceClasses.migProfiles=[{"profile":"1g.10gb","extendedResourceName":""},{"profile":"2g.20gb",` +
				`"extendedResourceName":""}]`},
			both(map[string]string{"mig-1g.10gb.nvidia.com": "", "mig-2g.20gb.nvidia.com": ""}),
		},
		"a class of shares with fractions": {[]string{"--set-json", inFractions},
			both(map[string]string{"shared.gpu.nvidia.com": ""})},
		"a class of shares with shares of partitions": {
			[]string{"--set-json", `shares=[{"kind":"off"},{"profile":"1g.10gb","kind":"shares","count":2}]`},
			both(map[string]string{"shared.gpu.nvidia.com": ""}),
		},
		"no class of shares if nothing is shared": {
			[]string{"--set-json", `shares=[{"kind":"off"},{"gpus":"NVIDIA fractions*","kind":"off"}]`}, both(nil),
		},
		"shares take the GPU's resource": {
			[]string{"--set-json", fourShares, "--set", "deviceClasses.shared.extendedResourceName=nvidia.com/gpu"},
			both(map[string]string{"gpu.nvidia.com": "", "shared.gpu.nvidia.com": "nvidia.com/gpu"}),
		},
		"shares with another resource leave the GPU's": {
			[]string{"--set-json", fourShares, "--set", "deviceClasses.shared.extendedResourceName=nvidia.com/gpu.shared"},
			both(map[string]string{"shared.gpu.nvidia.com": "nvidia.com/gpu.shared"}),
		},
		"shares that are not offered take no resource": {[]string{"--set", "deviceClasses.shared.extendedResourceName=nvidia.com/gpu"},
			both(nil)},
		"shares without a class take no resource": {
			[]string{"--set-json", fourShares, "--set", "deviceClasses.shared.enabled=false", "--set",
				"deviceClasses.shared.extendedResourceName=nvidia.com/gpu"}, both(nil),
		},
		"no class at all": {[]string{"--set-json", inFractions, "--set", "deviceClasses.gpu.enabled=false", "--set",
			"deviceClasses.mig.enabled=false", "--set", "deviceClasses.shared.enabled=false"}, map[string]string{}},
	} {
		t.Run(name, func(t *testing.T) {
			got := resources(t, c.args...)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
			for class, resource := range got {
				for _, problem := range content.IsDNS1123Subdomain(class) {
					t.Errorf("class %s: %s", class, problem)
				}
				if resource == "" {
					continue
				}
				for _, problem := range content.IsLabelKey(resource) {
					t.Errorf("extended resource %s: %s", resource, problem)
				}
			}
		})
	}
}

func TestMIGClassExcludesShares(t *testing.T) {
	_, err := template(t, "--set-json", twoShares, "--set", "deviceClasses.shared.extendedResourceName=nvidia.com/gpu",
		"--set-json", `deviceClasses.migProfiles=[{"profile":"1g.10gb","extendedResourceName":"nvidia.com/gpu"}]`)
	if want := "deviceClasses.migProfiles[0]: deviceClasses.shared already has extended resource nvidia.com/gpu."; err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %q", err, want)
	}
}

func TestRefusesTwoClassesWithOneResource(t *testing.T) {
	for name, c := range map[string]struct{ classes, want string }{
		"the same profile twice": {`[{"profile":"1g.10gb"},{"profile":"1g.10gb"}]`,
			"deviceClasses.migProfiles[1]: DeviceClass mig-1g.10gb.nvidia.com is already made by deviceClasses.migProfiles[0]"},
		"the name of another class": {`[{"profile":"1g.10gb","name":"mig.nvidia.com"}]`, "already made by deviceClasses.mig."},
		"the resource of another": {`[{"profile":"1g.10gb"},{"profile":"2g.20gb","extendedResourceName":"nvidia.com/mig-1g.10gb"}]`,
			"deviceClasses.migProfiles[0] already has extended resource nvidia.com/mig-1g.10gb"},
		"one resource twice": {`[{"profile":"1g.10gb","extendedResourceName":"nvidia.com/gpu"},{"profile":"2g.20gb",` +
			`"extendedResourceName":"nvidia.com/gpu"}]`, "deviceClasses.migProfiles[0] already has extended resource nvidia.com/gpu"},
		"an invalid profile": {`[{"profile":"all"}]`, "profile"},
		"an unknown key":     {`[{"profile":"1g.10gb","extendedResource":"x"}]`, "extendedResource"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := template(t, "--set-json", "deviceClasses.migProfiles="+c.classes)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// docs/sharing.md has an example of a DeviceClass, which users copy and the chart does not render.
// It must select only shareable MIG devices of one profile.
func TestShareClassOfOneProfile(t *testing.T) {
	page, err := os.ReadFile("../../docs/sharing.md")
	if err != nil {
		t.Fatal(err)
	}
	var manifest strings.Builder
	for line := range strings.Lines(string(page)) {
		code, is := strings.CutPrefix(line, "    ")
		if is && (manifest.Len() > 0 || strings.HasPrefix(code, "apiVersion: resource.k8s.io/")) {
			manifest.WriteString(code)
		} else if manifest.Len() > 0 {
			break
		}
	}
	class := only[*resourceapi.DeviceClass](t, decode(t, manifest.String()), "mig-1g.10gb.shared.nvidia.com")
	if name := ptr.Deref(class.Spec.ExtendedResourceName, ""); name != "nvidia.com/mig-1g.10gb" {
		t.Errorf("its resource is %q", name)
	}
	share, other := partition("1g.10gb"), partition("2g.20gb")
	for _, d := range []resourceapi.Device{share, other} {
		d.Attributes["type"] = resourceapi.DeviceAttribute{StringValue: ptr.To("mig-share")}
	}
	whole := device.Whole{}.Device(device.Driver{})
	whole.Attributes["type"] = resourceapi.DeviceAttribute{StringValue: ptr.To("gpu-share")}
	for name, c := range map[string]struct {
		driver string
		device resourceapi.Device
		want   bool
	}{
		"a share of the profile":               {"gpu.nvidia.com", share, true},
		"a share of another profile":           {"gpu.nvidia.com", other, false},
		"the partition itself":                 {"gpu.nvidia.com", partition("1g.10gb"), false},
		"a share of a GPU":                     {"gpu.nvidia.com", whole, false},
		"a share of another driver's":          {"tpu.example.com", share, false},
		"another driver's, without attributes": {"tpu.example.com", resourceapi.Device{}, false},
	} {
		if got := takes(t, class, c.driver, c.device); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

package chart

import (
	"strings"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/configcorpus"
)

const gpuDriver = "gpu.nvidia.com"

func parameterPolicy(t *testing.T) policy {
	t.Helper()
	objects, _ := render(t)
	return compile(t, only[*admissionregistrationv1.ValidatingAdmissionPolicy](t, objects, "gpus-gpu-dra-driver-parameters"))
}

func opaque(driver, parameters string) resourceapi.DeviceConfiguration {
	return resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
		Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(parameters)}}}
}

func claimWith(configs ...resourceapi.DeviceConfiguration) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "claim", Namespace: "user"}}
	for _, config := range configs {
		c.Spec.Devices.Config = append(c.Spec.Devices.Config, resourceapi.DeviceClaimConfiguration{DeviceConfiguration: config})
	}
	return c
}

func templateWith(configs ...resourceapi.DeviceConfiguration) *resourceapi.ResourceClaimTemplate {
	return &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Name: "template", Namespace: "user"},
		Spec: resourceapi.ResourceClaimTemplateSpec{Spec: claimWith(configs...).Spec}}
}

func classWith(configs ...resourceapi.DeviceConfiguration) *resourceapi.DeviceClass {
	c := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "class"}}
	for _, config := range configs {
		c.Spec.Config = append(c.Spec.Config, resourceapi.DeviceClassConfiguration{DeviceConfiguration: config})
	}
	return c
}

func resourceOf(object runtime.Object) schema.GroupVersionResource {
	name := "resourceclaims"
	switch object.(type) {
	case *resourceapi.ResourceClaimTemplate:
		name = "resourceclaimtemplates"
	case *resourceapi.DeviceClass:
		name = "deviceclasses"
	}
	return resourceapi.SchemeGroupVersion.WithResource(name)
}

// creation returns what a user reads who creates the object, or "" if the policy allows it.
func (p policy) creation(t *testing.T, object runtime.Object) string {
	t.Helper()
	_, sentence, _ := strings.Cut(p.verdict(t, &user.DefaultInfo{Name: "jane"}, admission.Create, resourceOf(object), "", object, nil), "\n")
	return sentence
}

func TestParameterPolicyAgreesWithThePlugin(t *testing.T) {
	p := parameterPolicy(t)
	refused := 0
	corpus := configcorpus.Generate(1, 3000)
	for _, raw := range corpus {
		config, err := v1beta1.Decode([]byte(raw))
		if err == nil {
			config.Default()
			err = config.Validate()
		}
		if err != nil {
			refused++
		}
		if got := p.creation(t, claimWith(opaque(gpuDriver, raw))); (got == "") != (err == nil) {
			t.Errorf("%s:\nthe policy says %q, the plugin %v", raw, got, err)
		}
	}
	t.Logf("%d of %d configurations are invalid", refused, len(corpus))
	if refused < len(corpus)/4 || refused > len(corpus)*3/4 {
		t.Errorf("%d of %d configurations are invalid, want about half", refused, len(corpus))
	}
}

func TestParameterPolicyReadsEachObject(t *testing.T) {
	p := parameterPolicy(t)
	const bad, good = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharin":{}}`,
		`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"}`
	for name, c := range map[string]struct {
		object runtime.Object
		want   string // a part of the refusal, or empty
	}{
		"a claim":                      {claimWith(opaque(gpuDriver, bad)), `GpuConfig: unknown field "sharin": remove it`},
		"a template":                   {templateWith(opaque(gpuDriver, bad)), `GpuConfig: unknown field "sharin": remove it`},
		"a class":                      {classWith(opaque(gpuDriver, bad)), `GpuConfig: unknown field "sharin": remove it`},
		"the second configuration":     {claimWith(opaque(gpuDriver, good), opaque(gpuDriver, bad)), "sharin"},
		"another driver's":             {claimWith(opaque("tpu.example.com", bad), opaque(gpuDriver, good)), ""},
		"another driver's template":    {templateWith(opaque("tpu.example.com", `{"kind":7}`)), ""},
		"no configuration":             {claimWith(), ""},
		"a template without any":       {templateWith(), ""},
		"a class without any":          {classWith(), ""},
		"a configuration of no driver": {claimWith(resourceapi.DeviceConfiguration{}), ""},
	} {
		t.Run(name, func(t *testing.T) {
			if got := p.creation(t, c.object); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
				t.Errorf("verdict %q, want %q", got, c.want)
			}
		})
	}
	t.Run("a bad class that keeps its configuration", func(t *testing.T) {
		old, updated := classWith(opaque(gpuDriver, bad)), classWith(opaque(gpuDriver, bad))
		updated.Labels = map[string]string{"new": "label"}
		who := &user.DefaultInfo{Name: "jane"}
		if got := p.verdict(t, who, admission.Update, resourceOf(old), "", updated, old); got != "" {
			t.Errorf("refused: %s", got)
		}
		if got := p.verdict(t, who, admission.Update, resourceOf(old), "", updated, classWith()); got == "" {
			t.Error("a class may get a bad configuration by an update")
		}
	})
}

// Each message names the field, the value and the remedy in one line.
func TestParameterPolicyMessages(t *testing.T) {
	p := parameterPolicy(t)
	for body, want := range map[string]string{
		`"apiVersion":"v1","kind":"GpuConfig"`: `The opaque configuration has apiVersion "v1": set it to resource.nvidia.com/v1beta1`,
		`"kind":"GpuConfig"`:                   "The opaque configuration has apiVersion missing: set it to",
		`"apiVersion":"resource.nvidia.com/v1beta1","kind":"Gpu"`: `The opaque configuration has kind "Gpu": ` +
			"use one of GpuConfig, MigDeviceConfig, VfioDeviceConfig",
		gpu(`"sharing":7`):                           "GpuConfig: sharing is 7: set it to an object in braces",
		gpu(`"sharing":{}`):                          "GpuConfig: sharing.strategy is missing: set it to TimeSlicing or MPS, or remove sharing",
		gpu(`"sharing":{"strategy":"Luck"}`):         `GpuConfig: sharing.strategy is "Luck": set it to TimeSlicing or MPS`,
		gpu(`"sharing":{"strategy":["MPS"]}`):        "GpuConfig: sharing.strategy is a list: set it to",
		gpu(`"sharing":{"strategy":"MPS","x\ny":1}`): "GpuConfig: sharing has an unknown field: remove it, or correct its spelling",
		gpu(`"sharing":{"strategy":"TimeSlicing","mpsConfig":{}}`): "GpuConfig: sharing.mpsConfig does not go with strategy " +
			"TimeSlicing: remove it, or set another sharing.strategy",
		gpu(mps(`"defaultActiveThreadPercentage":101`)): "GpuConfig: sharing.mpsConfig.defaultActiveThreadPercentage is 101: " +
			"set it to a whole number from 0 to 100",
		gpu(mps(`"defaultPinnedDeviceMemoryLimit":"1"`)): `GpuConfig: sharing.mpsConfig.defaultPinnedDeviceMemoryLimit is "1": ` +
			"set it to an amount of memory from 1Mi to 1Pi",
		gpu(mps(`"defaultPerDevicePinnedMemoryLimit":{"../..":"1Gi"}`)): "GpuConfig: " +
			`sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit["../.."]: the key names no device: use a UUID such as`,
		gpu(mps(`"defaultPerDevicePinnedMemoryLimit":{"0":"1Gi","1":{}}`)): "GpuConfig: " +
			`sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit["1"] is an object: set it to an amount`,
		gpu(mps(`"multiUser":"yes"`)): `GpuConfig: sharing.mpsConfig.multiUser is "yes": set it to true or false`,
	} {
		got := p.creation(t, claimWith(opaque(gpuDriver, "{"+body+"}")))
		if !strings.Contains(got, want) || strings.Contains(got, "\n") {
			t.Errorf("{%s}: got %q, want %q", body, got, want)
		}
	}
}

func gpu(rest string) string {
	return `"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig",` + rest
}

func mps(config string) string { return `"sharing":{"strategy":"MPS","mpsConfig":{` + config + `}}` }

package v1beta1

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

const uuid = "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"

func object(kind, rest string) string {
	return fmt.Sprintf(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":%q%s}`, kind, rest)
}

func meta(kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: APIVersion, Kind: kind}
}

func read(raw string) (Config, error) {
	c, err := Decode([]byte(raw))
	if err != nil {
		return nil, err
	}
	c.Default()
	return c, c.Validate()
}

func TestAcceptsExistingManifests(t *testing.T) {
	for _, c := range []struct {
		name string
		raw  string
		want Config
	}{
		{"no settings", object("GpuConfig", ""), &GpuConfig{TypeMeta: meta("GpuConfig")}},
		{"time slices of the default length", object("GpuConfig", `,"sharing":{"strategy":"TimeSlicing"}`),
			&GpuConfig{TypeMeta: meta("GpuConfig"), Sharing: &Sharing{Strategy: SharingTimeSlicing,
				TimeSlicing: &TimeSlicingConfig{Interval: IntervalDefault}}}},
		{"an empty timeSlicingConfig", object("GpuConfig", `,"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{}}`),
			&GpuConfig{TypeMeta: meta("GpuConfig"), Sharing: &Sharing{Strategy: SharingTimeSlicing,
				TimeSlicing: &TimeSlicingConfig{Interval: IntervalDefault}}}},
		{"long time slices", object("GpuConfig", `,"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}`),
			&GpuConfig{TypeMeta: meta("GpuConfig"), Sharing: &Sharing{Strategy: SharingTimeSlicing,
				TimeSlicing: &TimeSlicingConfig{Interval: IntervalLong}}}},
		{"MPS", object("GpuConfig", `,"sharing":{"strategy":"MPS"}`),
			&GpuConfig{TypeMeta: meta("GpuConfig"), Sharing: &Sharing{Strategy: SharingMPS, MPS: &MPSConfig{}}}},
		{"MPS with all settings", object("GpuConfig",
			`,"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"10Gi",`+
				`"defaultPerDevicePinnedMemoryLimit":{"0":"5Gi","`+uuid+`":"1Mi"},"multiUser":true}}`),
			&GpuConfig{TypeMeta: meta("GpuConfig"), Sharing: &Sharing{Strategy: SharingMPS, MPS: &MPSConfig{
				DefaultActiveThreadPercentage:  ptr.To(50),
				DefaultPinnedDeviceMemoryLimit: ptr.To(MemoryLimit{resource.MustParse("10Gi")}),
				DefaultPerDevicePinnedMemoryLimit: map[string]MemoryLimit{
					"0": {resource.MustParse("5Gi")}, uuid: {resource.MustParse("1Mi")},
				},
				MultiUser: true,
			}}}},
		{"MPS with 0 percent of threads, which is no limit", object("GpuConfig",
			`,"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":0}}`),
			&GpuConfig{TypeMeta: meta("GpuConfig"), Sharing: &Sharing{Strategy: SharingMPS,
				MPS: &MPSConfig{DefaultActiveThreadPercentage: ptr.To(0)}}}},
		{"a MIG device", object("MigDeviceConfig", ""), &MigDeviceConfig{TypeMeta: meta("MigDeviceConfig")}},
		{"time slices of a MIG device", object("MigDeviceConfig", `,"sharing":{"strategy":"TimeSlicing"}`),
			&MigDeviceConfig{TypeMeta: meta("MigDeviceConfig"), Sharing: &MigSharing{Strategy: SharingTimeSlicing}}},
		{"MPS on a MIG device", object("MigDeviceConfig", `,"sharing":{"strategy":"MPS"}`),
			&MigDeviceConfig{TypeMeta: meta("MigDeviceConfig"), Sharing: &MigSharing{Strategy: SharingMPS, MPS: &MPSConfig{}}}},
		{"passthrough", object("VfioDeviceConfig", ""),
			&VfioDeviceConfig{TypeMeta: meta("VfioDeviceConfig"), IOMMU: &IOMMUConfig{BackendPolicy: IOMMULegacyOnly,
				EnableAPIDevice: ptr.To(false)}}},
		{"passthrough by iommufd", object("VfioDeviceConfig", `,"iommu":{"backendPolicy":"PreferIommuFD","enableAPIDevice":true}`),
			&VfioDeviceConfig{TypeMeta: meta("VfioDeviceConfig"), IOMMU: &IOMMUConfig{BackendPolicy: IOMMUPreferIommuFD,
				EnableAPIDevice: ptr.To(true)}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := read(c.raw)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
			got.Default()
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("defaulted twice: %s", diff)
			}
			raw, err := json.Marshal(got)
			if err != nil {
				t.Fatal(err)
			}
			if again, err := read(string(raw)); err != nil || cmp.Diff(got, again) != "" {
				t.Errorf("%s does not come back: %v%s", raw, err, cmp.Diff(got, again))
			}
		})
	}
}

func TestRefusalsNameFieldAndReason(t *testing.T) {
	gpu := func(rest string) string { return object("GpuConfig", `,"sharing":`+rest) }
	mps := func(rest string) string { return gpu(`{"strategy":"MPS","mpsConfig":` + rest + `}`) }
	for _, c := range []struct {
		name, raw string
		says      []string
	}{
		{"nothing", "", []string{"JSON object"}},
		{"null", "null", []string{"JSON object"}},
		{"a list", "[]", []string{"JSON object"}},
		{"half an object", `{"apiVersion":`, []string{"JSON"}},
		{"two objects", object("GpuConfig", "") + object("GpuConfig", ""), []string{"JSON"}},
		{"an object without a kind", `{"apiVersion":"resource.nvidia.com/v1beta1"}`, []string{"kind", "GpuConfig"}},
		{"an object without a version", `{"kind":"GpuConfig"}`, []string{"apiVersion", APIVersion}},
		{"another version", `{"apiVersion":"resource.nvidia.com/v1","kind":"GpuConfig"}`, []string{"resource.nvidia.com/v1", APIVersion}},
		{"another kind", object("Pod", ""), []string{"Pod", "GpuConfig, MigDeviceConfig, VfioDeviceConfig"}},
		{"a kind that is a number", `{"apiVersion":"resource.nvidia.com/v1beta1","kind":7}`, []string{"type"}},
		{"too long", object("GpuConfig", "") + strings.Repeat(" ", resourceapi.OpaqueParametersMaxLength), []string{"too long", "10240"}},
		{"an unknown field", object("GpuConfig", `,"shared":{}`), []string{"GpuConfig", `unknown field`, "shared"}},
		{"an unknown field deep inside", gpu(`{"strategy":"MPS","mpsConfig":{"percentage":1}}`), []string{"sharing.mpsConfig.percentage"}},
		{"a field in the wrong case", object("GpuConfig", `,"Sharing":{"strategy":"MPS"}`), []string{"Sharing"}},
		{"a field twice", gpu(`{"strategy":"MPS","strategy":"TimeSlicing"}`), []string{"duplicate", "strategy"}},
		{"a value of the wrong type", gpu(`7`), []string{"type"}},
		{"no strategy", gpu(`{}`), []string{"sharing.strategy", "TimeSlicing", "MPS"}},
		{"an unknown strategy", gpu(`{"strategy":"Luck"}`), []string{"Luck", "TimeSlicing", "MPS"}},
		{"an unknown interval", gpu(`{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Eternal"}}`), []string{"Eternal", "Short"}},
		{"settings of MPS for time slices", gpu(`{"strategy":"TimeSlicing","mpsConfig":{}}`), []string{"mpsConfig", "TimeSlicing"}},
		{"settings of time slices for MPS", gpu(`{"strategy":"MPS","timeSlicingConfig":{}}`), []string{"timeSlicingConfig", "MPS"}},
		{"a negative percentage of threads", mps(`{"defaultActiveThreadPercentage":-1}`),
			[]string{"defaultActiveThreadPercentage is -1", "0 to 100"}},
		{"more than 100 percent of threads", mps(`{"defaultActiveThreadPercentage":101}`), []string{"101", "0 to 100"}},
		{"a fractional percentage", mps(`{"defaultActiveThreadPercentage":0.5}`), []string{"type"}},
		{"a limit that is not a quantity", mps(`{"defaultPinnedDeviceMemoryLimit":"much"}`), []string{"not an amount of memory"}},
		{"a limit of zero", mps(`{"defaultPinnedDeviceMemoryLimit":"0"}`), []string{"defaultPinnedDeviceMemoryLimit", "1Mi"}},
		{"a negative limit", mps(`{"defaultPinnedDeviceMemoryLimit":"-1Gi"}`), []string{"-1Gi", "1Mi"}},
		{"a limit for a device without a name", mps(`{"defaultPerDevicePinnedMemoryLimit":{"":"1Gi"}}`),
			[]string{"defaultPerDevicePinnedMemoryLimit", "UUID", "index"}},
		{"a limit for a negative index", mps(`{"defaultPerDevicePinnedMemoryLimit":{"-1":"1Gi"}}`), []string{`"-1"`, "index"}},
		{"a limit for an index with a leading zero", mps(`{"defaultPerDevicePinnedMemoryLimit":{"01":"1Gi"}}`), []string{`"01"`, "index"}},
		{"a limit for half a UUID", mps(`{"defaultPerDevicePinnedMemoryLimit":{"GPU-4cf8db2d":"1Gi"}}`), []string{"GPU-4cf8db2d", "UUID"}},
		{"a limit below 1Mi for a device", mps(`{"defaultPerDevicePinnedMemoryLimit":{"0":"1Ki"}}`), []string{`["0"]`, "1Ki", "1Mi"}},
		{"time-slice settings of a MIG device", object("MigDeviceConfig",
			`,"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{}}`), []string{"MigDeviceConfig", "timeSlicingConfig"}},
		{"an unknown strategy of a MIG device", object("MigDeviceConfig", `,"sharing":{"strategy":"x"}`), []string{"MigDeviceConfig",
			"sharing.strategy"}},
		{"sharing of a passthrough GPU", object("VfioDeviceConfig", `,"sharing":{}`), []string{"VfioDeviceConfig", "sharing"}},
		{"an unknown IOMMU policy", object("VfioDeviceConfig", `,"iommu":{"backendPolicy":"x"}`), []string{"VfioDeviceConfig",
			"iommu.backendPolicy", "LegacyOnly"}},
		{"a long name with line breaks in it", object(strings.Repeat(`ä\n`, 2000), ""), []string{"kind", "GpuConfig"}},
		{"a long unknown field with line breaks in it", object("GpuConfig", `,"`+strings.Repeat(`ä\n`, 2000)+`":1`),
			[]string{"GpuConfig", "unknown field"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := read(c.raw)
			if err == nil {
				t.Fatal("accepted")
			}
			for _, want := range c.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
			if strings.ContainsAny(err.Error(), "\n\r") || len(err.Error()) > 600 {
				t.Errorf("not a short line: %q", err)
			}
		})
	}
}

func TestValidateWithoutDefaults(t *testing.T) {
	for _, c := range []Config{
		&GpuConfig{Sharing: &Sharing{Strategy: SharingTimeSlicing}},
		&GpuConfig{Sharing: &Sharing{Strategy: SharingMPS}},
		&VfioDeviceConfig{},
	} {
		if err := c.Validate(); err != nil {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestSharingStrategyOfConfig(t *testing.T) {
	for _, c := range []struct {
		config interface{ SharingStrategy() SharingStrategy }
		want   SharingStrategy
	}{
		{&GpuConfig{}, SharingNone},
		{&GpuConfig{Sharing: &Sharing{Strategy: SharingMPS}}, SharingMPS},
		{&MigDeviceConfig{}, SharingNone},
		{&MigDeviceConfig{Sharing: &MigSharing{Strategy: SharingTimeSlicing}}, SharingTimeSlicing},
	} {
		if got := c.config.SharingStrategy(); got != c.want {
			t.Errorf("%+v: %q", c.config, got)
		}
	}
}

// No input may cause a panic, or an error that is too long for an Event. A configuration that is
// accepted must come back unchanged from JSON.
func FuzzDecodeDefaultValidate(f *testing.F) {
	for _, empty := range kinds {
		kind := empty().Kind()
		for _, field := range fieldsOf("", reflect.TypeOf(empty())) {
			f.Add([]byte(valid(kind, field.path)))
			for _, value := range invalid[kind][field.path] {
				f.Add([]byte(strings.Replace(valid(kind, field.path), `"Short"`, value, 1)))
			}
		}
	}
	f.Add([]byte(object("VfioDeviceConfig", `,"iommu":null`)))
	f.Add([]byte(object("GpuConfig", `,"sharing":{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"\u0031Gi"}}`)))
	f.Add([]byte(object("GpuConfig", `,"sharing":{"sharing":[[[[{}]]]]}`)))
	f.Add([]byte("\xff"))
	short := func(t *testing.T, err error) {
		if strings.ContainsAny(err.Error(), "\n\r") || len(err.Error()) > 1000 {
			t.Errorf("not a short line: %q", err)
		}
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := Decode(raw)
		if err != nil {
			short(t, err)
			return
		}
		c.Default()
		if err := c.Validate(); err != nil {
			short(t, err)
			return
		}
		first := marshalled(t, c)
		c.Default()
		if again := marshalled(t, c); again != first {
			t.Errorf("defaulted twice, %s becomes %s", first, again)
		}
		back, err := read(first)
		if err != nil {
			t.Fatalf("%s is accepted, and as %s is not: %v", raw, first, err)
		}
		if again := marshalled(t, back); again != first {
			t.Errorf("%s comes back as %s", first, again)
		}
	})
}

func marshalled(t *testing.T, c Config) string {
	t.Helper()
	raw, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

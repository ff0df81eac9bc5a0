package v1beta1

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/sets"
)

// anyOfItsType is the value in the map invalid for a field that accepts every value of its Go type.
var anyOfItsType = []string{}

// invalid lists, for each field of each kind, values of the right type that must be refused. In a
// path, [] is the value of a map's entry and [key] its key. For every field, the tests also try
// values of another type, the field twice, its name in another case, and an unknown field next to
// it.
var invalid = map[string]map[string][]string{
	"GpuConfig": merged(strategies, mpsFields, map[string][]string{
		"sharing.timeSlicingConfig":          anyOfItsType,
		"sharing.timeSlicingConfig.interval": {`"Eternal"`, `"long"`, `"DEFAULT"`, `" Short"`, `"1ms"`, `"Long\u0000"`},
	}),
	"MigDeviceConfig": merged(strategies, mpsFields),
	"VfioDeviceConfig": {
		"apiVersion": versions, "kind": kindsThatAreNone,
		"iommu":                 anyOfItsType,
		"iommu.backendPolicy":   {`"x"`, `"legacyOnly"`, `"PreferIOMMUFD"`, `" LegacyOnly"`},
		"iommu.enableAPIDevice": anyOfItsType,
	},
}

var (
	versions = []string{`""`, `null`, `"v1beta1"`, `"resource.nvidia.com/v1"`, `"resource.nvidia.com/v1beta2"`,
		`"resource.nvidia.com/V1beta1"`, `"resource.k8s.io/v1"`}
	kindsThatAreNone = []string{`""`, `null`, `"Pod"`, `"gpuConfig"`, `"GpuConfig "`, `"ImexChannelConfig"`}

	strategies = map[string][]string{
		"apiVersion": versions, "kind": kindsThatAreNone,
		"sharing":          {`{}`},
		"sharing.strategy": {`""`, `null`, `"Luck"`, `"mps"`, `"timeSlicing"`, `"MPS "`, `"None"`},
	}
	amountsThatAreNone = []string{
		`"much"`, `""`, `"0"`, `"0Gi"`, `"-1Gi"`, `"1023Ki"`, `"1"`, `1`, `0`, `-1`, `1048575`, `"1m"`, `"4Gb"`, `"4 Gi"`, `"0x10"`,
		`"1e2000000000"`, `"1e-2000000000"`, `"NaN"`, `"+Inf"`, `1.5`,
		`"1025Ti"`, `"16E"`, `"999999999999999999E"`, `"9e99"`, `9223372036854775807`,
	}
	mpsFields = map[string][]string{
		"sharing.mpsConfig": anyOfItsType,
		"sharing.mpsConfig.defaultActiveThreadPercentage":       {`-1`, `101`, `1000`, `-9223372036854775808`, `9223372036854775807`},
		"sharing.mpsConfig.defaultPinnedDeviceMemoryLimit":      amountsThatAreNone,
		"sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit":   anyOfItsType,
		"sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[]": append([]string{`null`}, amountsThatAreNone...),
		"sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[key]": {`""`, `"-1"`, `"01"`, `"+1"`, `"1.0"`, `"65536"`, `"GPU-4cf8db2d"`,
			`"gpu-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"`, `"GPU-4CF8DB2D-06c0-7d70-1a51-e59b25b2c16c"`, `"0000:1b:00.0"`, `"*"`},
		"sharing.mpsConfig.multiUser": anyOfItsType,
	}
)

func merged(tables ...map[string][]string) map[string][]string {
	all := map[string][]string{}
	for _, t := range tables {
		maps.Copy(all, t)
	}
	return all
}

// field is one field of a kind: its path in JSON and its Go type.
type field struct {
	path string
	t    reflect.Type
}

func fieldsOf(path string, t reflect.Type) []field {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if _, is := reflect.New(t).Interface().(json.Unmarshaler); is {
		return nil
	}
	var all []field
	switch t.Kind() {
	case reflect.Map:
		all = append(all, field{path + "[key]", t.Key()}, field{path + "[]", t.Elem()})
		all = append(all, fieldsOf(path+"[]", t.Elem())...)
	case reflect.Slice, reflect.Array:
		all = append(all, field{path + "[]", t.Elem()})
		all = append(all, fieldsOf(path+"[]", t.Elem())...)
	case reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if name == "" {
				all = append(all, fieldsOf(path, f.Type)...)
				continue
			}
			inner := strings.TrimPrefix(path+"."+name, ".")
			all = append(all, field{inner, f.Type})
			all = append(all, fieldsOf(inner, f.Type)...)
		}
	}
	return all
}

// otherTypes returns JSON values of other types than t, which a field of type t must refuse.
func otherTypes(t reflect.Type) []string {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if _, is := reflect.New(t).Interface().(json.Unmarshaler); is {
		return []string{`true`, `[]`, `{}`, `[1]`, `{"a":1}`, `"\ud800"`}
	}
	values := map[reflect.Kind]string{reflect.String: `"x"`, reflect.Bool: `true`, reflect.Int: `7`, reflect.Struct: `{}`, reflect.Slice: `[]`}
	kind := t.Kind()
	if kind == reflect.Map {
		kind = reflect.Struct
	}
	var all []string
	for _, k := range slices.Sorted(maps.Keys(values)) {
		if k != kind {
			all = append(all, values[k])
		}
	}
	if kind == reflect.Int {
		all = append(all, `0.5`, `1.0`, `1e400`, `99999999999999999999`, `"7"`)
	}
	return all
}

// valid returns a configuration of this kind that Validate accepts. It sets every object on the
// path, so that a test can then change the field.
func valid(kind, path string) string {
	rest := ""
	switch {
	case strings.HasPrefix(path, "sharing.timeSlicingConfig"):
		rest = `,"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Short"}}`
	case strings.HasPrefix(path, "sharing.mpsConfig"):
		rest = `,"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"4Gi",` +
			`"defaultPerDevicePinnedMemoryLimit":{"0":"5Gi"},"multiUser":true}}`
	case strings.HasPrefix(path, "sharing"):
		rest = `,"sharing":{"strategy":"MPS"}`
	case strings.HasPrefix(path, "iommu"):
		rest = `,"iommu":{"backendPolicy":"LegacyOnly","enableAPIDevice":true}`
	}
	return object(kind, rest)
}

// set returns the configuration with a new value for the field at path: the raw JSON in the
// parameter to.
func set(t *testing.T, config, path, to string) string {
	t.Helper()
	return change(t, config, path, func(object map[string]json.RawMessage, name string) {
		if name == "[key]" {
			var key string
			if err := json.Unmarshal([]byte(to), &key); err != nil {
				t.Fatal(err)
			}
			object[key] = object["0"]
			delete(object, "0")
			return
		}
		if name == "[]" {
			name = "0"
		}
		object[name] = json.RawMessage(to)
	})
}

// change calls the function with on the JSON object that contains the field at path, and on the
// field's name in that object. It returns the configuration with the object as that function left
// it.
func change(t *testing.T, config, path string, with func(object map[string]json.RawMessage, name string)) string {
	t.Helper()
	return inside(t, config, strings.Split(strings.ReplaceAll(path, "[", ".["), "."), with)
}

func inside(t *testing.T, object string, way []string, with func(object map[string]json.RawMessage, name string)) string {
	t.Helper()
	var members map[string]json.RawMessage
	if err := json.Unmarshal([]byte(object), &members); err != nil {
		t.Fatalf("%v in %q: %v", way, object, err)
	}
	if len(way) > 1 {
		members[way[0]] = json.RawMessage(inside(t, string(members[way[0]]), way[1:], with))
	} else {
		with(members, way[0])
	}
	// Write the JSON without json.Marshal, which refuses some of the invalid values.
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(members)) {
		key, err := json.Marshal(name)
		if err != nil {
			t.Fatal(err)
		}
		text.WriteString("," + string(key) + ":" + string(members[name]))
	}
	return "{" + strings.TrimPrefix(text.String(), ",") + "}"
}

func TestInvalidValueTableCoversEveryField(t *testing.T) {
	for _, empty := range kinds {
		kind := empty().Kind()
		paths := sets.New[string]()
		for _, f := range fieldsOf("", reflect.TypeOf(empty())) {
			paths.Insert(f.path)
		}
		listed := sets.KeySet(invalid[kind])
		for _, path := range sets.List(paths.Difference(listed)) {
			t.Errorf("%s.%s: the table has no invalid values", kind, path)
		}
		for _, path := range sets.List(listed.Difference(paths)) {
			t.Errorf("%s.%s is not a field", kind, path)
		}
	}
	if len(invalid) != len(kinds) {
		t.Errorf("%d kinds are listed, there are %d", len(invalid), len(kinds))
	}
}

func TestInvalidValuesAreRefusedByPath(t *testing.T) {
	tried := 0
	for _, empty := range kinds {
		kind := empty().Kind()
		for _, f := range fieldsOf("", reflect.TypeOf(empty())) {
			config := valid(kind, f.path)
			if _, err := read(config); err != nil {
				t.Fatalf("%s: %v", config, err)
			}
			values := slices.Clone(invalid[kind][f.path])
			if !strings.HasSuffix(f.path, "[key]") {
				values = append(values, otherTypes(f.t)...)
			}
			for _, value := range values {
				tried++
				refused(t, set(t, config, f.path, value), pathInErrors(f.path))
			}
			t.Run(kind+"."+f.path, func(t *testing.T) { misspelt(t, config, f) })
		}
	}
	t.Logf("%d values", tried)
	if tried < 200 {
		t.Errorf("only %d values were tried", tried)
	}
}

// misspelt fails the test if a configuration is accepted although the field's name has another
// case, the field occurs twice, or an unknown field is next to it.
func misspelt(t *testing.T, config string, f field) {
	name := f.path[strings.LastIndexAny(f.path, ".]")+1:]
	if name == "" || strings.HasSuffix(f.path, "]") {
		return // The entry of a map has no field name.
	}
	other := strings.ToUpper(name[:1]) + name[1:]
	wrong := change(t, config, f.path, func(object map[string]json.RawMessage, name string) {
		object[other] = object[name]
		delete(object, name)
	})
	if f.path == "apiVersion" || f.path == "kind" {
		refused(t, wrong, f.path)
	} else {
		refused(t, wrong, other)
	}
	twice := strings.Replace(config, `"`+name+`":`, `"`+name+`":null,"`+name+`":`, 1)
	refused(t, twice, f.path)
	refused(t, change(t, config, f.path, func(object map[string]json.RawMessage, _ string) {
		object["unheardOf"] = json.RawMessage("1")
	}), "unheardOf")
}

// pathInErrors returns a field's path as errors write it: without [] and [key].
func pathInErrors(path string) string {
	path, _, _ = strings.Cut(path, "[")
	return path
}

func refused(t *testing.T, config, path string) {
	t.Helper()
	_, err := read(config)
	if err == nil {
		t.Errorf("accepted: %s", config)
		return
	}
	if s := err.Error(); !strings.Contains(s, path) || strings.ContainsAny(s, "\n\r") || len(s) > 600 {
		t.Errorf("%s is refused with %q, not with a short line that names %s", config, s, path)
	}
}

func TestRefusesSettingsOfAnotherStrategy(t *testing.T) {
	for _, kind := range []string{"GpuConfig", "MigDeviceConfig"} {
		refused(t, object(kind, `,"sharing":{"strategy":"TimeSlicing","mpsConfig":{}}`), "sharing.mpsConfig")
		refused(t, object(kind, `,"sharing":{"strategy":"MPS","timeSlicingConfig":{}}`), "sharing.timeSlicingConfig")
		refused(t, object(kind, `,"sharing":{"mpsConfig":{}}`), "sharing.strategy")
	}
	refused(t, object("MigDeviceConfig", `,"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Short"}}`),
		"sharing.timeSlicingConfig")
	for _, kind := range []string{"GpuConfig", "MigDeviceConfig"} {
		refused(t, object(kind, `,"iommu":{}`), "iommu")
	}
	refused(t, object("VfioDeviceConfig", `,"sharing":{"strategy":"MPS"}`), "sharing")
}

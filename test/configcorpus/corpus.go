// Package configcorpus generates opaque configurations, valid and invalid, to compare two
// validations.
package configcorpus

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
)

// values are what a field may get: right for one field, wrong for the others.
var values = []any{
	nil, true, false, 0, 1, 100, 101, -1, 1.5, 2147483648.0, 1048575, 1048576, 1 << 50, 1<<50 + 1, 9.3e300,
	"", "x", "TimeSlicing", "MPS", "mps", "MPS ", "Default", "Short", "Long", "long", "LegacyOnly", "PreferIommuFD", "PreferIOMMUFD",
	"4Gi", "1Mi", "1023Ki", "1Pi", "1025Ti", "-1Gi", "+4Gi", "1e9", "9e99", "1e2000000000", "4Gb", "4 Gi", "1.5Gi", "16E", "1m", "0x10",
	"line\nbreak", "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c", "é",
	map[string]any{}, map[string]any{"a": 1}, []any{}, []any{"MPS"},
}

// keys are the keys of the limits for single devices.
var keys = []string{
	"0", "1", "65535", "65536", "99999", "01", "-1", "+1", "", "*", "é", "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c",
	"MIG-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c", "gpu-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c", "GPU-4cf8db2d", "../../etc",
}

var kinds = []any{"GpuConfig", "MigDeviceConfig", "VfioDeviceConfig"}

// Generate returns n configurations as JSON objects, the same ones for the same seed. About half of
// them have one mistake or more.
func Generate(seed uint64, n int) []string {
	g := generator{rand.New(rand.NewPCG(seed, 0))}
	all := make([]string, n)
	for i := range all {
		raw, err := json.Marshal(g.config())
		if err != nil {
			panic(fmt.Sprintf("marshal a configuration: %v", err)) // impossible: it has only JSON's types
		}
		all[i] = string(raw)
	}
	return all
}

type generator struct{ *rand.Rand }

func (g generator) config() map[string]any {
	c := map[string]any{"apiVersion": "resource.nvidia.com/v1beta1", "kind": pick(g, kinds)}
	if g.rarely() {
		c[pick(g, []string{"apiVersion", "kind"})] = pick(g, values)
	}
	if g.rarely() {
		delete(c, pick(g, []string{"apiVersion", "kind"}))
	}
	if c["kind"] == "VfioDeviceConfig" != g.rarely() {
		g.add(c, "iommu", g.iommu())
	} else {
		g.add(c, "sharing", g.sharing(c["kind"]))
	}
	return c
}

func (g generator) iommu() any {
	c := map[string]any{}
	g.add(c, "backendPolicy", pick(g, []any{"LegacyOnly", "PreferIommuFD", ""}))
	g.add(c, "enableAPIDevice", g.IntN(2) == 0)
	return g.spoilt(c)
}

func (g generator) sharing(kind any) any {
	c := map[string]any{}
	mps := g.IntN(3) > 0
	if mps {
		c["strategy"] = "MPS"
	} else {
		c["strategy"] = "TimeSlicing"
	}
	if mps != g.rarely() {
		g.add(c, "mpsConfig", g.mps())
	} else if kind == "GpuConfig" || g.rarely() {
		timeSlices := map[string]any{}
		g.add(timeSlices, "interval", pick(g, []any{"Default", "Short", "Medium", "Long", ""}))
		g.add(c, "timeSlicingConfig", g.spoilt(timeSlices))
	}
	return g.spoilt(c)
}

func (g generator) mps() any {
	c := map[string]any{}
	g.add(c, "defaultActiveThreadPercentage", g.IntN(101))
	g.add(c, "defaultPinnedDeviceMemoryLimit", pick(g, []any{"4Gi", "1Mi", "1e9", 1 << 30}))
	limits := map[string]any{}
	for range g.IntN(3) {
		key := pick(g, keys[:3])
		if g.rarely() {
			key = pick(g, keys)
		}
		limits[key] = "4Gi"
		if g.rarely() {
			limits[key] = pick(g, values)
		}
	}
	g.add(c, "defaultPerDevicePinnedMemoryLimit", limits)
	g.add(c, "multiUser", g.IntN(2) == 0)
	return g.spoilt(c)
}

// add often sets a field, now and then to a wrong value.
func (g generator) add(c map[string]any, key string, value any) {
	switch {
	case g.rarely():
		c[key] = pick(g, values)
	case g.IntN(4) > 0:
		c[key] = value
	}
}

// spoilt now and then adds an unknown field to an object, or removes or misspells one.
func (g generator) spoilt(c map[string]any) any {
	if g.rarely() {
		c[pick(g, []string{"unknown", "Strategy", "interval", "multiuser"})] = pick(g, values)
	}
	if g.rarely() {
		for _, key := range []string{"strategy", "interval"} {
			delete(c, key)
		}
	}
	return c
}

func (g generator) rarely() bool { return g.IntN(12) == 0 }

func pick[T any](g generator, from []T) T { return from[g.IntN(len(from))] }

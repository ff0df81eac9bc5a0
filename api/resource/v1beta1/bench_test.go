package v1beta1

import "testing"

func BenchmarkDecode(b *testing.B) {
	for name, raw := range map[string]string{
		"no-settings": object("GpuConfig", ""),
		"MPS": object("GpuConfig", `,"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50,`+
			`"defaultPinnedDeviceMemoryLimit":"10Gi","defaultPerDevicePinnedMemoryLimit":{"0":"5Gi"}}}`),
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := read(raw); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

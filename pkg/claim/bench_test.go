package claim

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
)

func BenchmarkRead(b *testing.B) {
	c := newClaim([]resourceapi.DeviceRequestAllocationResult{allocated("a", gpu0), allocated("b", gpu1)},
		config(class, kind("GpuConfig")), config(theClaim, slice("Long"), "b"))
	b.ReportAllocs()
	for b.Loop() {
		if a, err := Read(c, driver); err != nil || len(a) != 2 {
			b.Fatal(a, err)
		}
	}
}

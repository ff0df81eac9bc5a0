package cdi

import (
	"testing"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"
)

func BenchmarkClaimSpec(b *testing.B) {
	devices := []specs.Device{{Name: ClaimDeviceName(claimUID, "gpu-0000-1b-00-0", nil), ContainerEdits: wholeGPU()}}
	_, claim, err := Render(commonEdits(), devices)
	if err != nil {
		b.Fatal(err)
	}
	b.Run("render", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := encode(&specs.Spec{Kind: ClaimKind, Devices: devices}); err != nil {
				b.Fatal(err)
			}
		}
	})
	// After each change in the CDI directory, a container runtime reads every spec of the node like
	// this.
	b.Run("read-by-a-runtime", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := cdilib.ParseSpec(claim); err != nil {
				b.Fatal(err)
			}
		}
	})
}

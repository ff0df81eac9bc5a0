package cdi

import (
	"fmt"

	"tags.cncf.io/container-device-interface/specs-go"
)

// Render returns the base spec and the spec of one claim with these devices, byte for byte as a [Store] would write them, and writes nothing.
func Render(common specs.ContainerEdits, devices []ClaimDevice) (base, claim []byte, err error) {
	if base, err = encode(baseSpec(common)); err != nil {
		return nil, nil, fmt.Errorf("the base CDI spec: %w", err)
	}
	if claim, err = encode(claimSpec(devices)); err != nil {
		return nil, nil, fmt.Errorf("a claim's CDI spec: %w", err)
	}
	return base, claim, nil
}

func baseSpec(edits specs.ContainerEdits) *specs.Spec {
	return &specs.Spec{
		Kind:           Vendor + "/" + baseClass,
		ContainerEdits: edits,
		Devices: []specs.Device{{
			Name: baseDevice,
			// A runtime that acts on this variable (the NVIDIA Container Runtime in its older modes) must not add GPUs of its own.
			ContainerEdits: specs.ContainerEdits{Env: []string{"NVIDIA_VISIBLE_DEVICES=void"}},
		}},
	}
}

func claimSpec(devices []ClaimDevice) *specs.Spec {
	spec := &specs.Spec{Kind: Vendor + "/" + claimClass}
	for _, d := range devices {
		spec.Devices = append(spec.Devices, specs.Device{Name: d.Name, ContainerEdits: d.Edits})
	}
	return spec
}

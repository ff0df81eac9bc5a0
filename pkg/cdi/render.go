package cdi

import (
	"fmt"

	"tags.cncf.io/container-device-interface/specs-go"
)

// Render returns the base spec with the edits common and the spec of one claim with these devices,
// byte for byte as [Store] would write them. It writes no file.
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
			// The legacy mode of the NVIDIA Container Runtime adds the GPUs that this variable names. "void"
			// names none.
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

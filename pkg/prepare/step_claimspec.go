package prepare

import (
	"context"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
)

const claimSpecKind = "claim-spec"

// claimSpec is the step that writes the claim's CDI spec. The record contains the CDI edits, so
// that the driver can write a lost spec again without reading the hardware.
type claimSpec struct {
	Devices []specDevice `json:"devices"`
	// Clients lists the devices that are shared through MPS, each with the MPS daemon to which its
	// containers connect.
	Clients []mpsClient `json:"clients,omitempty"`
}

type specDevice struct {
	Name  string               `json:"name"`
	Edits specs.ContainerEdits `json:"edits"`
}

var _ Step = &claimSpec{}

func (s *claimSpec) Kind() string { return claimSpecKind }

func (s *claimSpec) Apply(_ context.Context, env *Env) error {
	devices := make([]cdi.ClaimDevice, len(s.Devices))
	for i, d := range s.Devices {
		devices[i] = cdi.ClaimDevice{Name: d.Name, Edits: d.Edits}
	}
	return env.Specs.WriteClaim(env.ClaimUID, devices)
}

func (s *claimSpec) Revert(_ context.Context, env *Env) error {
	return env.Specs.RemoveClaim(env.ClaimUID)
}

package steps

import (
	"context"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metadata"
)

const ClaimSpecKind = "claim-spec"

// ClaimSpec is the step that writes the claim's CDI spec, and the metadata files that the spec
// mounts.
type ClaimSpec struct {
	// Devices are the CDI devices. They are not recorded, because their device nodes may have other
	// numbers when the record is read.
	Devices []specs.Device `json:"-"`
	// Clients lists the devices that are shared through MPS, each with the MPS daemon to which its
	// containers connect.
	Clients []MPSClient `json:"clients,omitempty"`
	// Metadata describes the devices to the claim's containers. It is nil for a claim that was
	// prepared without it.
	Metadata *Metadata `json:"metadata,omitempty"`
}

// Metadata has what the metadata files of a claim say.
type Metadata struct {
	// PodClaimName is that of [metadata.Claim].
	PodClaimName string `json:"podClaimName,omitempty"`
	// Claim and Requests are not recorded. They are empty in a step from a record, which then leaves
	// the files as they are.
	Claim    metadata.Claim     `json:"-"`
	Requests []metadata.Request `json:"-"`
}

var _ Step = &ClaimSpec{}

// NeedsHardware implements [Step].
func (*ClaimSpec) NeedsHardware() bool { return false }

func (s *ClaimSpec) Kind() string { return ClaimSpecKind }

func (s *ClaimSpec) Apply(_ context.Context, env *Env) error {
	if s.Metadata != nil {
		if err := env.Specs.WriteMetadata(s.Metadata.Claim, s.Metadata.Requests); err != nil {
			return err
		}
	}
	return env.Specs.WriteClaim(env.ClaimUID, s.Devices)
}

func (s *ClaimSpec) Revert(_ context.Context, env *Env) error {
	return env.Specs.RemoveClaim(env.ClaimUID)
}

// MPSClient makes the containers that use some of the claim's devices clients of an MPS daemon.
type MPSClient struct {
	Daemon string `json:"daemon"`
	// Devices are the devices that the daemon serves for the claim, as indexes into the record's
	// Devices.
	Devices []int `json:"devices"`
	// Memory limits the GPU memory of each process in such a container, in MiB. Zero means no limit.
	Memory uint64 `json:"memory,omitempty"`
	// Threads limits the part of the GPU's threads that each process in such a container can use, in
	// percent. Zero means no limit.
	Threads int `json:"threads,omitempty"`
	// Whole is the UUID of the GPU on which all processes of a container together get no more than
	// Memory. It is empty if the limit applies only to each process by itself.
	Whole string `json:"whole,omitempty"`
}

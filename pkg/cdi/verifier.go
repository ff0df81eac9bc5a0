package cdi

import (
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/coalesce"
)

// Verifier runs [Verify] for concurrent callers. The edits of a container name dozens of files, so
// concurrent calls with the same edits share one check. A call never uses the result of a check
// that began before the call.
type Verifier struct {
	Visible Mapper

	checks coalesce.Group[editsIdentity]
}

// Verify returns the result of the function [Verify] for the edits.
func (v *Verifier) Verify(edits specs.ContainerEdits) error {
	return v.checks.Do(identityOf(edits), func() error { return Verify(edits, v.Visible) })
}

// editsIdentity identifies edits by their memory addresses, which is faster than a comparison. All
// calls between two scans get the same edits, and nothing changes them.
type editsIdentity struct {
	env    *string
	nodes  **specs.DeviceNode
	nets   **specs.LinuxNetDevice
	hooks  **specs.Hook
	mounts **specs.Mount
	rdt    *specs.IntelRdt
	gids   *uint32
	counts [6]int
}

func identityOf(e specs.ContainerEdits) editsIdentity {
	return editsIdentity{
		first(e.Env), first(e.DeviceNodes), first(e.NetDevices), first(e.Hooks), first(e.Mounts), e.IntelRdt, first(e.AdditionalGIDs),
		[...]int{len(e.Env), len(e.DeviceNodes), len(e.NetDevices), len(e.Hooks), len(e.Mounts), len(e.AdditionalGIDs)},
	}
}

func first[T any](of []T) *T {
	if len(of) == 0 {
		return nil
	}
	return &of[0]
}

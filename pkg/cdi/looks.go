package cdi

import (
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/joint"
)

// Verifier is [Verify] for many calls: those who ask of the same edits at the same time share a look, which began after each of them had asked. What every
// container needs is dozens of files.
type Verifier struct {
	Visible Mapper

	looks joint.Work[identity]
}

// Verify is [Verify].
func (v *Verifier) Verify(edits specs.ContainerEdits) error {
	return v.looks.Do(identityOf(edits), func() error { return Verify(edits, v.Visible) })
}

// identity is that of edits in memory. Nobody changes any: what a look at the hardware has found is given to every call until the next look.
type identity struct {
	env    *string
	nodes  **specs.DeviceNode
	nets   **specs.LinuxNetDevice
	hooks  **specs.Hook
	mounts **specs.Mount
	rdt    *specs.IntelRdt
	gids   *uint32
	counts [6]int
}

func identityOf(e specs.ContainerEdits) identity {
	return identity{
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

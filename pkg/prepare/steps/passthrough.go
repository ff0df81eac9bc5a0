package steps

import (
	"context"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/vfio"
)

const PassthroughKind = "passthrough"

// Passthrough is the step that binds a GPU, with the other functions of its IOMMU group, to a VFIO
// driver for virtual machines. The record has the drivers and overrides that the functions had
// before the first of them is changed, so Revert knows what Apply may have changed.
type Passthrough struct {
	GPU  string      `json:"gpu"`
	Card device.Card `json:"card"`
	// PreferIOMMUFD and APIDevice are what the claim's configuration asks for. They do not change how
	// the GPU is bound.
	PreferIOMMUFD bool `json:"preferIOMMUFD,omitempty"`
	APIDevice     bool `json:"apiDevice,omitempty"`
	// ByAdmin means that an admin bound the GPU to VFIO. The step then changes nothing.
	ByAdmin bool `json:"byAdmin,omitempty"`
	// Found is how the functions were bound before. It is nil while the step has changed nothing.
	Found *vfio.Found `json:"found,omitempty"`
	// Access has the device nodes of the bound GPU.
	Access vfio.Access `json:"access,omitzero"`
}

var _ Step = &Passthrough{}

// NeedsHardware implements [Step].
func (s *Passthrough) NeedsHardware() bool { return !s.ByAdmin }

func (s *Passthrough) Kind() string { return PassthroughKind }

// Apply binds the GPU. If it is bound, Apply only finds its device nodes.
func (s *Passthrough) Apply(ctx context.Context, env *Env) error {
	var err error
	switch {
	case !s.ByAdmin:
		err = s.bind(ctx, env)
	case s.Access.Node == "": // the admin may have bound another GPU of the group since the scan
		_, err = env.Binder.Look(ctx, s.Card)
	}
	if err != nil {
		return s.wrapError(err)
	}
	access, err := env.Binder.Access(ctx, s.Card.PCIAddress, s.PreferIOMMUFD)
	if err != nil {
		return s.wrapError(err)
	}
	s.Access = access
	return nil
}

func (s *Passthrough) bind(ctx context.Context, env *Env) error {
	defer env.forgetCard(s.Card)
	if s.Found == nil {
		found, err := env.Binder.Look(ctx, s.Card)
		if err != nil {
			return err
		}
		s.Found = &found
		if err := env.Journal(); err != nil {
			return err
		}
	}
	return env.Binder.Bind(ctx, s.Card, *s.Found)
}

// Revert takes the GPU and its companions from VFIO, for the drivers that the kernel has now. A
// reboot has done that already.
func (s *Passthrough) Revert(ctx context.Context, env *Env) error {
	if s.Found == nil || env.EarlierBoot {
		return nil
	}
	defer env.forgetCard(s.Card)
	if err := env.Binder.Release(ctx, s.Card, *s.Found); err != nil {
		return s.wrapError(err)
	}
	s.Found, s.Access = nil, vfio.Access{}
	if err := env.Journal(); err != nil {
		klog.FromContext(ctx).Error(err, "Failed to record that a GPU was released from VFIO", "gpu", s.GPU)
	}
	return nil
}

func (s *Passthrough) wrapError(err error) error {
	if FailureCode(err) == device.FailureInUse {
		return cause.Errorf(cause.Held, "passthrough of %s: %w", s.GPU, err)
	}
	return fmt.Errorf("passthrough of %s: %w", s.GPU, err)
}

package steps

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

const MIGInstanceKind = "mig-instance"

// MIGInstance is the step that creates a GPU instance at a placement, and in it one compute
// instance of full size. The record has the intent before each call to the hardware and the result
// after it. So after a crash it is always known who created an instance:
//
//   - Before the first call the record lists the instances that exist. As long as it has no ID, an
//     instance is the claim's only if it is not in that list, is empty, and has the planned profile
//     and placement.
//   - After the first call the record has the instance's ID. Then ID, profile and placement decide
//     ([SameInstance]).
//   - The last write of the record, as Prepared, adds the UUID.
type MIGInstance struct {
	change
	// Device is the name of the allocated partition.
	Device string `json:"device"`
	// GPU is the name of the GPU on which the partition is created.
	GPU  string      `json:"gpu"`
	Card device.Card `json:"card"`
	// Minor is the minor number of the GPU's device node, as it is in the claim's CDI edits.
	Minor     int              `json:"minor"`
	ProfileID uint32           `json:"profileID"`
	Profile   string           `json:"profile"` // for readers of the record
	Placement device.Placement `json:"placement"`
	// Asked is set before the driver asks the GPU to create the instance.
	Asked bool `json:"asked,omitempty"`
	// Before lists the GPU instances that existed when Asked was set.
	Before []priorInstance `json:"before,omitempty"`
	// Instance is the created GPU instance. It is nil until the creation is known to have succeeded.
	Instance *device.Instance `json:"instance,omitempty"`
}

// priorInstance is a GPU instance that existed before the driver created its own. The ID alone does
// not identify the instance, because the GPU reuses IDs.
type priorInstance struct {
	ID        uint32           `json:"id"`
	Placement device.Placement `json:"placement"`
}

var (
	_ Sharable = &MIGInstance{}
	_ Creator  = &MIGInstance{}
)

func (s *MIGInstance) Kind() string { return MIGInstanceKind }

// Apply creates the instance. The caller must have reverted what an earlier attempt left.
func (s *MIGInstance) Apply(ctx context.Context, env *Env) error {
	state, err := env.CardState(ctx, s.Card)
	if err != nil {
		return s.wrapError(err)
	}
	defer env.forgetCard(s.Card)
	if !state.MIG.Enabled {
		if state, err = s.enableMIGMode(ctx, env); err != nil {
			return err
		}
	}
	if err := CheckDeviceNode(s.GPU, s.Minor, state.Minor); err != nil {
		return err
	}
	if taken := Overlapping(state.MIG.Instances, s.Placement); len(taken) > 0 {
		return s.PlaceTaken(taken)
	}
	s.recordBefore(state)
	if err := env.Journal(); err != nil {
		return err
	}
	created, err := env.Partitions.CreateInstance(ctx, s.Card, s.ProfileID, s.Placement)
	if err != nil {
		return s.createFailed(ctx, env, err)
	}
	s.Instance = &created
	if err := env.Journal(); err != nil {
		return err
	}
	filled, err := env.Partitions.CreateCompute(ctx, s.Card, created.ID)
	if err != nil {
		return s.wrapError(err)
	}
	if len(filled.Compute) != 1 || !SameInstance(created, filled) {
		return s.wrapError(fmt.Errorf("%s on %s does not have exactly the requested compute instance", DescribeInstances(filled), s.GPU))
	}
	// The next write of the record includes the compute instance. If the process dies before that, the
	// recorded GPU instance proves that this driver created both.
	s.Instance = &filled
	return nil
}

// recordBefore stores in the step which GPU instances exist. The caller saves the record before it
// asks the GPU to create another one.
func (s *MIGInstance) recordBefore(state device.CardState) {
	s.Asked, s.Before = true, nil
	for _, in := range state.MIG.Instances {
		s.Before = append(s.Before, priorInstance{in.ID, in.Placement})
	}
}

func (s *MIGInstance) enableMIGMode(ctx context.Context, env *Env) (device.CardState, error) {
	// Mark the GPU first. The driver may later disable MIG mode only on a marked GPU, and the mark
	// makes a claim for the whole GPU read the hardware.
	if err := env.Records.Mark(s.GPU, env.BootID); err != nil {
		return device.CardState{}, cause.Wrap(cause.Record, err)
	}
	state, err := env.Partitions.SetMode(ctx, s.Card, true)
	if err != nil {
		return state, s.wrapError(err)
	}
	if !state.MIG.Enabled {
		return state, s.wrapError(fmt.Errorf("MIG mode of %s is still disabled (pending: %v) after the driver enabled it: the GPU may need a "+
			"reset", s.GPU, state.MIG.Pending))
	}
	return state, nil
}

// createFailed returns the error to report when creating the instance failed with err. If the GPU
// refused, it first records that nothing was created. Otherwise the driver would treat an instance
// that an admin creates at this placement later as its own.
func (s *MIGInstance) createFailed(ctx context.Context, env *Env, err error) error {
	if isRefusal(err) {
		s.Asked, s.Before = false, nil
		if jerr := env.Journal(); jerr != nil {
			klog.FromContext(ctx).Error(jerr, "Failed to record that the GPU refused to create a MIG instance", "device", s.Device)
		}
		if state, lerr := env.Partitions.Look(ctx, s.Card); lerr == nil {
			if taken := Overlapping(state.MIG.Instances, s.Placement); len(taken) > 0 {
				return s.PlaceTaken(taken)
			}
		}
	}
	return s.wrapError(err)
}

// Partition implements [Creator].
func (s *MIGInstance) Partition() string { return s.Device }

// MIG implements [Creator].
func (s *MIGInstance) MIG() *MIGInstance { return s }

// Load implements [Creator]. The claim's record has the whole state of the step.
func (*MIGInstance) Load(*checkpoint.Store, string) error { return nil }

// Recreate implements [Creator].
func (s *MIGInstance) Recreate(ctx context.Context, env *Env, ready func(*MIGInstance) error) error {
	if err := s.Revert(ctx, env); err != nil {
		return err
	}
	if err := ready(s); err != nil {
		return err
	}
	return s.Apply(ctx, env)
}

// Revert removes the instance that this step created, and no other.
func (s *MIGInstance) Revert(ctx context.Context, env *Env) error {
	if env.EarlierBoot || s.Instance == nil && !s.Asked {
		return nil
	}
	defer env.forgetCard(s.Card)
	if err := s.remove(ctx, env); err != nil && !env.isInstanceGone(ctx, s, err) {
		return s.wrapError(err)
	}
	s.Instance, s.Asked, s.Before = nil, false, nil
	if err := env.Journal(); err != nil {
		klog.FromContext(ctx).Error(err, "Failed to record that a MIG instance was removed", "device", s.Device)
	}
	return nil
}

func (s *MIGInstance) remove(ctx context.Context, env *Env) error {
	if s.Instance != nil {
		return env.Partitions.Destroy(ctx, s.Card, *s.Instance)
	}
	state, err := env.Partitions.Look(ctx, s.Card)
	if err != nil {
		return err
	}
	for _, in := range state.MIG.Instances {
		if s.mayHaveCreated(in) {
			return env.Partitions.Destroy(ctx, s.Card, in)
		}
	}
	return nil
}

// mayHaveCreated reports whether the instance in may come from an interrupted creation by this
// step. It must have exactly the planned profile and placement, and must not have existed before.
// It must have no compute instance, because the step creates that only after the GPU instance is in
// the record.
func (s *MIGInstance) mayHaveCreated(in device.Instance) bool {
	if s.Instance != nil || !s.Asked || in.ProfileID != s.ProfileID || in.Placement != s.Placement || len(in.Compute) > 0 {
		return false
	}
	for _, b := range s.Before {
		if b.ID == in.ID && b.Placement == in.Placement {
			return false
		}
	}
	return true
}

// FindIntact looks for the step's GPU instance in instances. It finds the instance only if its
// compute instance is still the one that the step created.
func (s *MIGInstance) FindIntact(instances []device.Instance) (device.Instance, bool) {
	if s.Instance == nil || len(s.Instance.Compute) == 0 {
		return device.Instance{}, false
	}
	for _, in := range instances {
		if SameInstance(*s.Instance, in) && slices.EqualFunc(s.Instance.Compute, in.Compute, SameCompute) {
			return in, true
		}
	}
	return device.Instance{}, false
}

// maintain returns an error if the shared GPU instance no longer exists. It does not recreate the
// instance, because Reconcile does that for the claims that share it.
func (s *MIGInstance) maintain(ctx context.Context, env *Env) error {
	state, err := env.CardState(ctx, s.Card)
	if err != nil {
		return s.wrapError(err)
	}
	if _, ok := s.FindIntact(state.MIG.Instances); ok {
		return nil
	}
	return cause.Errorf(cause.NotReady,
		"shared device %s is gone: the kubelet retries, and the driver recreates the device within seconds: its GPU now has: %s",
		s.Device, DescribeInstances(state.MIG.Instances...))
}

func (s *MIGInstance) describe() string { return fmt.Sprintf("device %s (%s)", s.Device, s.Profile) }

// assumeDefaults makes Revert remove nothing. It is called if the file of the shared instance is
// unreadable, so that nothing proves that this driver created the instance at the placement.
func (s *MIGInstance) assumeDefaults() { s.Instance, s.Asked, s.Before = nil, false, nil }

// reset does nothing, because nothing proves that this driver created the instance.
func (*MIGInstance) reset(context.Context, *Env, string) error { return nil }

// Owns reports whether this step created the instance in, or may have created it before it was
// interrupted.
func (s *MIGInstance) Owns(in device.Instance) bool {
	if s.Instance != nil {
		return SameInstance(*s.Instance, in)
	}
	return s.mayHaveCreated(in)
}

func (s *MIGInstance) wrapError(err error) error {
	return fmt.Errorf("device %s (%s): %w", s.Device, s.Profile, err)
}

func (s *MIGInstance) PlaceTaken(by []device.Instance) error {
	return cause.Errorf(cause.Device, "device %s: its placement on %s is taken by %s, which no claim of this driver created there: "+
		"remove it (nvidia-smi mig), or delete the claim's Pods to have it allocated elsewhere",
		s.Device, s.GPU, DescribeInstances(by...))
}

// isInstanceGone reports whether err, from an attempt to remove the MIG instance that s created,
// means that this instance no longer exists. Another instance may have replaced it.
func (e *Env) isInstanceGone(ctx context.Context, s *MIGInstance, err error) bool {
	gone := FailureCode(err) == device.FailureChanged || e.isCardGone(s.Card, err)
	if gone {
		klog.FromContext(ctx).Info("MIG instance to be removed for an unprepared claim is already gone",
			"device", s.Device, "gpu", s.GPU, "reason", err.Error())
	}
	return gone
}

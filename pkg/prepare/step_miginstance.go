package prepare

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const migInstanceKind = "mig-instance"

// migInstance cuts one GPU instance at its place, with one compute instance that fills it. The record says before each call what is about to be done and
// after it what came of it, so that a call that was killed leaves nothing that nobody knows, and nothing of anyone else is taken for ours.
type migInstance struct {
	// Device is the allocated device, GPU the card's name as a whole GPU.
	Device string      `json:"device"`
	GPU    string      `json:"gpu"`
	Card   device.Card `json:"card"`
	// Minor is that of the card's device node, as in the claim's edits.
	Minor     int              `json:"minor"`
	ProfileID uint32           `json:"profileID"`
	Profile   string           `json:"profile"` // for people
	Placement device.Placement `json:"placement"`
	// Asked says that the hardware may have been asked to make the instance; Before is what there was until then.
	Asked  bool       `json:"asked,omitempty"`
	Before []occupied `json:"before,omitempty"`
	// Instance is what was made, as far as that is known.
	Instance *device.Instance `json:"instance,omitempty"`
}

// occupied is a GPU instance that was there before ours. Its ID alone says little: IDs are used again.
type occupied struct {
	ID        uint32           `json:"id"`
	Placement device.Placement `json:"placement"`
}

var _ sharable = &migInstance{}

func (s *migInstance) Kind() string { return migInstanceKind }

// Apply expects that none of its instance is there: what an earlier try left is reverted first. A step that is asked already is on record as it is.
func (s *migInstance) Apply(ctx context.Context, env *Env) error {
	state, err := env.Looks.at(ctx, s.Card)
	if err != nil {
		return s.failed(err)
	}
	defer env.Looks.forget(s.Card)
	if !state.MIG.Enabled {
		if state, err = s.turnOn(ctx, env); err != nil {
			return err
		}
	}
	if err := sameNode(s.GPU, s.Minor, state.Minor); err != nil {
		return err
	}
	if taken := overlapping(state.MIG.Instances, s.Placement); len(taken) > 0 {
		return s.taken(taken)
	}
	if !s.Asked {
		s.expect(state)
		if err := env.Journal(); err != nil {
			return err
		}
	}
	made, err := env.Partitions.CreateInstance(ctx, s.Card, s.ProfileID, s.Placement)
	if err != nil {
		return s.notMade(ctx, env, err)
	}
	s.Instance = &made
	if err := env.Journal(); err != nil {
		return err
	}
	filled, err := env.Partitions.CreateCompute(ctx, s.Card, made.ID)
	if err != nil {
		return s.failed(err)
	}
	if len(filled.Compute) != 1 || !matches(made, filled) {
		return s.failed(fmt.Errorf("%s on %s has not the one compute instance that was asked for", describe(filled), s.GPU))
	}
	// The record follows with what is written next. Until then it has the instance, which is proof enough.
	s.Instance = &filled
	return nil
}

// expect is on record before the hardware is asked.
func (s *migInstance) expect(state device.CutState) {
	s.Asked, s.Before = true, nil
	for _, in := range state.MIG.Instances {
		s.Before = append(s.Before, occupied{in.ID, in.Placement})
	}
}

func (s *migInstance) turnOn(ctx context.Context, env *Env) (device.CutState, error) {
	// Before the mode is on: it is ours to turn off, and whoever wants the GPU whole must know of
	// it.
	if err := env.Records.Mark(s.GPU, env.BootID); err != nil {
		return device.CutState{}, because(CauseRecord, "%w", err)
	}
	state, err := env.Partitions.SetMode(ctx, s.Card, true)
	if err != nil {
		return state, s.failed(err)
	}
	if !state.MIG.Enabled {
		return state, s.failed(fmt.Errorf("MIG mode of %s is still off (pending: %v) after it was turned on: the GPU may need a reset", s.GPU, state.MIG.Pending))
	}
	return state, nil
}

// notMade notes that the hardware refused, so that nothing that appears at the place later is taken for ours.
func (s *migInstance) notMade(ctx context.Context, env *Env, err error) error {
	if refused(err) {
		s.Asked, s.Before = false, nil
		if jerr := env.Journal(); jerr != nil {
			klog.FromContext(ctx).Error(jerr, "Could not note that an instance was refused", "device", s.Device)
		}
		if state, lerr := env.Partitions.Look(ctx, s.Card); lerr == nil {
			if taken := overlapping(state.MIG.Instances, s.Placement); len(taken) > 0 {
				return s.taken(taken)
			}
		}
	}
	return s.failed(err)
}

// Revert removes the instance, and only that.
func (s *migInstance) Revert(ctx context.Context, env *Env) error {
	if env.Forgotten || s.Instance == nil && !s.Asked {
		return nil
	}
	defer env.Looks.forget(s.Card)
	if err := s.remove(ctx, env); err != nil && !env.isGone(ctx, s, err) {
		return s.failed(err)
	}
	s.Instance, s.Asked, s.Before = nil, false, nil
	if err := env.Journal(); err != nil {
		klog.FromContext(ctx).Error(err, "Could not note that an instance is removed", "device", s.Device)
	}
	return nil
}

func (s *migInstance) remove(ctx context.Context, env *Env) error {
	if s.Instance != nil {
		return env.Partitions.Destroy(ctx, s.Card, *s.Instance)
	}
	state, err := env.Partitions.Look(ctx, s.Card)
	if err != nil {
		return err
	}
	for _, in := range state.MIG.Instances {
		if s.mayHaveMade(in) {
			return env.Partitions.Destroy(ctx, s.Card, in)
		}
	}
	return nil
}

// mayHaveMade says whether an instance is the one whose making was cut short: it is exactly at the place, was not there before, and has no compute
// instance, because that is asked for only after the instance is on record.
func (s *migInstance) mayHaveMade(in device.Instance) bool {
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

// intact finds the instance among those that are there, with the compute instance that was made in it.
func (s *migInstance) intact(instances []device.Instance) (device.Instance, bool) {
	if s.Instance == nil || len(s.Instance.Compute) == 0 {
		return device.Instance{}, false
	}
	for _, in := range instances {
		if matches(*s.Instance, in) && slices.EqualFunc(s.Instance.Compute, in.Compute, sameCompute) {
			return in, true
		}
	}
	return device.Instance{}, false
}

// keep refuses who would join those who share an instance that is gone. It is theirs to make it again, or to lose it.
func (s *migInstance) keep(ctx context.Context, env *Env) error {
	state, err := env.Looks.at(ctx, s.Card)
	if err != nil {
		return s.failed(err)
	}
	if _, ok := s.intact(state.MIG.Instances); ok {
		return nil
	}
	return because(CauseNotReady, "device %s is gone, which other claims share: it can be shared again when it has been made again for them, within seconds; at its GPU there are now: %s",
		s.Device, describe(state.MIG.Instances...))
}

func (s *migInstance) wanted() string { return fmt.Sprintf("device %s (%s)", s.Device, s.Profile) }

// unknown leaves nothing to revert: nothing proves any more that what is at the place is ours.
func (s *migInstance) unknown() { s.Instance, s.Asked, s.Before = nil, false, nil }

// explains says whether an instance that is there is this step's.
func (s *migInstance) explains(in device.Instance) bool {
	if s.Instance != nil {
		return matches(*s.Instance, in)
	}
	return s.mayHaveMade(in)
}

func (s *migInstance) failed(err error) error {
	return fmt.Errorf("device %s (%s): %w", s.Device, s.Profile, err)
}

func (s *migInstance) taken(by []device.Instance) error {
	return because(CauseDevice, "device %s: its place on %s is taken by %s, which no claim of this driver has made there: remove it (nvidia-smi mig), or delete the claim's Pods to have it allocated elsewhere",
		s.Device, s.GPU, describe(by...))
}

package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// Partitions is the hardware, as far as GPUs are cut and set. Package nvidia has it, and the meaning of each call. Any of them may take long, and ends with its
// context; an error says by a method CutCode why, and after one that is no refusal of the hardware the call may have had its effect.
type Partitions interface {
	Look(ctx context.Context, card device.Card) (device.CutState, error)
	SetMode(ctx context.Context, card device.Card, on bool) (device.CutState, error)
	CreateInstance(ctx context.Context, card device.Card, profileID uint32, at device.Placement) (device.Instance, error)
	CreateCompute(ctx context.Context, card device.Card, instanceID uint32) (device.Instance, error)
	Destroy(ctx context.Context, card device.Card, in device.Instance) error
	Settings
}

// uncut is the hardware of a Preparer that was given none.
type uncut struct{}

var errUncut = errors.New("this instance of the plugin hands out whole GPUs only, and as they are")

func (uncut) Look(context.Context, device.Card) (device.CutState, error) {
	return device.CutState{}, errUncut
}

func (uncut) SetMode(context.Context, device.Card, bool) (device.CutState, error) {
	return device.CutState{}, errUncut
}

func (uncut) CreateInstance(context.Context, device.Card, uint32, device.Placement) (device.Instance, error) {
	return device.Instance{}, errUncut
}

func (uncut) CreateCompute(context.Context, device.Card, uint32) (device.Instance, error) {
	return device.Instance{}, errUncut
}

func (uncut) Destroy(context.Context, device.Card, device.Instance) error { return errUncut }

func (uncut) SetComputeMode(context.Context, device.Card, device.ComputeMode) error { return errUncut }

func (uncut) TimeSlice(context.Context, device.Card) (device.TimeSlice, error) { return 0, errUncut }

func (uncut) SetTimeSlice(context.Context, device.Card, device.TimeSlice) error { return errUncut }

const (
	// callTime is how long a call may work on the hardware if the kubelet sets no limit of its own.
	callTime = 40 * time.Second
	// answerTime is kept of the kubelet's limit, so that what went wrong can still be said.
	answerTime = 2 * time.Second
	// undoTime is kept besides for what a failed Prepare has to undo, and bounds that.
	undoTime = 8 * time.Second
	// destroyTime bounds how long one call waits for instances that are still in use: other claims on the GPU wait with it.
	destroyTime = 20 * time.Second
	// roundTime bounds how long what comes round again keeps a GPU from claims to remove instances that may be in use: the next round is soon.
	roundTime = 5 * time.Second
)

// within bounds work on the hardware: by most, and so that reserve is left of the caller's own time.
func within(ctx context.Context, most, reserve time.Duration) (context.Context, context.CancelFunc) {
	if deadline, ok := ctx.Deadline(); ok {
		most = min(most, time.Until(deadline)-reserve)
	}
	return context.WithTimeoutCause(ctx, most, fmt.Errorf("it was not done within %s", most.Round(time.Second)))
}

// refused says whether the hardware was not able to do what it was asked, because of what it found: then the call had no effect. Of other errors nobody
// knows.
func refused(err error) bool {
	switch cutCode(err) {
	case device.CutInsufficient, device.CutNotFound, device.CutReplaced, device.CutNoDriver:
		return true
	}
	return false
}

// cutError is an error of the hardware.
type cutError interface {
	error
	CutCode() device.CutCode
}

func cutCode(err error) device.CutCode {
	var cut cutError
	if errors.As(err, &cut) {
		return cut.CutCode()
	}
	return device.CutOther
}

// sameNode makes sure that a GPU's device node is the one that containers will be given. A change of the MIG mode may number the nodes anew.
func sameNode(gpu string, known, now int) error {
	if known == now {
		return nil
	}
	return because(CauseNotReady, "the device node of %s was /dev/nvidia%d and is /dev/nvidia%d now: the inventory sees that within seconds", gpu, known, now)
}

// matches says whether an instance that is there is the known one. IDs are used again, and MIG UUIDs follow from them: one that someone has made anew with
// the same profile, place and ID cannot be told from ours. A side without compute instances is half made or half removed, and proves no more than its IDs.
func matches(known, there device.Instance) bool {
	if known.ID != there.ID || known.ProfileID != there.ProfileID || known.Placement != there.Placement {
		return false
	}
	return len(known.Compute) == 0 || len(there.Compute) == 0 || slices.EqualFunc(known.Compute, there.Compute, sameCompute)
}

func sameCompute(a, b device.ComputeInstance) bool { return a.ID == b.ID && a.UUID == b.UUID }

// listed finds the instance in the state of the inventory, which may be older than the hardware's.
func listed(s inventory.Snapshot, gpu string, in device.Instance) (device.Instance, bool) {
	for _, g := range s.Node.GPUs {
		if g.WholeName() != gpu || g.MIG == nil {
			continue
		}
		for _, there := range g.MIG.Instances {
			if matches(in, there) && slices.EqualFunc(in.Compute, there.Compute, sameCompute) {
				return there, true
			}
		}
	}
	return device.Instance{}, false
}

// overlapping are the instances at a place, in whole or in part.
func overlapping(instances []device.Instance, at device.Placement) []device.Instance {
	var there []device.Instance
	for _, in := range instances {
		if in.Placement.Overlaps(at) {
			there = append(there, in)
		}
	}
	return there
}

// describe names instances as nvidia-smi mig -lgi and -lci list them.
func describe(instances ...device.Instance) string {
	texts := make([]string, len(instances))
	for i, in := range instances {
		texts[i] = fmt.Sprintf("GPU instance %d (profile %d, placement %d:%d", in.ID, in.ProfileID, in.Placement.Start, in.Placement.Size)
		for _, c := range in.Compute {
			texts[i] += ", " + c.UUID
		}
		texts[i] += ")"
	}
	return strings.Join(texts, ", ")
}

// hasGone says whether the card has forgotten what was done to it, or is another one.
func (e *Env) hasGone(card device.Card, err error) bool {
	switch cutCode(err) {
	case device.CutReplaced, device.CutNoDriver:
		return true
	case device.CutNotFound, device.CutLost:
		// A card that fell off the bus answers so until the node is started again, and forgets then.
		return !e.Present(card)
	}
	return false
}

// isGone says whether an instance that could not be removed is not there, or not ours any more.
func (e *Env) isGone(ctx context.Context, s *migInstance, err error) bool {
	gone := cutCode(err) == device.CutChanged || e.hasGone(s.Card, err)
	if gone {
		klog.FromContext(ctx).Info("The instance of a device that is given back is gone already", "device", s.Device, "gpu", s.GPU, "reason", err.Error())
	}
	return gone
}

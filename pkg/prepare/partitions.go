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

// Partitions reads and changes the partitions and settings of GPUs. Package nvidia implements it
// and documents each call. A call may take long, and ends with its context. If a call fails, the
// hardware may still have been changed, unless isRefusal is true for the error.
type Partitions interface {
	Look(ctx context.Context, card device.Card) (device.CardState, error)
	SetMode(ctx context.Context, card device.Card, on bool) (device.CardState, error)
	CreateInstance(ctx context.Context, card device.Card, profileID uint32, at device.Placement) (device.Instance, error)
	CreateCompute(ctx context.Context, card device.Card, instanceID uint32) (device.Instance, error)
	Destroy(ctx context.Context, card device.Card, in device.Instance) error
	Settings
}

// noPartitions implements Partitions for a Preparer that was created without it. Every call fails.
type noPartitions struct{}

var errNoPartitions = errors.New("this node offers whole GPUs only: partitions and sharing are switched off")

func (noPartitions) Look(context.Context, device.Card) (device.CardState, error) {
	return device.CardState{}, errNoPartitions
}

func (noPartitions) SetMode(context.Context, device.Card, bool) (device.CardState, error) {
	return device.CardState{}, errNoPartitions
}

func (noPartitions) CreateInstance(context.Context, device.Card, uint32, device.Placement) (device.Instance, error) {
	return device.Instance{}, errNoPartitions
}

func (noPartitions) CreateCompute(context.Context, device.Card, uint32) (device.Instance, error) {
	return device.Instance{}, errNoPartitions
}

func (noPartitions) Destroy(context.Context, device.Card, device.Instance) error {
	return errNoPartitions
}

func (noPartitions) SetComputeMode(context.Context, device.Card, device.ComputeMode) error {
	return errNoPartitions
}

func (noPartitions) TimeSlice(context.Context, device.Card) (device.TimeSlice, error) {
	return 0, errNoPartitions
}

func (noPartitions) SetTimeSlice(context.Context, device.Card, device.TimeSlice) error {
	return errNoPartitions
}

const (
	// callTime limits the time that Prepare works on the hardware, however long the kubelet waits.
	callTime = 40 * time.Second
	// answerTime is the part of the kubelet's timeout that is left to report an error.
	answerTime = 2 * time.Second
	// undoTime is the part of the kubelet's timeout that is kept free to undo a failed Prepare.
	undoTime = 8 * time.Second
	// destroyTime is the longest time that one call waits until no process uses the MIG instances that
	// it must remove. Other claims on the GPU wait too.
	destroyTime = 20 * time.Second
	// periodicTime limits how long Reconcile and other periodic work keep a GPU locked to remove MIG
	// instances or stop daemons that may be in use. The next pass retries soon.
	periodicTime = 5 * time.Second
)

// withTimeout returns a context for work on the hardware. It ends after the duration "most", or
// earlier if the caller's deadline minus "reserve" comes first.
func withTimeout(ctx context.Context, most, reserve time.Duration) (context.Context, context.CancelFunc) {
	if deadline, ok := ctx.Deadline(); ok {
		most = min(most, time.Until(deadline)-reserve)
	}
	return context.WithTimeoutCause(ctx, most, fmt.Errorf("not done within %s", most.Round(time.Second)))
}

// isRefusal reports whether err means that the hardware refused the call and changed nothing. After
// any other error it is unknown whether the hardware was changed.
func isRefusal(err error) bool {
	switch failureCode(err) {
	case device.FailureInsufficient, device.FailureNotFound, device.FailureReplaced, device.FailureNoDriver:
		return true
	}
	return false
}

// hardwareError is an error that a call to the hardware returned.
type hardwareError interface {
	error
	FailureCode() device.FailureCode
}

func failureCode(err error) device.FailureCode {
	var failed hardwareError
	if errors.As(err, &failed) {
		return failed.FailureCode()
	}
	return device.FailureOther
}

// checkDeviceNode returns an error if the GPU's device node changed: known is its minor number in
// the inventory, now the number that the hardware has. Changing the MIG mode may renumber the
// device nodes.
func checkDeviceNode(gpu string, known, now int) error {
	if known == now {
		return nil
	}
	return withCause(CauseNotReady,
		"the device node of %s changed from /dev/nvidia%d to /dev/nvidia%d: the inventory notices within seconds, and the kubelet retries",
		gpu, known, now)
}

// sameInstance reports whether known and there are the same GPU instance. The GPU reuses IDs, and
// MIG UUIDs are computed from the IDs, so a recreated instance may look the same. If one of the two
// has no compute instance, it is half created or half removed, so only ID, profile and placement
// are compared.
func sameInstance(known, there device.Instance) bool {
	if known.ID != there.ID || known.ProfileID != there.ProfileID || known.Placement != there.Placement {
		return false
	}
	return len(known.Compute) == 0 || len(there.Compute) == 0 || slices.EqualFunc(known.Compute, there.Compute, sameCompute)
}

func sameCompute(a, b device.ComputeInstance) bool { return a.ID == b.ID && a.UUID == b.UUID }

// inInventory looks for the instance in the GPU's inventory, which may be out of date. It returns
// false if the inventory does not have the instance.
func inInventory(s inventory.Snapshot, gpu string, in device.Instance) (device.Instance, bool) {
	for _, g := range s.Node.GPUs {
		if g.WholeName() != gpu || g.MIG == nil {
			continue
		}
		for _, there := range g.MIG.Instances {
			if sameInstance(in, there) && slices.EqualFunc(in.Compute, there.Compute, sameCompute) {
				return there, true
			}
		}
	}
	return device.Instance{}, false
}

// overlapping returns the instances whose placement overlaps with the parameter "at".
func overlapping(instances []device.Instance, at device.Placement) []device.Instance {
	var there []device.Instance
	for _, in := range instances {
		if in.Placement.Overlaps(at) {
			there = append(there, in)
		}
	}
	return there
}

// describeInstances formats instances for messages, with the IDs and placements that nvidia-smi mig
// -lgi shows.
func describeInstances(instances ...device.Instance) string {
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

// isCardGone reports whether err, which a call to the card returned, means that the card was
// replaced or has lost its state.
func (e *Env) isCardGone(card device.Card, err error) bool {
	switch failureCode(err) {
	case device.FailureReplaced, device.FailureNoDriver:
		return true
	case device.FailureNotFound, device.FailureLost:
		// A card that fell off the bus gives these errors until the node reboots. The reboot clears the
		// card's state.
		return !e.Present(card)
	}
	return false
}

// isInstanceGone reports whether err, from an attempt to remove the MIG instance that s created,
// means that this instance no longer exists. Another instance may have replaced it.
func (e *Env) isInstanceGone(ctx context.Context, s *migInstance, err error) bool {
	gone := failureCode(err) == device.FailureChanged || e.isCardGone(s.Card, err)
	if gone {
		klog.FromContext(ctx).Info("MIG instance to be removed for an unprepared claim is already gone",
			"device", s.Device, "gpu", s.GPU, "reason", err.Error())
	}
	return gone
}

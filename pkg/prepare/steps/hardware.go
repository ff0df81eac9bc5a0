package steps

import (
	"context"
	"errors"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metadata"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/vfio"
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
	// SetComputeMode sets the compute mode. It changes nothing if the GPU already has this mode.
	SetComputeMode(ctx context.Context, card device.Card, mode device.ComputeMode) error
	TimeSlice(ctx context.Context, card device.Card) (device.TimeSlice, error)
	SetTimeSlice(ctx context.Context, card device.Card, slice device.TimeSlice) error
}

// Binder binds GPUs to VFIO for virtual machines, and releases them. Package nvidia/bind implements
// it and documents each call. A call may take long, and ends with its context. If a call fails, the
// GPU may still be bound or released.
type Binder interface {
	Look(ctx context.Context, card device.Card) (vfio.Found, error)
	Bind(ctx context.Context, card device.Card, found vfio.Found) error
	Release(ctx context.Context, card device.Card, found vfio.Found) error
	// Access returns the device nodes of a bound GPU as soon as they exist.
	Access(ctx context.Context, card device.PCIAddress, preferIOMMUFD bool) (vfio.Access, error)
}

// isRefusal reports whether err means that the hardware refused the call and changed nothing. After
// any other error it is unknown whether the hardware was changed.
func isRefusal(err error) bool {
	switch FailureCode(err) {
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

// FailureCode returns the code of the failed call to the hardware in err.
func FailureCode(err error) device.FailureCode {
	var failed hardwareError
	if errors.As(err, &failed) {
		return failed.FailureCode()
	}
	return device.FailureOther
}

// Daemons starts and stops MPS control daemons. [mps.Client] implements it with the MPS supervisor.
// If the supervisor does not run, Stop returns nil only if the daemon is certainly gone.
type Daemons interface {
	// Start returns when the daemon is ready. If the daemon already runs as requested, Start does not
	// disturb it.
	Start(ctx context.Context, d mps.Daemon) error
	// Stop returns when no process of the daemon is left. It succeeds if the daemon does not exist.
	Stop(ctx context.Context, id string) error
	// List returns the running daemons. If the supervisor does not run, the error is an
	// [*mps.NotRunningError].
	List(ctx context.Context) ([]mps.Status, error)
}

// daemonTime limits the start or stop of a daemon. Either takes milliseconds unless the GPU hangs.
const daemonTime = 20 * time.Second

// Specs stores the CDI specs that the container runtime reads.
type Specs interface {
	// EnsureBase writes the node-wide spec, unless there is one that containers can use.
	EnsureBase(edits specs.ContainerEdits, usable func(specs.ContainerEdits) error) error
	WriteClaim(uid types.UID, devices []specs.Device) error
	// WriteMetadata writes the files that describe the requests' devices to the claim's containers.
	WriteMetadata(c metadata.Claim, requests []metadata.Request) error
	RemoveClaim(uid types.UID) error
	Claims() ([]types.UID, error)
}

// Hardware returns the inventory of the node's GPUs. Its implementation must not access a GPU.
type Hardware interface {
	Snapshot() inventory.Snapshot
}

// mayBePresent reports whether the card may still be in the node. It does not use Snapshot.Ready: a
// node without cards is never ready, and a failed scan keeps the last result.
func mayBePresent(s inventory.Snapshot, card device.Card) bool {
	for _, g := range s.Node.GPUs {
		if g.Card() == card {
			return true
		}
	}
	return !s.Known
}

// isCardGone reports whether err, which a call to the card returned, means that the card was
// replaced or has lost its state.
func (e *Env) isCardGone(card device.Card, err error) bool {
	switch FailureCode(err) {
	case device.FailureReplaced, device.FailureNoDriver:
		return true
	case device.FailureNotFound, device.FailureLost:
		// A card that fell off the bus gives these errors until the node reboots. The reboot clears the
		// card's state.
		return !mayBePresent(e.Hardware.Snapshot(), card)
	}
	return false
}

// NotReady returns the error for a claim when the inventory is not ready. It includes the
// inventory's reason.
func NotReady(s inventory.Snapshot) error {
	reason := s.Reason
	if reason == "" {
		reason = "the node's devices are not known yet"
	}
	return cause.Errorf(cause.NotReady, "the node is not ready: %s", reason)
}

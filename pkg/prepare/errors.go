package prepare

import (
	"fmt"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
)

// InUseError refuses a device because another claim uses this device, or a device that cannot exist
// together with it.
type InUseError struct {
	Request string
	Device  string
	// Conflict is the device that the other claim uses. It is Device itself, or a device that cannot
	// exist together with Device. It is empty if the other claim's record cannot be read.
	Conflict string
	// Holder is the other claim. Its namespace and name are empty if its record cannot be read.
	Holder checkpoint.HolderClaim
	// Leaving means that the other claim is being unprepared.
	Leaving bool
	// SharedDifferently means that one of the two claims has shares of the device with limited memory,
	// and the other has shares without limits.
	SharedDifferently bool
	// Unreadable is why the other claim's record cannot be read.
	Unreadable error
}

// blockers returns the other claim, for which Prepare waits. It returns none if waiting cannot
// help: the other claim's record is unreadable, or the two claims share the device in different
// ways.
func (e *InUseError) blockers() []checkpoint.HolderClaim {
	if e.SharedDifferently || e.Unreadable != nil {
		return nil
	}
	return []checkpoint.HolderClaim{e.Holder}
}

func (e *InUseError) Error() string {
	claim := "claim " + e.Holder.String()
	if e.Holder.Name == "" {
		claim = "the claim with UID " + string(e.Holder.UID) + ", whose record cannot be read"
		if e.Unreadable != nil {
			claim += " (" + e.Unreadable.Error() + ")"
		}
	}
	problem := "device " + e.Device + " is in use"
	if e.SharedDifferently {
		problem = "device " + e.Device + " cannot have fractions and plain shares at the same time, and is in use"
	}
	if e.Conflict != "" && e.Conflict != e.Device {
		problem = "device " + e.Device + " cannot exist together with " + e.Conflict + ", which is in use"
	}
	wayOut := "wait until the last Pod of that claim has ended on this node"
	if e.Leaving {
		wayOut = "that claim is being unprepared, which ends when no process uses its partitions"
	}
	return fmt.Sprintf("request %s: %s by %s: %s", e.Request, problem, claim, wayOut)
}

// LostError reports that a device of a prepared claim no longer exists. The driver has removed the
// claim's CDI spec, so that no container gets another device instead.
type LostError struct {
	// Claim is the claim's namespace and name.
	Claim  string
	UID    types.UID
	Device string
	// Reason is why the driver cannot recreate the device.
	Reason error
}

func (e *LostError) Error() string {
	return fmt.Sprintf("claim %s: device %s is lost and its containers can no longer start (%v): delete the claim's Pods",
		e.Claim, e.Device, e.Reason)
}

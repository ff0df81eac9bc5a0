package prepare

import (
	"fmt"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

// heldError refuses a device because of other claims. A retry can succeed only after one of the
// claims in blockers was unprepared.
type heldError struct {
	error
	blockers []checkpoint.ClaimRef
}

func (e *heldError) Unwrap() error { return e.error }

const waitForPods = "wait until the last Pod of that claim has ended on this node"

// inUseError refuses device d, because it has this problem with the claim of record "other".
func inUseError(d checkpoint.Device, problem string, other checkpoint.Record) error {
	wayOut := waitForPods
	if other.State == checkpoint.Reverting {
		wayOut = "that claim is being unprepared, which ends when no process uses its partitions"
	}
	return cause.Errorf(cause.Held, "request %s: device %s %s by claim %s: %s", d.Request, d.Device, problem, other.Claim(), wayOut)
}

// inUnknownUseError refuses device d, because it has this problem with the claim with this uid,
// whose record cannot be read.
func inUnknownUseError(d checkpoint.Device, problem string, uid types.UID, unreadable error) error {
	return cause.Errorf(cause.Held, "request %s: device %s %s by the claim with UID %s, whose record cannot be read (%v): %s",
		d.Request, d.Device, problem, uid, unreadable, waitForPods)
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

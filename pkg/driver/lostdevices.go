package driver

import (
	"context"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

// deviceLoss describes a device that a claim holds but has lost. message is for the claim's users.
type deviceLoss struct {
	claim           kubeletplugin.NamespacedObject
	device, message string
}

type deviceLossKey struct {
	claim  types.UID
	device string
}

// lostDevices has the devices that prepared claims have lost, for example because a GPU was
// replaced. Reconciliation finds them when it compares the checkpoint records with the hardware.
// When a claim is unprepared or prepared again, its lost devices are forgotten.
type lostDevices struct {
	// changed is called when a claim loses a device or has it again. It must not block.
	changed func()

	mu      sync.Mutex
	devices map[deviceLossKey]deviceLoss
	// ended has the claims that were prepared or unprepared since the comparison in progress began, so
	// its result does not apply to them. It is nil while no comparison is in progress.
	ended map[types.UID]bool
	// unchecked has the claims whose devices the comparison in progress cannot look up in the
	// hardware.
	unchecked map[types.UID]bool
}

// BeginComparison must be called before reconciliation compares the checkpoint records with the
// hardware.
func (l *lostDevices) BeginComparison() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended, l.unchecked = map[types.UID]bool{}, map[types.UID]bool{}
}

// MarkUnchecked notes that the comparison in progress cannot look up the claim's devices in the
// hardware. Devices that the claim had lost before stay lost.
func (l *lostDevices) MarkUnchecked(uid types.UID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unchecked[uid] = true
}

// EndClaim forgets the claim's lost devices. The caller has just prepared or unprepared the claim.
func (l *lostDevices) EndClaim(uid types.UID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended != nil {
		l.ended[uid] = true
	}
	for key := range l.devices {
		if key.claim == uid {
			delete(l.devices, key)
			l.changed()
		}
	}
}

// EndComparison replaces the lost devices by now, the result of a comparison. A claim for which the
// function open returns true could not be compared, and keeps its lost devices. lost is called for
// each newly lost device, found for each that is back; neither may block.
func (l *lostDevices) EndComparison(now []deviceLoss, open func(types.UID) bool, lost, found func(deviceLoss)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := map[deviceLossKey]deviceLoss{}
	for _, n := range now {
		if l.ended[n.claim.UID] {
			continue
		}
		key := deviceLossKey{n.claim.UID, n.device}
		all[key] = n
		if l.devices[key] != n {
			lost(n)
			l.changed()
		}
	}
	for key, before := range l.devices {
		switch _, still := all[key]; {
		case still:
		case l.unchecked[key.claim], open(key.claim):
			all[key] = before
		default:
			found(before)
			l.changed()
		}
	}
	l.devices, l.ended, l.unchecked = all, nil, nil
}

// Messages returns the message for each lost device, by the device's name.
func (l *lostDevices) Messages() map[string]string {
	l.mu.Lock()
	defer l.mu.Unlock()
	messages := make(map[string]string, len(l.devices))
	for _, lost := range l.devices {
		messages[lost.device] = lost.message
	}
	return messages
}

// reportLostDevices takes the lost devices from err, the error of the comparison. It writes newly
// lost devices to claim statuses and Events. For a device that is back it sets the claim's status
// to ready again.
func (d *Driver) reportLostDevices(ctx context.Context, err error) {
	var now []deviceLoss
	for _, l := range prepare.LostDevices(err) {
		namespace, name, _ := strings.Cut(l.Claim, "/")
		claim := types.NamespacedName{Namespace: namespace, Name: name}
		now = append(now, deviceLoss{kubeletplugin.NamespacedObject{NamespacedName: claim, UID: l.UID}, l.Device, l.Error()})
	}
	d.lost.EndComparison(now, func(uid types.UID) bool { return prepare.Undetermined(err, uid) },
		func(l deviceLoss) {
			d.status.Lost(ctx, l.claim, l.device, "Lost", l.message)
			d.events.warnClaim(l.claim, "DeviceLost", l.message)
		},
		func(l deviceLoss) { d.status.Changed(ctx, l.claim, d.claimDevices(l.claim.UID)) })
}

package claimstatus

import (
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/reconcile"
)

// loss is a device that a claim holds but has lost. message is for the claim's users.
type loss struct {
	claim           kubeletplugin.NamespacedObject
	device, message string
}

// lossesIn returns the lost devices that err names, the error of a comparison of the checkpoint
// records with the hardware.
func lossesIn(err error) []loss {
	var losses []loss
	for _, l := range reconcile.LostDevices(err) {
		namespace, name, _ := strings.Cut(l.Claim, "/")
		claim := types.NamespacedName{Namespace: namespace, Name: name}
		losses = append(losses, loss{kubeletplugin.NamespacedObject{NamespacedName: claim, UID: l.UID}, l.Device, l.Error()})
	}
	return losses
}

type lossKey struct {
	claim  types.UID
	device string
}

// lostDevices has the devices that prepared claims have lost.
type lostDevices struct {
	mu      sync.Mutex
	changed chan struct{} // closed when a claim loses a device or has it again
	devices map[lossKey]loss
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

// endClaim forgets the claim's lost devices. The caller has just prepared or unprepared the claim.
func (l *lostDevices) endClaim(uid types.UID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended != nil {
		l.ended[uid] = true
	}
	for key := range l.devices {
		if key.claim == uid {
			delete(l.devices, key)
			l.notify()
		}
	}
}

// endComparison replaces the lost devices by now, the result of a comparison. A claim for which the
// function open returns true could not be compared, and keeps its lost devices. lost is called for
// each newly lost device, found for each that is back; neither may block.
func (l *lostDevices) endComparison(now []loss, open func(types.UID) bool, lost, found func(loss)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := map[lossKey]loss{}
	for _, n := range now {
		if l.ended[n.claim.UID] {
			continue
		}
		key := lossKey{n.claim.UID, n.device}
		all[key] = n
		if l.devices[key] != n {
			lost(n)
			l.notify()
		}
	}
	for key, before := range l.devices {
		switch _, still := all[key]; {
		case still:
		case l.unchecked[key.claim], open(key.claim):
			all[key] = before
		default:
			found(before)
			l.notify()
		}
	}
	l.devices, l.ended, l.unchecked = all, nil, nil
}

// notify closes the channel changed and creates the next one. The caller must hold l.mu.
func (l *lostDevices) notify() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// LostDevices returns a message for each lost device, by the device's name, and a channel that is
// closed at the next change.
func (l *lostDevices) LostDevices() (messages map[string]string, changed <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	messages = make(map[string]string, len(l.devices))
	for _, lost := range l.devices {
		messages[lost.device] = lost.message
	}
	return messages, l.changed
}

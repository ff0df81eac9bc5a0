package claimstatus

import (
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

// lostDevice is a device that the claim holds but has lost.
type lostDevice struct {
	claim  kubeletplugin.NamespacedObject
	device string
}

// Comparing implements [prepare.Observer].
func (r *Reporter) Comparing() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = map[types.UID]bool{}
}

// Compared implements [prepare.Observer]. Devices that an unclear claim had lost before stay lost.
func (r *Reporter) Compared(found []*prepare.LostError, unclear map[types.UID]bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	lost := map[lostDevice]string{}
	for _, l := range found {
		if r.ended[l.UID] {
			continue
		}
		namespace, name, _ := strings.Cut(l.Claim, "/")
		claim := kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}, UID: l.UID}
		d := lostDevice{claim, l.Device}
		lost[d] = l.Error()
		if r.lost[d] != lost[d] {
			r.enqueue(claim)
			r.event(claim, events.DeviceLost, lost[d])
			r.notify()
		}
	}
	for d, message := range r.lost {
		switch _, still := lost[d]; {
		case still:
		case unclear[d.claim.UID]:
			lost[d] = message
		default: // it is back
			r.enqueue(d.claim)
			r.notify()
		}
	}
	r.lost, r.ended = lost, nil
}

// notify tells the readers of LostDevices about a change. The caller must hold r.mu.
func (r *Reporter) notify() {
	close(r.changed)
	r.changed = make(chan struct{})
}

// LostDevices returns a message for each lost device, by the device's name, and a channel that is
// closed at the next change.
func (r *Reporter) LostDevices() (messages map[string]string, changed <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	messages = make(map[string]string, len(r.lost))
	for d, message := range r.lost {
		messages[d.device] = message
	}
	return messages, r.changed
}

// lostBy returns a message for each device that the claim has lost, by the device's name.
func (r *Reporter) lostBy(claim types.UID) map[string]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	messages := map[string]string{}
	for d, message := range r.lost {
		if d.claim.UID == claim {
			messages[d.device] = message
		}
	}
	return messages
}

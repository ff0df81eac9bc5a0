package driver

import (
	"context"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

// loss is what users hear of a device that a claim has lost.
type loss struct {
	claim           kubeletplugin.NamespacedObject
	device, message string
}

type lossKey struct {
	claim  types.UID
	device string
}

// losses are the devices that claims have lost. Each belongs to its claim: it ends when the claim is
// given back or prepared, whatever a comparison says that began before.
type losses struct {
	// changed is called when a device was lost, or is no longer.
	changed func()

	mu  sync.Mutex
	all map[lossKey]loss
	// ended are the claims that ended while a comparison runs; nil while none does.
	ended map[types.UID]bool
	// unseen are the claims whose devices this comparison could not look at.
	unseen map[types.UID]bool
}

// Begin is called before a comparison.
func (l *losses) Begin() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended, l.unseen = map[types.UID]bool{}, map[types.UID]bool{}
}

// NotLooked says that the comparison could not look at a claim's devices: what is lost stays lost.
func (l *losses) NotLooked(uid types.UID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unseen[uid] = true
}

// End is called when a claim was given back or prepared.
func (l *losses) End(uid types.UID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended != nil {
		l.ended[uid] = true
	}
	for key := range l.all {
		if key.claim == uid {
			delete(l.all, key)
			l.changed()
		}
	}
}

// Compared takes what a comparison has found; open says of which claims it cannot tell. lost and found
// hear of what is new, while no claim can end. They must not wait.
func (l *losses) Compared(now []loss, open func(types.UID) bool, lost, found func(loss)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := map[lossKey]loss{}
	for _, n := range now {
		if l.ended[n.claim.UID] {
			continue
		}
		key := lossKey{n.claim.UID, n.device}
		all[key] = n
		if l.all[key] != n {
			lost(n)
			l.changed()
		}
	}
	for key, before := range l.all {
		switch _, still := all[key]; {
		case still:
		case l.unseen[key.claim], open(key.claim):
			all[key] = before
		default:
			found(before)
			l.changed()
		}
	}
	l.all, l.ended, l.unseen = all, nil, nil
}

// Messages say of each lost device what became of it.
func (l *losses) Messages() map[string]string {
	l.mu.Lock()
	defer l.mu.Unlock()
	messages := make(map[string]string, len(l.all))
	for _, lost := range l.all {
		messages[lost.device] = lost.message
	}
	return messages
}

// reportLost says of each claim that has lost a device so where its user looks, once for each way in
// which it was lost, and when it has the device again. err is that of a comparison of all claims.
func (d *Driver) reportLost(ctx context.Context, err error) {
	var now []loss
	for _, l := range prepare.Lost(err) {
		namespace, name, _ := strings.Cut(l.Claim, "/")
		claim := kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}, UID: l.UID}
		now = append(now, loss{claim, l.Device, l.Error()})
	}
	d.lost.Compared(now, func(uid types.UID) bool { return prepare.LeavesOpen(err, uid) },
		func(l loss) {
			d.status.Lost(ctx, l.claim, l.device, "Lost", l.message)
			d.events.warnClaim(l.claim, "DeviceLost", l.message)
		},
		func(l loss) { d.status.Changed(ctx, l.claim, d.given(l.claim.UID)) })
}

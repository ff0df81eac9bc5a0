package nvidia

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"testing"
	"testing/synctest"

	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func xid(code uint64, instance *uint32) device.Signal {
	return device.Signal{Event: &device.HealthEvent{Card: device.Card{PCIAddress: "0000:1b:00.0"}, Kind: device.EventXID, XID: code, GPUInstance: instance}}
}

func condition(reach device.Reach) device.Signal {
	return device.Signal{Condition: &device.Condition{Reach: reach}}
}

func TestEventsAlikeBecomeOneAndKeepTheirPlace(t *testing.T) {
	o := newOutbox()
	for _, s := range []device.Signal{
		xid(31, nil), condition(device.ReachOK), xid(48, nil), xid(31, nil), xid(31, ptr.To[uint32](1)), xid(31, ptr.To[uint32](0)), condition(device.ReachLost), xid(31, nil),
	} {
		o.add(t.Context(), s)
	}
	batch := o.take()
	if len(batch) != 6 || batch[0].Event.Count != 3 || batch[1].Condition.Reach != device.ReachOK || batch[2].Event.XID != 48 ||
		*batch[3].Event.GPUInstance != 1 || *batch[4].Event.GPUInstance != 0 || batch[5].Condition.Reach != device.ReachLost {
		t.Errorf("%d signals", len(batch))
		for _, s := range batch {
			t.Error(spell(*s))
		}
	}
	o.add(t.Context(), xid(31, nil))
	if again := o.take(); len(again) != 1 || again[0].Event.Count != 1 {
		t.Error("what was sent is counted again")
	}
}

func TestWhoHasTooManySignalsWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutbox()
		for i := range outboxLimit {
			o.add(t.Context(), xid(uint64(i), nil))
		}
		o.add(t.Context(), xid(7, nil)) // there is room for one more alike
		added := make(chan struct{})
		go func() {
			o.add(t.Context(), condition(device.ReachOK))
			close(added)
		}()
		synctest.Wait()
		select {
		case <-added:
			t.Error("it did not wait")
		default:
		}
		if n := len(o.take()); n != outboxLimit {
			t.Error(n)
		}
		<-added
		if n := len(o.take()); n != 1 {
			t.Error(n)
		}
		for i := range outboxLimit {
			o.add(t.Context(), xid(uint64(i), nil))
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		o.add(ctx, condition(device.ReachOK)) // returns
	})
}

func TestWhatWaitsIsSentAtTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutbox()
		var out bytes.Buffer
		ctx, cancel := context.WithCancel(t.Context())
		sent := make(chan error)
		go func() { sent <- o.send(ctx, &out) }()
		o.add(ctx, xid(48, nil))
		synctest.Wait()
		if out.Len() == 0 {
			t.Error("the first was not sent at once")
		}
		o.add(ctx, xid(79, nil))
		cancel()
		if err := <-sent; err != nil {
			t.Error(err)
		}
		decoder := json.NewDecoder(&out)
		for _, code := range []uint64{48, 79} {
			var s device.Signal
			if err := decoder.Decode(&s); err != nil || s.Event == nil || s.Event.XID != code {
				t.Error(spell(s), err)
			}
		}
	})
}

type closedPipe struct{}

func (closedPipe) Write([]byte) (int, error) { return 0, errors.New("nobody reads") }

func TestAParentThatIsGoneEndsTheSending(t *testing.T) {
	o := newOutbox()
	o.add(t.Context(), xid(48, nil))
	if err := o.send(t.Context(), closedPipe{}); err == nil {
		t.Error("it was sent to nobody")
	}
}

package watch

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

func TestEqualEventsCoalesceInOrder(t *testing.T) {
	batch := merge([]device.Signal{
		xid(31, nil), condition(device.ReachOK), xid(48, nil), xid(31, nil), xid(31, ptr.To[uint32](1)),
		xid(31, ptr.To[uint32](0)), condition(device.ReachLost), xid(31, nil),
	})
	if len(batch) != 6 || batch[0].Event.Count != 3 || batch[1].Condition.Reach != device.ReachOK || batch[2].Event.XID != 48 ||
		*batch[3].Event.GPUInstance != 1 || *batch[4].Event.GPUInstance != 0 || batch[5].Condition.Reach != device.ReachLost {
		t.Errorf("%d signals", len(batch))
		for _, s := range batch {
			t.Error(formatSignal(s))
		}
	}
	if again := merge([]device.Signal{xid(31, nil)}); len(again) != 1 || again[0].Event.Count != 1 {
		t.Error("a sent event was counted again")
	}
}

func TestFullQueueBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newEventQueue()
		for i := range queueLimit {
			q.add(t.Context(), xid(uint64(i), nil))
		}
		added := make(chan struct{})
		go func() {
			q.add(t.Context(), condition(device.ReachOK))
			close(added)
		}()
		synctest.Wait()
		select {
		case <-added:
			t.Error("add did not block")
		default:
		}
		<-q
		<-added
		if n := len(q); n != queueLimit {
			t.Error(n)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		q.add(ctx, condition(device.ReachOK)) // returns
	})
}

func TestQueueIsFlushedAtEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newEventQueue()
		var out bytes.Buffer
		ctx, cancel := context.WithCancel(t.Context())
		sent := make(chan error)
		go func() { sent <- q.send(ctx, &out) }()
		q.add(ctx, xid(48, nil))
		synctest.Wait()
		if out.Len() == 0 {
			t.Error("the first signal was not sent at once")
		}
		q.add(ctx, xid(79, nil))
		cancel()
		if err := <-sent; err != nil {
			t.Error(err)
		}
		decoder := json.NewDecoder(&out)
		for _, code := range []uint64{48, 79} {
			var s device.Signal
			if err := decoder.Decode(&s); err != nil || s.Event == nil || s.Event.XID != code {
				t.Error(formatSignal(s), err)
			}
		}
	})
}

type closedPipe struct{}

func (closedPipe) Write([]byte) (int, error) { return 0, errors.New("the pipe is closed") }

func TestClosedPipeEndsSending(t *testing.T) {
	q := newEventQueue()
	q.add(t.Context(), xid(48, nil))
	if err := q.send(t.Context(), closedPipe{}); err == nil {
		t.Error("sent to a closed pipe without error")
	}
}

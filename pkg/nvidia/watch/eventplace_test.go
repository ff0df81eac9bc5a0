package watch

import (
	"context"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestLastEventHasItsPlace(t *testing.T) {
	asked, answer := make(chan struct{}), make(chan struct{})
	places := make(chan device.HealthEvent, 1)
	ctx, cancel := context.WithCancel(t.Context())
	placing, placed := extendContext(ctx)
	defer placed()
	instance := uint32(7)
	r := &placeResolver{
		emit: func(s device.Signal) { places <- *s.Event },
		look: func(ctx context.Context, _ device.Card) (device.CardState, error) {
			close(asked)
			select {
			case <-answer:
				return device.CardState{MIG: device.MIG{Instances: []device.Instance{{ID: instance}}}}, nil
			case <-ctx.Done():
				return device.CardState{}, ctx.Err()
			}
		},
	}
	r.add(placing, device.HealthEvent{GPUInstance: &instance})
	<-asked
	cancel()
	time.AfterFunc(10*time.Millisecond, func() { close(answer) })
	if e := <-places; e.Place == nil {
		t.Error("the event has no place")
	}
}

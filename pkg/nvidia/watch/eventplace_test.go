package watch

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestLastEventHasItsPlace(t *testing.T) {
	instance := uint32(7)
	for name, c := range map[string]struct {
		answersAfter time.Duration
		place        bool
	}{
		"the worker answers":         {lastPlaceLimit / 2, true},
		"the worker does not answer": {time.Hour, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var emitted []device.HealthEvent
				r := newPlaceResolver(func(s device.Signal) { emitted = append(emitted, *s.Event) })
				r.look = func(ctx context.Context, _ device.Card) (device.CardState, error) {
					select {
					case <-time.After(c.answersAfter):
						return device.CardState{MIG: device.MIG{Instances: []device.Instance{{ID: instance}}}}, nil
					case <-ctx.Done():
						return device.CardState{}, ctx.Err()
					}
				}
				r.add(device.HealthEvent{GPUInstance: &instance})
				began := time.Now()
				r.finish()
				if took := time.Since(began); took > lastPlaceLimit {
					t.Errorf("it took %s", took)
				}
				if len(emitted) != 1 || (emitted[0].Place != nil) != c.place {
					t.Errorf("%+v", emitted)
				}
			})
		})
	}
}

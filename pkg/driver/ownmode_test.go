package driver

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestAModeThatCannotBeTurnedOffIsTriedMoreAndMoreSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var tries []time.Duration
		looks, inUse := 0, errors.New("in use")
		m := &modes{changed: func() { looks++ }, turnOff: func(_ context.Context, g device.GPU) (bool, error) {
			if g.UUID == "free" {
				return true, nil
			}
			tries = append(tries, time.Since(began))
			return false, inUse
		}}
		gpus := []device.GPU{{PCIAddress: "0000:1b:00.0", UUID: "busy"}, {PCIAddress: "0000:1c:00.0", UUID: "free"}}
		for range 20 {
			if err := m.Off(t.Context(), gpus); !errors.Is(err, inUse) {
				t.Errorf("between tries nothing is said: %v", err)
			}
			time.Sleep(5 * time.Second) //nolint:forbidigo // synctest's time
		}
		if want := []time.Duration{0, 10 * time.Second, 30 * time.Second, 70 * time.Second}; !slices.Equal(tries, want) {
			t.Errorf("tried after %v", tries)
		}
		if looks != 20 {
			t.Errorf("the inventory looked %d times at what was turned off", looks)
		}
		inUse = nil
		time.Sleep(modeRetryMost) //nolint:forbidigo // synctest's time
		if err := m.Off(t.Context(), gpus); err != nil {
			t.Error(err)
		}
		if due, last := m.due(gpus[0].WholeName()); !due || last != nil {
			t.Errorf("due: %v, %v", due, last)
		}
	})
}

package reconciler

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestMIGModeCleanupRetriesWithBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var tries []time.Duration
		scans, inUse := 0, errors.New("in use")
		m := newModeCleaner(func(_ context.Context, g device.GPU) (bool, error) {
			if g.UUID == "free" {
				return true, nil
			}
			tries = append(tries, time.Since(began))
			return false, inUse
		}, func() { scans++ })
		gpus := []device.GPU{{PCIAddress: "0000:1b:00.0", UUID: "busy"}, {PCIAddress: "0000:1c:00.0", UUID: "free"}}
		for range 20 {
			if err := m.Clean(t.Context(), gpus); !errors.Is(err, inUse) {
				t.Errorf("no error between tries: %v", err)
			}
			time.Sleep(5 * time.Second) //nolint:forbidigo // synctest's time
		}
		if want := []time.Duration{0, 10 * time.Second, 30 * time.Second, 70 * time.Second}; !slices.Equal(tries, want) {
			t.Errorf("tried after %v", tries)
		}
		if scans != 20 {
			t.Errorf("the inventory was asked for %d scans", scans)
		}
		inUse = nil
		time.Sleep(modeRetryMax) //nolint:forbidigo // synctest's time
		if err := m.Clean(t.Context(), gpus); err != nil {
			t.Error(err)
		}
		tries = nil
		if err := m.Clean(t.Context(), gpus); err != nil || len(tries) != 1 {
			t.Errorf("after a success: %v, %d tries", err, len(tries))
		}
	})
}

package health

import (
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// The test compares a monitor that gets a Tick every second with a monitor that gets none while
// StableFor says that none is needed. Their views must be equal in every second.
func TestStableForSkipsOnlyTicksWithoutEffect(t *testing.T) {
	const long = 6 * time.Second
	stable, moved := 0, 0
	for seed := range uint64(25) {
		r := rand.New(rand.NewPCG(seed, 0))
		now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		always, seldom := New(Options{}, now), New(Options{}, now)
		ticked := now
		for range 1500 {
			now = now.Add(time.Second)
			if r.IntN(8) == 0 {
				s := randomSignal(r, now)
				always.Apply(s, now)
				seldom.Apply(s, now)
			}
			before := always.Version()
			always.Tick(now)
			if always.Version() != before {
				moved++
			}
			pause := time.Second
			if seldom.StableFor(now, long) {
				pause = long
				stable++
			}
			if now.Sub(ticked) >= pause {
				seldom.Tick(now)
				_ = seldom.Counts()
				ticked = now
			}
			if !reflect.DeepEqual(always.View(), seldom.View()) {
				t.Fatalf("seed %d, at %s: %+v, but with fewer ticks %+v", seed, now, always.View(), seldom.View())
			}
		}
	}
	if stable == 0 || moved == 0 {
		t.Errorf("the test proves nothing: stable for %d seconds, %d changes by time alone", stable, moved)
	}
}

func randomSignal(r *rand.Rand, now time.Time) device.Signal {
	card := device.Card{PCIAddress: "0000:1b:00.0", UUID: "GPU-1"}
	switch r.IntN(20) {
	case 0:
		return device.Signal{Watcher: &device.WatcherState{Error: "it has ended", At: now}}
	case 1, 2, 3, 4:
		return device.Signal{Watcher: &device.WatcherState{Up: true, Events: true, At: now}}
	case 5:
		codes := []uint64{13, 31, 79, 144}
		return device.Signal{Event: &device.HealthEvent{Card: card, Kind: device.EventXID, XID: codes[r.IntN(len(codes))], At: now}}
	case 6:
		return device.Signal{Condition: &device.Condition{Card: card, Reach: device.ReachFailed, Error: "unknown error", At: now}}
	case 7:
		return device.Signal{Condition: &device.Condition{
			Card: card, Reach: device.ReachOK, Fabric: &device.Fabric{State: device.FabricInProgress}, At: now}}
	case 8:
		return device.Signal{Condition: &device.Condition{Card: card, Reach: device.ReachOK, Recovery: device.RecoveryReset, At: now}}
	default:
		return device.Signal{Condition: &device.Condition{
			Card: card, Reach: device.ReachOK, Recovery: device.RecoveryNone, Fabric: &device.Fabric{State: device.FabricCompleted}, At: now,
		}}
	}
}

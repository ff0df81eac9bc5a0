package driver

import (
	"context"
	"fmt"
	"sync"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

// forgetful is the hardware, of which it is said where people look if the driver does not keep what is set: whoever runs the node can change that.
type forgetful struct {
	prepare.Partitions
	events *nodeEvents

	mu sync.Mutex
	// off says of the cards that were looked at whether their persistence mode was off.
	off map[device.Card]bool
	// told is what was said, until it is on.
	told map[string]bool
}

func newForgetful(p prepare.Partitions, events *nodeEvents) *forgetful {
	return &forgetful{Partitions: p, events: events, off: map[device.Card]bool{}, told: map[string]bool{}}
}

func (f *forgetful) Look(ctx context.Context, c device.Card) (device.CutState, error) {
	state, err := f.Partitions.Look(ctx, c)
	if err == nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.off[c] = state.Persistence != nil && !*state.Persistence
	}
	return state, err
}

func (f *forgetful) SetComputeMode(ctx context.Context, c device.Card, mode device.ComputeMode) error {
	err := f.Partitions.SetComputeMode(ctx, c, mode)
	if err == nil && mode != device.ComputeDefault {
		f.warn(c, "the compute mode")
	}
	return err
}

func (f *forgetful) SetTimeSlice(ctx context.Context, c device.Card, slice device.TimeSlice) error {
	err := f.Partitions.SetTimeSlice(ctx, c, slice)
	if err == nil && slice != device.TimeSliceDefault {
		f.warn(c, "the time slice")
	}
	return err
}

// warn says it once: what is kept set is set often.
func (f *forgetful) warn(c device.Card, what string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	key := c.String() + what
	if off := f.off[c]; !off || f.told[key] {
		f.told[key] = off
		return
	}
	f.told[key] = true
	f.events.warn("PersistenceModeOff", fmt.Sprintf("Persistence mode of %s is off: %s that claims asked for is forgotten whenever the last process closes the GPU, and set again within half a minute. "+
		"Run nvidia-persistenced, or nvidia-smi -pm 1", c.PCIAddress.WholeName(), what))
}

package driver

import (
	"context"
	"fmt"
	"sync"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// persistenceWarner wraps the interface that changes GPUs. If a changed GPU's persistence mode is
// off, it writes an Event, because the GPU loses the changed setting when the last process closes
// it.
type persistenceWarner struct {
	steps.Partitions
	events *events.Recorder

	mu sync.Mutex
	// persistenceOff is true for each GPU whose persistence mode was off when Look last read it.
	persistenceOff map[device.Card]bool
	// warned has the texts of the Events written for each GPU since its persistence mode was last on.
	warned map[string]bool
}

func newPersistenceWarner(p steps.Partitions, events *events.Recorder) *persistenceWarner {
	return &persistenceWarner{Partitions: p, events: events, persistenceOff: map[device.Card]bool{}, warned: map[string]bool{}}
}

func (w *persistenceWarner) Look(ctx context.Context, c device.Card) (device.CardState, error) {
	state, err := w.Partitions.Look(ctx, c)
	if err == nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.persistenceOff[c] = state.Persistence != nil && !*state.Persistence
	}
	return state, err
}

func (w *persistenceWarner) SetComputeMode(ctx context.Context, c device.Card, mode device.ComputeMode) error {
	err := w.Partitions.SetComputeMode(ctx, c, mode)
	if err == nil && mode != device.ComputeDefault {
		w.warn(c, "the compute mode")
	}
	return err
}

func (w *persistenceWarner) SetTimeSlice(ctx context.Context, c device.Card, slice device.TimeSlice) error {
	err := w.Partitions.SetTimeSlice(ctx, c, slice)
	if err == nil && slice != device.TimeSliceDefault {
		w.warn(c, "the time slice")
	}
	return err
}

// warn writes an Event that the GPU may lose the setting called what, if its persistence mode is
// off. The same Event is not written again until the mode was on, because the driver restores a
// lost setting often.
func (w *persistenceWarner) warn(c device.Card, what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	key := c.String() + what
	if off := w.persistenceOff[c]; !off || w.warned[key] {
		w.warned[key] = off
		return
	}
	w.warned[key] = true
	w.events.Warn("PersistenceModeOff", fmt.Sprintf("Persistence mode of %s is off: "+
		"the GPU loses %s of its claims when the last process closes it. The driver restores the setting within half a minute. "+
		"To prevent the loss, run nvidia-persistenced or nvidia-smi -pm 1", c.PCIAddress.WholeName(), what))
}

package cut

import (
	"context"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
)

// Persistence reads the persistence mode of a card.
func (p *Partitions) Persistence(ctx context.Context, card device.Card) (bool, error) {
	a, err := p.observed(ctx, request{Op: opPersistence, Card: card})
	return a.Persistence, err
}

// SetPersistence switches the persistence mode of a card on or off.
func (p *Partitions) SetPersistence(ctx context.Context, card device.Card, on bool) error {
	_, err := p.observed(ctx, request{Op: opSetPersistence, Card: card, On: on})
	return err
}

// Leave makes the plugin close a card that is to leave NVIDIA's driver: no process of the health
// watch has it open, and its worker has ended. The watch leaves the card out until back is called.
func (p *Partitions) Leave(ctx context.Context, card device.PCIAddress) (back func(), err error) {
	minor, err := host.Minor(p.paths.WithDefaults(), card)
	if err != nil {
		minor = -1 // NVIDIA's driver does not have the card
	}
	back, err = p.excluded.Exclude(ctx, card, minor)
	if err != nil {
		return nil, err
	}
	if err := p.slot(card).stop(ctx); err != nil {
		back()
		return nil, fmt.Errorf("stop the MIG worker of GPU %s: %w", card, err)
	}
	return back, nil
}

func (c partitioner) persistence(r request) (bool, error) {
	card, err := c.open(r)
	if err != nil {
		return false, err
	}
	mode, ret := card.GetPersistenceMode()
	if ret == nvml.ERROR_NOT_SUPPORTED {
		return false, nil
	}
	if ret != nvml.SUCCESS {
		return false, fmt.Errorf("read its persistence mode: %w", nvmlx.ToError(ret))
	}
	return mode == nvml.FEATURE_ENABLED, nil
}

// setPersistence changes the persistence mode and reads it back.
func (c partitioner) setPersistence(r request) error {
	is, err := c.persistence(r)
	if err != nil || is == r.On {
		return err
	}
	card, err := c.open(r)
	if err != nil {
		return err
	}
	mode := nvml.FEATURE_DISABLED
	if r.On {
		mode = nvml.FEATURE_ENABLED
	}
	if ret := card.SetPersistenceMode(mode); ret != nvml.SUCCESS {
		return nvmlx.ToError(ret)
	}
	if is, err = c.persistence(r); err == nil && is != r.On {
		err = r.fail(device.FailureOther, "NVML reported success, but persistence mode is on: %t", is)
	}
	return err
}

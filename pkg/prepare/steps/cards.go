package steps

import (
	"context"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// CardStates caches the state of each card that was read from the hardware. A CardStates is used
// only within one call that holds the GPUs' locks.
type CardStates struct {
	partitions Partitions
	states     map[device.Card]device.CardState
}

// NewCardStates returns an empty cache.
func NewCardStates(p Partitions) *CardStates {
	return &CardStates{p, map[device.Card]device.CardState{}}
}

func (c *CardStates) Get(ctx context.Context, card device.Card) (device.CardState, error) {
	if state, ok := c.states[card]; ok {
		return state, nil
	}
	state, err := c.partitions.Look(ctx, card)
	if err == nil {
		c.states[card] = state
	}
	return state, err
}

// invalidate removes a card's state from the cache. A caller that changed the card, or may have
// changed it, must call invalidate.
func (c *CardStates) invalidate(card device.Card) { delete(c.states, card) }

package migmodel

import (
	"context"
	"fmt"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Op names a call to a GPU.
type Op string

// The calls of [Partitions]. Each is made at once or not at all.
const (
	Query           Op = "query"
	ModeOn          Op = "MIG mode on"
	ModeOff         Op = "MIG mode off"
	CreateInstance  Op = "create GPU instance"
	CreateCompute   Op = "create compute instance"
	DestroyCompute  Op = "destroy compute instance"
	DestroyInstance Op = "destroy GPU instance"
	SetComputeMode  Op = "set compute mode"
	ReadTimeSlice   Op = "read time slice"
	SetTimeSlice    Op = "set time slice"
)

// Partitions has the methods of cut.Partitions, for GPUs in memory.
type Partitions struct {
	// Call makes one call on the GPU that is the card: it calls effect with it. A test may return an
	// error before or after the effect. The parameter detail says what is set or created.
	Call func(ctx context.Context, op Op, detail string, card device.Card, effect func(*GPU) error) error
}

// Find returns the GPU that is the card. If another one is at its PCI address or none, it returns
// the error of package cut.
func Find(gpus []*GPU, card device.Card) (*GPU, error) {
	for _, g := range gpus {
		if g.PCIAddress == card.PCIAddress {
			if g.UUID != card.UUID {
				return nil, &RefusalError{Code: device.FailureReplaced}
			}
			return g, nil
		}
	}
	return nil, &RefusalError{Code: device.FailureNotFound}
}

// Look reads the state of a card.
func (p Partitions) Look(ctx context.Context, c device.Card) (s device.CardState, err error) {
	err = p.Call(ctx, Query, "", c, func(g *GPU) error { s = g.State(); return nil })
	return s, err
}

// SetMode changes the MIG mode of a card.
func (p Partitions) SetMode(ctx context.Context, c device.Card, on bool) (s device.CardState, err error) {
	op := ModeOff
	if on {
		op = ModeOn
	}
	err = p.Call(ctx, op, "", c, func(g *GPU) error {
		err := g.SetMode(on)
		s = g.State()
		return err
	})
	return s, err
}

// CreateInstance creates a GPU instance.
func (p Partitions) CreateInstance(
	ctx context.Context, c device.Card, profileID uint32, at device.Placement,
) (in device.Instance, err error) {
	detail := fmt.Sprintf("%d at %d", profileID, at.Start)
	err = p.Call(ctx, CreateInstance, detail, c, func(g *GPU) (err error) { in, err = g.CreateInstance(profileID, at); return err })
	return in, err
}

// CreateCompute creates the compute instance that fills a GPU instance.
func (p Partitions) CreateCompute(ctx context.Context, c device.Card, id uint32) (in device.Instance, err error) {
	err = p.Call(ctx, CreateCompute, "", c, func(g *GPU) (err error) { in, err = g.CreateCompute(id); return err })
	return in, err
}

// Destroy destroys the compute instances of a GPU instance and then the GPU instance, each with a
// call.
func (p Partitions) Destroy(ctx context.Context, c device.Card, in device.Instance) error {
	if err := p.Call(ctx, DestroyCompute, "", c, func(g *GPU) error { return g.DestroyCompute(in) }); err != nil {
		return err
	}
	return p.Call(ctx, DestroyInstance, "", c, func(g *GPU) error { return g.DestroyInstance(in) })
}

// SetComputeMode sets the compute mode of a card.
func (p Partitions) SetComputeMode(ctx context.Context, c device.Card, mode device.ComputeMode) error {
	return p.Call(ctx, SetComputeMode, string(mode), c, func(g *GPU) error { return g.SetComputeMode(mode) })
}

// TimeSlice reads the time slice of a card.
func (p Partitions) TimeSlice(ctx context.Context, c device.Card) (s device.TimeSlice, err error) {
	err = p.Call(ctx, ReadTimeSlice, "", c, func(g *GPU) (err error) { s, err = g.ReadTimeSlice(); return err })
	return s, err
}

// SetTimeSlice sets the time slice of a card.
func (p Partitions) SetTimeSlice(ctx context.Context, c device.Card, to device.TimeSlice) error {
	return p.Call(ctx, SetTimeSlice, fmt.Sprint(int(to)), c, func(g *GPU) error { return g.SetTimeSlice(to) })
}

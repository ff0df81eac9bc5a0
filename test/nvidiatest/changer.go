package nvidiatest

import (
	"context"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Partitions changes the partitioning of GPUs, as cut.Partitions does.
type Partitions interface {
	Look(ctx context.Context, card device.Card) (device.CardState, error)
	SetMode(ctx context.Context, card device.Card, on bool) (device.CardState, error)
	CreateInstance(ctx context.Context, card device.Card, profileID uint32, at device.Placement) (device.Instance, error)
	CreateCompute(ctx context.Context, card device.Card, instanceID uint32) (device.Instance, error)
	Destroy(ctx context.Context, card device.Card, in device.Instance) error
	TimeSlice(ctx context.Context, card device.Card) (device.TimeSlice, error)
	SetTimeSlice(ctx context.Context, card device.Card, to device.TimeSlice) error
}

// Changer changes the partitioning of one card. If a change fails, it fails the test.
type Changer struct {
	Partitions
	t    *testing.T
	Card device.Card
}

func (s Site) Changer(p Partitions, index int) Changer {
	s.T.Helper()
	return Changer{p, s.T, s.Card(index)}
}

func (c Changer) Make(profile uint32, at device.Placement) device.Instance {
	c.t.Helper()
	made, err := c.TryMake(c.t.Context(), profile, at)
	if err != nil {
		c.t.Fatal(err)
	}
	return made
}

func (c Changer) TryMake(ctx context.Context, profile uint32, at device.Placement) (device.Instance, error) {
	made, err := c.CreateInstance(ctx, c.Card, profile, at)
	if err != nil {
		return made, err
	}
	return c.CreateCompute(ctx, c.Card, made.ID)
}

func (c Changer) Remove(i device.Instance) {
	c.t.Helper()
	if err := c.Destroy(c.t.Context(), c.Card, i); err != nil {
		c.t.Fatal(err)
	}
}

func (c Changer) Instances() []device.Instance {
	c.t.Helper()
	s, err := c.Look(c.t.Context(), c.Card)
	if err != nil {
		c.t.Fatal(err)
	}
	return s.MIG.Instances
}

func (c Changer) Mode(on bool) {
	c.t.Helper()
	s, err := c.SetMode(c.t.Context(), c.Card, on)
	if err != nil || s.MIG.Enabled != on {
		c.t.Fatal(s, err)
	}
}

func (c Changer) Slice() device.TimeSlice {
	c.t.Helper()
	s, err := c.TimeSlice(c.t.Context(), c.Card)
	if err != nil {
		c.t.Fatal(err)
	}
	return s
}

func (c Changer) SetSlice(to device.TimeSlice) {
	c.t.Helper()
	if err := c.SetTimeSlice(c.t.Context(), c.Card, to); err != nil {
		c.t.Fatal(err)
	}
}

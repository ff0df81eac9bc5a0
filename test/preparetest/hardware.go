package preparetest

import (
	"context"
	"errors"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// NoPartitions implements [steps.Partitions] on a node that offers whole GPUs only. Every call
// fails.
type NoPartitions struct{}

var errNoPartitions = errors.New("this node offers whole GPUs only: partitions and sharing are switched off")

func (NoPartitions) Look(context.Context, device.Card) (device.CardState, error) {
	return device.CardState{}, errNoPartitions
}

func (NoPartitions) SetMode(context.Context, device.Card, bool) (device.CardState, error) {
	return device.CardState{}, errNoPartitions
}

func (NoPartitions) CreateInstance(context.Context, device.Card, uint32, device.Placement) (device.Instance, error) {
	return device.Instance{}, errNoPartitions
}

func (NoPartitions) CreateCompute(context.Context, device.Card, uint32) (device.Instance, error) {
	return device.Instance{}, errNoPartitions
}

func (NoPartitions) Destroy(context.Context, device.Card, device.Instance) error {
	return errNoPartitions
}

func (NoPartitions) SetComputeMode(context.Context, device.Card, device.ComputeMode) error {
	return errNoPartitions
}

func (NoPartitions) TimeSlice(context.Context, device.Card) (device.TimeSlice, error) {
	return 0, errNoPartitions
}

func (NoPartitions) SetTimeSlice(context.Context, device.Card, device.TimeSlice) error {
	return errNoPartitions
}

// NoDaemons implements [steps.Daemons] on a node without an MPS supervisor. Every call fails.
type NoDaemons struct{}

var errNoDaemons = &mps.NotRunningError{Socket: "none", Err: errors.New("the plugin was started without an MPS supervisor")}

func (NoDaemons) Start(context.Context, mps.Daemon) error { return errNoDaemons }

func (NoDaemons) Stop(context.Context, string) error { return errNoDaemons }

func (NoDaemons) List(context.Context) ([]mps.Status, error) { return nil, errNoDaemons }

package busmodel

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/vfio"
)

// VFIO is the driver to which a Binder binds every function.
const VFIO = "vfio-pci"

// Binder binds the functions of a bus as package bind does, without child processes.
type Binder struct{ Bus *Bus }

var _ steps.Binder = Binder{}

// Look implements [steps.Binder].
func (b Binder) Look(_ context.Context, card device.Card) (found vfio.Found, _ error) {
	slot, _, _ := strings.Cut(string(card.PCIAddress), ".")
	var gpu []vfio.Binding
	for _, f := range b.Bus.Functions {
		if !strings.HasPrefix(string(f.Address), slot+".") {
			continue
		}
		one := vfio.Binding{Address: f.Address, Driver: f.Driver, Override: f.Override, VFIO: VFIO}
		if f.Address == card.PCIAddress {
			gpu = append(gpu, one)
		} else {
			found.Functions = append(found.Functions, one)
		}
	}
	found.Functions = append(found.Functions, gpu...)
	return found, nil
}

// Bind implements [steps.Binder].
func (b Binder) Bind(ctx context.Context, card device.Card, found vfio.Found) error {
	return b.wrap("bind", card, vfio.Bind(ctx, b.Bus, found.Functions, b.idle))
}

// Release implements [steps.Binder].
func (b Binder) Release(ctx context.Context, card device.Card, found vfio.Found) error {
	return b.wrap("release", card, vfio.Release(ctx, b.Bus, found.Functions, b.idle))
}

// Access implements [steps.Binder].
func (b Binder) Access(_ context.Context, card device.PCIAddress, preferIOMMUFD bool) (vfio.Access, error) {
	driver, _, err := b.Bus.Driver(card)
	switch {
	case err != nil:
		return vfio.Access{}, err
	case driver != VFIO:
		return vfio.Access{}, fmt.Errorf("device nodes of %s: %w", card, fs.ErrNotExist)
	case preferIOMMUFD:
		return vfio.Access{Node: "/dev/vfio/devices/" + string(card), API: "/dev/iommu"}, nil
	}
	return vfio.Access{Node: "/dev/vfio/" + string(card), API: "/dev/vfio/vfio"}, nil
}

var errUsed = errors.New("a process uses it")

func (b Binder) idle(f vfio.Binding) error {
	if b.Bus.find(f.Address).Used {
		return errUsed
	}
	return nil
}

func (Binder) wrap(op string, card device.Card, err error) error {
	if err == nil {
		return nil
	}
	failed := &nvidia.Error{Op: op + " " + card.PCIAddress.WholeName(), Code: device.FailureOther, Message: err.Error()}
	if errors.Is(err, errUsed) {
		failed.Code, failed.Processes = device.FailureInUse, []nvidia.Process{{PID: 77, Name: "python"}}
	}
	return failed
}

package busmodel

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
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
	group, err := b.group(card)
	for _, f := range append(group.Companions, group.GPU) {
		found.Functions = append(found.Functions, vfio.Binding{Address: f.Address, Driver: f.Driver, Override: f.Override, VFIO: VFIO})
	}
	return found, err
}

// group returns the card's group. The error says why the card cannot be passed through.
func (b Binder) group(card device.Card) (vfio.Group, error) {
	gpu := b.Bus.find(card.PCIAddress)
	if gpu == nil {
		return vfio.Group{}, b.wrap("look at", card, fs.ErrNotExist)
	}
	group := vfio.Group{GPU: gpu.facts(), Number: gpu.Group, ResetMethods: []string{"flr"}}
	slot, _, _ := strings.Cut(string(gpu.Address), ".")
	for _, f := range b.Bus.Functions {
		if f != gpu && (strings.HasPrefix(string(f.Address), slot+".") || f.Group != 0 && f.Group == gpu.Group) {
			group.Companions = append(group.Companions, f.facts())
		}
	}
	if why := group.Refusal(); why != "" {
		return group, b.wrap("look at", card, errors.New(why))
	}
	return group, nil
}

// facts returns the function as sysfs shows it, of NVIDIA.
func (f *Function) facts() vfio.Function {
	facts := vfio.Function{Address: f.Address, Vendor: 0x10de, Driver: f.Driver, Override: f.Override}
	if f.Display {
		facts.Class = 0x0302
	}
	return facts
}

// Bind implements [steps.Binder].
func (b Binder) Bind(ctx context.Context, card device.Card, found vfio.Found) error {
	unbound := slices.ContainsFunc(found.Functions, func(f vfio.Binding) bool {
		driver, _, err := b.Bus.Driver(f.Address)
		return err != nil || driver != f.VFIO
	})
	if _, err := b.group(card); unbound && err != nil {
		return err
	}
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

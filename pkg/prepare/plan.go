package prepare

import (
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claim"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// plan is what a claim's allocation asks for on this node.
type plan struct {
	record checkpoint.Record
	// wants has one entry for each device of the record.
	wants []want
	// steps are what is to be done before the spec is written.
	steps  []Step
	spec   *claimSpec
	common specs.ContainerEdits
}

// want is one allocated device, and how it is had.
type want struct {
	name device.Name
	// gpu is the card, whole the edits of the whole of it.
	gpu   device.GPU
	whole specs.ContainerEdits
	// cut makes the partition. It is nil for whole GPUs, and for partitions that are used as they are.
	cut *migInstance
	// found is such a partition.
	found *partition
}

// partition is a MIG device that exists.
type partition struct {
	instance device.Instance
	compute  device.ComputeInstance
}

// plan turns an allocation into what is to be done, as far as that can be told without asking the hardware, or says why it cannot be served.
// It changes nothing.
func (p *Preparer) plan(c *resourceapi.ResourceClaim) (*plan, error) {
	allocation, err := claim.Read(c, p.DriverName)
	if err != nil {
		return nil, because(CauseClaim, "%w", err)
	}
	w := &plan{spec: &claimSpec{}, record: checkpoint.Record{ClaimUID: c.UID, Namespace: c.Namespace, Name: c.Name, BootID: p.BootID}}
	if len(allocation.Results) == 0 {
		return w, nil
	}
	snapshot := p.Hardware.Snapshot()
	if !snapshot.Ready {
		return nil, notReady(snapshot)
	}
	w.common = snapshot.Node.Common
	for _, r := range allocation.Results {
		if r.Pool != p.Pool {
			return nil, because(CauseClaim, "request %s was allocated device %s of pool %s, and this node's pool is %s", r.Request, r.Device, r.Pool, p.Pool)
		}
		t, ok := find(snapshot, r.Device)
		if !ok {
			return nil, because(CauseDevice, "request %s was allocated device %s, which is not on this node%s", r.Request, r.Device, missing(snapshot, r.Device))
		}
		if err := supported(r, t.name); err != nil {
			return nil, because(CauseClaim, "%w", err)
		}
		if err := w.excludes(r, t); err != nil {
			return nil, because(CauseClaim, "%w", err)
		}
		w.wants = append(w.wants, t)
		w.record.Devices = append(w.record.Devices, checkpoint.Device{
			Request: r.Request, Pool: r.Pool, Device: r.Device, ShareID: r.ShareID, AdminAccess: r.AdminAccess,
			GPU: t.name.GPU, GPUUUID: t.gpu.UUID,
		})
	}
	return w, nil
}

// excludes says which of the devices before cannot be held beside this one.
func (w *plan) excludes(r claim.Result, t want) error {
	for i, other := range w.record.Devices {
		switch {
		case r.AdminAccess || other.AdminAccess || w.wants[i].name.GPU != t.name.GPU:
		case other.Device == r.Device:
			return fmt.Errorf("requests %s and %s were both allocated device %s", other.Request, r.Request, r.Device)
		case device.Conflict(w.wants[i].name, t.name, t.gpu):
			return fmt.Errorf("requests %s and %s were allocated devices %s and %s, which cannot exist side by side", other.Request, r.Request, other.Device, r.Device)
		}
	}
	return nil
}

// describe fills in what is known only when everything is there: the spec's edits, and which MIG devices they are.
func (w *plan) describe(edits func(parent specs.ContainerEdits, in device.Instance, c device.ComputeInstance) specs.ContainerEdits) error {
	w.spec.Devices = nil
	for i := range w.record.Devices {
		d, t := &w.record.Devices[i], w.wants[i]
		own := t.whole
		if t.name.Partition != nil {
			part, err := t.partition()
			if err != nil {
				return err
			}
			d.MIGUUID = part.compute.UUID
			own = edits(own, part.instance, part.compute)
		}
		w.spec.add(specDevice{Name: cdi.ClaimDeviceName(w.record.ClaimUID, d.Device, d.ShareID), Edits: own})
	}
	return nil
}

func (t want) partition() (*partition, error) {
	switch {
	case t.found != nil:
		return t.found, nil
	case t.cut != nil && t.cut.Instance != nil && len(t.cut.Instance.Compute) == 1:
		return &partition{*t.cut.Instance, t.cut.Instance.Compute[0]}, nil
	default:
		return nil, because(CauseDevice, "device %s is not there", t.name)
	}
}

// partitioned says whether any of the devices is a part of a GPU.
func (w *plan) partitioned() bool {
	for _, t := range w.wants {
		if t.name.Partition != nil {
			return true
		}
	}
	return false
}

// all are the steps with the spec, which comes last.
func (w *plan) all() []Step { return append(append([]Step(nil), w.steps...), w.spec) }

// add leaves out a device that is there already: with admin access two requests may get the same one, and a CDI spec names a device once.
func (s *claimSpec) add(d specDevice) {
	for _, there := range s.Devices {
		if there.Name == d.Name {
			return
		}
	}
	s.Devices = append(s.Devices, d)
}

// find is a device on its GPU.
func find(s inventory.Snapshot, deviceName string) (want, bool) {
	name, ok := device.ParseName(deviceName)
	if !ok {
		return want{}, false
	}
	for _, g := range s.Node.GPUs {
		if g.WholeName() == name.GPU {
			return want{name: name, gpu: g.GPU, whole: g.Edits}, true
		}
	}
	return want{}, false
}

// missing says what is known of a device that is not offered, and else what is offered.
func missing(s inventory.Snapshot, name string) string {
	parsed, _ := device.ParseName(name)
	for _, problem := range s.Node.Problems {
		if problem.PCIAddress != "" && problem.PCIAddress.WholeName() == parsed.GPU {
			return ": " + problem.Message
		}
	}
	names := make([]string, len(s.Node.GPUs))
	for i, g := range s.Node.GPUs {
		names[i] = g.WholeName()
	}
	if len(names) == 0 {
		return ": it offers none now"
	}
	return " (any more): it has " + strings.Join(names, ", ")
}

// supported refuses configuration that this version would have to ignore.
func supported(r claim.Result, name device.Name) error {
	const unsupported = "request %s: sharing strategy %q is not supported by this version of the driver: remove sharing from the claim's %s"
	switch c := r.Config.(type) {
	case nil:
		return fmt.Errorf("request %s: no configuration is known for device %s", r.Request, r.Device)
	case *v1beta1.GpuConfig:
		if name.Partition == nil {
			if c.Sharing != nil {
				return fmt.Errorf(unsupported, r.Request, c.Sharing.Strategy, c.Kind())
			}
			return nil
		}
	case *v1beta1.MigDeviceConfig:
		if name.Partition != nil {
			if c.Sharing != nil {
				return fmt.Errorf(unsupported, r.Request, c.Sharing.Strategy, c.Kind())
			}
			return nil
		}
	}
	if name.Partition != nil {
		return fmt.Errorf("request %s: device %s is a MIG device, which takes a MigDeviceConfig, not a %s", r.Request, r.Device, r.Config.Kind())
	}
	return fmt.Errorf("request %s: device %s is a whole GPU, which takes a GpuConfig, not a %s", r.Request, r.Device, r.Config.Kind())
}

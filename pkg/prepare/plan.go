package prepare

import (
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"tags.cncf.io/container-device-interface/specs-go"

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
	steps []Step
	// sharing is what the claim wants of how its devices are shared. It is nil for a plan that a record gave.
	sharing *sharing
	spec    *claimSpec
	common  specs.ContainerEdits
}

// want is one allocated device, and how it is had.
type want struct {
	name device.Name
	// gpu is the card, whole the edits of the whole of it.
	gpu   device.GPU
	whole specs.ContainerEdits
	// cut makes the partition. It is nil for whole GPUs, for partitions that are used as they are, and for those that claims share.
	cut *migInstance
	// shared makes the partition for all claims that hold a share of it. It is nil for other devices, and where the partition is used as it is.
	shared *shared
	// found is such a partition.
	found *partition
	// totals is what claims can hold together of a device that is shared, by capacity, as far as it is known.
	totals map[string]resource.Quantity
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
		if err := ofKind(r, t.name); err != nil {
			return nil, because(CauseClaim, "%w", err)
		}
		if err := w.excludes(r, t); err != nil {
			return nil, because(CauseClaim, "%w", err)
		}
		d := checkpoint.Device{
			Request: r.Request, Pool: r.Pool, Device: r.Device, ShareID: r.ShareID, AdminAccess: r.AdminAccess,
			GPU: t.name.GPU, GPUUUID: t.gpu.UUID, Fraction: isFraction(r, t.name),
		}
		if t.name.Share && !r.AdminAccess {
			d.ConsumedCapacity, t.totals = r.Capacity, p.Totals(t.gpu, t.name)
		}
		w.wants, w.record.Devices = append(w.wants, t), append(w.record.Devices, d)
	}
	if w.sharing, err = p.sharing(c.UID, w, allocation.Results); err != nil {
		if CauseOf(err) == causeOther {
			err = because(CauseClaim, "%w", err)
		}
		return nil, err
	}
	w.spec.Clients = w.sharing.clients
	return w, nil
}

// excludes says which of the devices before cannot be held beside this one.
func (w *plan) excludes(r claim.Result, t want) error {
	for i, other := range w.record.Devices {
		switch {
		case r.AdminAccess || other.AdminAccess || w.wants[i].name.GPU != t.name.GPU:
		case t.name.Share && other.Device == r.Device && !same(other.ShareID, r.ShareID):
		case other.Device == r.Device:
			return fmt.Errorf("requests %s and %s were both allocated device %s", other.Request, r.Request, r.Device)
		case device.Conflict(w.wants[i].name, t.name, t.gpu):
			return fmt.Errorf("requests %s and %s were allocated devices %s and %s, which cannot exist side by side", other.Request, r.Request, other.Device, r.Device)
		}
	}
	return nil
}

// describe fills in what is known only when everything is there: the spec's edits, and which MIG devices they are.
func (p *Preparer) describe(w *plan) error {
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
			own = p.MIGEdits(own, part.instance, part.compute)
		}
		for _, more := range p.clientEdits(w.spec.Clients, i) {
			own = joined(own, more)
		}
		w.spec.add(specDevice{Name: cdi.ClaimDeviceName(w.record.ClaimUID, d.Device, d.ShareID), Edits: own})
	}
	return nil
}

// joined has both edits.
func joined(a, b specs.ContainerEdits) specs.ContainerEdits {
	a.Env = slices.Concat(a.Env, b.Env)
	a.Mounts = slices.Concat(a.Mounts, b.Mounts)
	a.Hooks = slices.Concat(a.Hooks, b.Hooks)
	return a
}

// made is what makes the partition, as far as it has come. It is nil if nothing of ours does.
func (t want) made() *migInstance {
	if t.shared != nil {
		if m, ok := t.shared.held.step.(*migInstance); ok {
			return m
		}
	}
	return t.cut
}

func (t want) partition() (*partition, error) {
	if t.found != nil {
		return t.found, nil
	}
	if m := t.made(); m != nil && m.Instance != nil && len(m.Instance.Compute) == 1 {
		return &partition{*m.Instance, m.Instance.Compute[0]}, nil
	}
	return nil, because(CauseDevice, "device %s is not there", t.name)
}

// uuid is that of one of the claim's devices, named as it would be for one claim alone.
func (w *plan) uuid(name string) (string, error) {
	for _, t := range w.wants {
		if t.name.Unshared().String() != name {
			continue
		}
		if t.name.Partition == nil {
			return t.gpu.UUID, nil
		}
		part, err := t.partition()
		if err != nil {
			return "", err
		}
		return part.compute.UUID, nil
	}
	return "", because(CauseDevice, "device %s is none of the claim's", name)
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

package ledger

import (
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// PreparedDevice is a device of a prepared claim, with its MIG instance if it has one.
type PreparedDevice struct {
	checkpoint.Device

	// Instance is the GPU instance and Compute the compute instance of a partition. Both are nil for a
	// whole GPU, and for a partition that neither the record nor the inventory describes.
	Instance *device.Instance
	Compute  *device.ComputeInstance
}

// PreparedClaims returns the records of the prepared claims. It leaves out unreadable records:
// their claims' devices are unknown, and Reconcile reports them.
func (l *Ledger) PreparedClaims() ([]checkpoint.Record, error) {
	records, err := l.records.Readable()
	if err != nil {
		return nil, cause.Wrap(cause.Record, err)
	}
	return slices.DeleteFunc(records, func(r checkpoint.Record) bool { return r.State != checkpoint.Prepared }), nil
}

// PreparedDevices lists a claim's devices. The list is empty if the claim is not prepared.
// PreparedDevices reads no hardware.
func (l *Ledger) PreparedDevices(claim types.UID) ([]PreparedDevice, error) {
	r, found, err := l.records.Load(claim)
	if err != nil {
		return nil, cause.Wrap(cause.Record, err)
	}
	if !found || r.State != checkpoint.Prepared {
		return nil, nil
	}
	return l.devices(r)
}

// PreparedClaim is the record of a prepared claim, and the claim's devices.
type PreparedClaim struct {
	checkpoint.Record
	Prepared []PreparedDevice
}

// ListPrepared lists the prepared claims with their devices. It leaves out claims with unreadable
// records, and reads no hardware.
func (l *Ledger) ListPrepared() ([]PreparedClaim, error) {
	records, err := l.PreparedClaims()
	if err != nil {
		return nil, err
	}
	var claims []PreparedClaim
	for _, r := range records {
		if devices, err := l.devices(r); err == nil {
			claims = append(claims, PreparedClaim{r, devices})
		}
	}
	return claims, nil
}

func (l *Ledger) devices(r checkpoint.Record) ([]PreparedDevice, error) {
	list, err := steps.Decode(r.Steps)
	if err != nil {
		return nil, cause.Wrap(cause.Record, err)
	}
	snapshot := l.inventory.Snapshot()
	devices := make([]PreparedDevice, len(r.Devices))
	for i, d := range r.Devices {
		devices[i] = PreparedDevice{Device: d}
		if d.MIGUUID != "" {
			devices[i].locate(append(l.createdInstances(list), instancesOn(snapshot, d.GPU)...))
		}
	}
	return devices, nil
}

// locate looks in instances for the device's partition, by placement, profile and UUID, and stores
// the MIG instance that it finds in g.
func (g *PreparedDevice) locate(instances []device.Instance) {
	name, ok := device.ParseName(g.Device.Device)
	if !ok || name.Partition == nil {
		return
	}
	for _, in := range instances {
		if c, ok := in.Part(*name.Partition); ok && c.UUID == g.MIGUUID {
			g.Instance, g.Compute = &in, &c
			return
		}
	}
}

// createdInstances returns the GPU instances that this driver created for the claim with these
// steps, including instances that the claim shares with others.
func (l *Ledger) createdInstances(list []steps.Step) []device.Instance {
	var instances []device.Instance
	for _, step := range list {
		c, ok := steps.AsCreator(step)
		if !ok || c.Load(l.records, l.bootID) != nil {
			continue // the inventory may have the instance
		}
		if m := c.MIG(); m != nil && m.Instance != nil {
			instances = append(instances, *m.Instance)
		}
	}
	return instances
}

// instancesOn returns the MIG instances that the GPU has in the inventory.
func instancesOn(s inventory.Snapshot, gpu string) []device.Instance {
	for _, g := range s.Node.GPUs {
		if g.WholeName() == gpu && g.MIG != nil {
			return g.MIG.Instances
		}
	}
	return nil
}

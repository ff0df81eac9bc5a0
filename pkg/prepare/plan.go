package prepare

import (
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claim"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// plan is what the driver must do on this node to prepare one claim.
type plan struct {
	// snapshot is the inventory in which the devices were found. It may be out of date.
	snapshot inventory.Snapshot
	record   checkpoint.Record
	// requests has one entry for each of record.Devices, at the same index.
	requests []deviceRequest
	// steps are the parts of the preparation, such as creating a MIG instance, without the last one,
	// which writes the claim's CDI spec.
	steps []steps.Step
	// sharing says which settings, MPS daemons and limits the claim asks for. It is nil in a plan made
	// from a record.
	sharing   *sharing
	spec      *steps.ClaimSpec
	baseEdits specs.ContainerEdits
}

// deviceRequest is one allocated device, with its GPU and the steps that create its partition.
type deviceRequest struct {
	name device.Name
	// gpu is the GPU that provides the device, as a whole or in part.
	gpu device.GPU
	// gpuEdits are the CDI edits for the whole GPU.
	gpuEdits specs.ContainerEdits
	// creator creates the partition. It is nil if the device is a whole GPU or a share of one, or a
	// partition that this driver did not create.
	creator steps.Creator
	// existing is a partition that this driver did not create and that the claim uses as it is.
	existing *partition
	// totals is how much of each capacity of a shared device all claims together can use. It is nil if
	// that is unknown.
	totals map[string]resource.Quantity
}

// partition is an existing MIG device: a compute instance in a GPU instance.
type partition struct {
	instance device.Instance
	compute  device.ComputeInstance
}

// makePlan makes a plan from the claim's allocation, without reading or changing the hardware. It
// returns an error if the claim cannot be served.
func (p *Preparer) makePlan(snapshot inventory.Snapshot, c *resourceapi.ResourceClaim) (*plan, error) {
	allocation, err := claim.Read(c, device.DriverName)
	if err != nil {
		return nil, cause.Wrap(cause.Claim, err)
	}
	pl := &plan{spec: &steps.ClaimSpec{}, record: checkpoint.Record{
		ClaimUID: c.UID, Namespace: c.Namespace, Name: c.Name, BootID: p.node.BootID,
	}}
	if len(allocation.Results) == 0 {
		return pl, nil
	}
	if !snapshot.Ready {
		return nil, steps.NotReady(snapshot)
	}
	pl.snapshot, pl.baseEdits = snapshot, snapshot.Node.Common
	for _, r := range allocation.Results {
		if r.Pool != p.opts.Pool {
			return nil, cause.Errorf(cause.Claim,
				"request %s was allocated device %s of pool %s, but this node's pool is %s: delete the claim's Pods to have it allocated anew",
				r.Request, r.Device, r.Pool, p.opts.Pool)
		}
		req, ok := findDevice(snapshot, r.Device)
		if !ok {
			return nil, cause.Errorf(cause.Device, "request %s was allocated device %s, which is not on this node%s", r.Request, r.Device,
				explainMissing(snapshot, r.Device))
		}
		if err := checkConfigKind(r, req.name); err != nil {
			return nil, cause.Wrap(cause.Claim, err)
		}
		if err := pl.checkCompatible(r, req); err != nil {
			return nil, cause.Wrap(cause.Claim, err)
		}
		d := checkpoint.Device{
			Request: r.Request, Pool: r.Pool, Device: r.Device, ShareID: r.ShareID, AdminAccess: r.AdminAccess,
			GPU: req.name.GPU, GPUUUID: req.gpu.UUID, Fraction: isFraction(r, req.name),
		}
		if req.name.Share && !r.AdminAccess {
			d.ConsumedCapacity, req.totals = r.Capacity, p.opts.ShareTotals(req.gpu, req.name)
		}
		pl.requests, pl.record.Devices = append(pl.requests, req), append(pl.record.Devices, d)
	}
	if pl.sharing, err = p.planSharing(c.UID, pl, allocation.Results); err != nil {
		if cause.Of(err) == cause.Other {
			err = cause.Wrap(cause.Claim, err)
		}
		return nil, err
	}
	pl.spec.Clients = pl.sharing.clients
	return pl, nil
}

// checkCompatible refuses the result r if its device, req, cannot exist together with another
// device of the claim.
func (pl *plan) checkCompatible(r claim.Result, req deviceRequest) error {
	for i, other := range pl.record.Devices {
		switch {
		case r.AdminAccess || other.AdminAccess || pl.requests[i].name.GPU != req.name.GPU:
		case req.name.Share && other.Device == r.Device && !ptr.Equal(other.ShareID, r.ShareID):
		case other.Device == r.Device:
			return fmt.Errorf("requests %s and %s were both allocated device %s", other.Request, r.Request, r.Device)
		case device.Conflict(pl.requests[i].name, req.name, req.gpu):
			return fmt.Errorf("requests %s and %s were allocated devices %s and %s, which cannot exist at the same time", other.Request, r.Request,
				other.Device, r.Device)
		}
	}
	return nil
}

// buildSpec fills in the CDI edits of the claim's spec, and the MIG UUIDs of its record. The caller
// must have applied all steps that create partitions, because only then are the UUIDs known.
func (p *Preparer) buildSpec(pl *plan) error {
	pl.spec.Devices = nil
	for i := range pl.record.Devices {
		d, req := &pl.record.Devices[i], pl.requests[i]
		own := req.gpuEdits
		if req.name.Partition != nil {
			part, err := req.partition()
			if err != nil {
				return err
			}
			d.MIGUUID = part.compute.UUID
			own = p.opts.Edits.MIG(own, part.instance, part.compute)
		}
		for _, more := range p.clientEdits(pl.spec.Clients, i) {
			own = mergeEdits(own, more)
		}
		if d.AdminAccess {
			own = mergeEdits(own, p.opts.Edits.Monitor())
		}
		pl.spec.AddDevice(steps.SpecDevice{Name: cdi.ClaimDeviceName(pl.record.ClaimUID, d.Device, d.ShareID), Edits: own})
	}
	return nil
}

// mergeEdits returns a with the environment, device nodes, mounts and hooks of b added.
func mergeEdits(a, b specs.ContainerEdits) specs.ContainerEdits {
	a.Env = slices.Concat(a.Env, b.Env)
	a.DeviceNodes = slices.Concat(a.DeviceNodes, b.DeviceNodes)
	a.Mounts = slices.Concat(a.Mounts, b.Mounts)
	a.Hooks = slices.Concat(a.Hooks, b.Hooks)
	return a
}

func (req deviceRequest) partition() (*partition, error) {
	if req.existing != nil {
		return req.existing, nil
	}
	if req.creator != nil {
		if m := req.creator.MIG(); m.Instance != nil && len(m.Instance.Compute) == 1 {
			return &partition{*m.Instance, m.Instance.Compute[0]}, nil
		}
	}
	return nil, cause.Errorf(cause.Device, "device %s does not exist now: the kubelet retries", req.name)
}

// deviceUUID returns the UUID of the claim's device with this name. The parameter has no share
// suffix.
func (pl *plan) deviceUUID(name string) (string, error) {
	for _, req := range pl.requests {
		if req.name.Unshared().String() != name {
			continue
		}
		if req.name.Partition == nil {
			return req.gpu.UUID, nil
		}
		part, err := req.partition()
		if err != nil {
			return "", err
		}
		return part.compute.UUID, nil
	}
	return "", cause.Errorf(cause.Device, "device %s is not among the claim's devices", name)
}

// hasPartitions reports whether any of the claim's devices is a partition.
func (pl *plan) hasPartitions() bool {
	for _, req := range pl.requests {
		if req.name.Partition != nil {
			return true
		}
	}
	return false
}

// allSteps returns all steps of the plan. The last one writes the CDI spec.
func (pl *plan) allSteps() []steps.Step {
	return append(append([]steps.Step(nil), pl.steps...), pl.spec)
}

// findDevice looks up the device's GPU in the inventory. It returns false if the GPU is not there.
func findDevice(s inventory.Snapshot, deviceName string) (deviceRequest, bool) {
	name, ok := device.ParseName(deviceName)
	if !ok {
		return deviceRequest{}, false
	}
	for _, g := range s.Node.GPUs {
		if g.WholeName() == name.GPU {
			return deviceRequest{name: name, gpu: g.GPU, gpuEdits: g.Edits}, true
		}
	}
	return deviceRequest{}, false
}

// explainMissing returns the end of an error message: why the inventory lacks the device, or else
// which GPUs the node has.
func explainMissing(s inventory.Snapshot, name string) string {
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
		return ": it has no GPUs now"
	}
	return ": it has " + strings.Join(names, ", ")
}

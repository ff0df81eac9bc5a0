package prepare

import (
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claim"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metadata"
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
	// partitioned means that any of the devices is a partition.
	partitioned bool
	// sharing says which settings, MPS daemons and limits the claim asks for. It is empty in a plan
	// made from a record.
	sharing sharing
	// metadata is nil if the claim's devices are not described to its containers, and in a plan made
	// from a record.
	metadata *steps.Metadata
	// steps are the parts of the preparation, such as creating a MIG instance, without the last one,
	// which writes the claim's CDI spec.
	steps []steps.Step
	spec  *steps.ClaimSpec
	// answer has the devices with their CDI devices: the node-wide one, unless the device is for a
	// virtual machine, the claim's own, and at the first device of each request that of its metadata.
	answer []kubeletplugin.Device
}

// deviceRequest is one allocated device, with its GPU and the steps that create its partition.
type deviceRequest struct {
	name device.Name
	// gpu is the GPU that provides the device, as a whole or in part.
	gpu device.GPU
	// gpuEdits are the CDI edits for the whole GPU, and binding that under which they are good.
	gpuEdits specs.ContainerEdits
	binding  string
	// creator creates the partition. It is nil if the device is a whole GPU or a share of one, or a
	// partition that this driver did not create.
	creator steps.Creator
	// passthrough binds the GPU to VFIO. It is nil if the device is not for virtual machines.
	passthrough *steps.Passthrough
	// existing is a partition that this driver did not create and that the claim uses as it is.
	existing *partition
}

// partition is an existing MIG device: a compute instance in a GPU instance.
type partition struct {
	instance device.Instance
	compute  device.ComputeInstance
}

// isAway reports whether the device needs NVIDIA's driver, but that driver does not have the GPU,
// because a virtual machine has or may get it. The inventory then has no device node of it.
func (req *deviceRequest) isAway() bool {
	return !req.name.Passthrough && req.gpu.Passthrough != nil && len(req.gpuEdits.DeviceNodes) == 0
}

// makePlan makes a plan from the claim's allocation, without reading or changing the hardware. It
// returns an error if the claim cannot be served.
func (p *Preparer) makePlan(snapshot inventory.Snapshot, c *resourceapi.ResourceClaim) (*plan, error) {
	results, err := claim.Read(c, device.DriverName)
	if err != nil {
		return nil, cause.Wrap(cause.Claim, err)
	}
	pl := &plan{snapshot: snapshot, record: checkpoint.Record{
		ClaimUID: c.UID, Namespace: c.Namespace, Name: c.Name, BootID: p.node.BootID,
	}}
	if owner := metav1.GetControllerOf(c); owner != nil && owner.Kind == "Pod" {
		pl.record.Pod = owner.Name
	}
	if len(results) == 0 {
		return pl, nil
	}
	if p.opts.Metadata {
		pl.metadata = &steps.Metadata{PodClaimName: metadata.PodClaimName(c.Annotations)}
	}
	shares := false
	for _, r := range results {
		req, ok := findDevice(snapshot, r.Device)
		if !snapshot.Ready && (!ok || !req.name.Passthrough) {
			return nil, steps.NotReady(snapshot)
		}
		if r.Pool != p.opts.Pool {
			return nil, cause.Errorf(cause.Claim,
				"request %s was allocated device %s of pool %s, but this node's pool is %s: delete the claim's Pods to have it allocated anew",
				r.Request, r.Device, r.Pool, p.opts.Pool)
		}
		if !ok {
			return nil, cause.Errorf(cause.Device, "request %s was allocated device %s, which is not on this node%s", r.Request, r.Device,
				explainMissing(snapshot, r.Device))
		}
		switch {
		case req.isAway():
			return nil, cause.Errorf(cause.Device,
				"request %s: NVIDIA's driver does not have the GPU of device %s: only virtual machines can use it now", r.Request, r.Device)
		case req.name.Passthrough:
			if err := planPassthrough(r, &req); err != nil {
				return nil, err
			}
		}
		d := checkpoint.Device{
			Request: r.Request, Pool: r.Pool, Device: r.Device, ShareID: r.ShareID, AdminAccess: r.AdminAccess,
			GPU: req.name.GPU, GPUUUID: req.gpu.UUID, Model: req.gpu.Model(),
		}
		for i, other := range pl.record.Devices {
			if err := checkCompatible(other, pl.requests[i], d, req); err != nil {
				return nil, cause.Wrap(cause.Claim, err)
			}
		}
		if req.name.Share && !r.AdminAccess {
			// MPS enforces the limits of a fraction, which is a share with a limited part of the memory.
			_, d.Fraction = r.Capacity[device.CapacityMemory]
			d.ConsumedCapacity = r.Capacity
		}
		shares = shares || req.name.Share || r.Config.SharingStrategy() != v1beta1.SharingNone
		pl.partitioned = pl.partitioned || req.name.Partition != nil
		pl.requests, pl.record.Devices = append(pl.requests, req), append(pl.record.Devices, d)
	}
	if shares {
		if pl.sharing, err = p.planSharing(pl, results); err != nil {
			return nil, cause.Wrap(cause.Claim, err)
		}
	}
	return pl, nil
}

// checkCompatible returns an error if one claim cannot have both devices. Two requests with admin
// access can have the same one.
func checkCompatible(a checkpoint.Device, reqA deviceRequest, b checkpoint.Device, reqB deviceRequest) error {
	switch {
	case a.Device == b.Device && a.AdminAccess != b.AdminAccess:
		return fmt.Errorf("requests %s and %s were allocated device %s with and without admin access: make them two claims",
			a.Request, b.Request, a.Device)
	case a.AdminAccess || b.AdminAccess || a.GPU != b.GPU:
	case reqA.name.Share && a.Device == b.Device && !ptr.Equal(a.ShareID, b.ShareID):
	case a.Device == b.Device:
		return fmt.Errorf("requests %s and %s were both allocated device %s", a.Request, b.Request, a.Device)
	case device.Conflict(reqA.name, reqB.name, reqB.gpu):
		return fmt.Errorf("requests %s and %s were allocated devices %s and %s, which cannot exist at the same time", a.Request, b.Request,
			a.Device, b.Device)
	}
	return nil
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
	return nil, cause.Errorf(cause.NotReady, "device %s does not exist now: the kubelet retries", req.name)
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

// allSteps returns all steps of the plan. The last one writes the CDI spec.
func (pl *plan) allSteps() []steps.Step {
	return append(slices.Clone(pl.steps), pl.spec)
}

// findDevice looks up the device's GPU in the inventory. It returns false if the GPU is not there.
// For virtual machines, NVIDIA's driver need not have the GPU.
func findDevice(s inventory.Snapshot, deviceName string) (deviceRequest, bool) {
	name, ok := device.ParseName(deviceName)
	if !ok {
		return deviceRequest{}, false
	}
	for _, g := range s.Node.Passthrough {
		if name.Passthrough && g.WholeName() == name.GPU {
			return deviceRequest{name: name, gpu: g}, true
		}
	}
	for _, g := range s.Node.GPUs {
		if g.WholeName() == name.GPU {
			return deviceRequest{name: name, gpu: g.GPU, gpuEdits: g.Edits, binding: g.Binding}, true
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

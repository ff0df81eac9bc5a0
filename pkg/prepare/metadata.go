package prepare

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	upstream "k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metadata"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

// limits has an attribute for each capacity of a shared device that a claim consumes. These
// attributes are only in the metadata, and one is missing if the share has no such limit.
var limits = map[string]resourceapi.QualifiedName{
	device.CapacityMemory: "memoryLimitBytes", device.CapacityCores: "coresLimitPercent", device.CapacityShares: "shares",
}

// describeDevices adds the claim's metadata to the plan's CDI spec and answer: what the files say,
// and for each request a CDI device that mounts its file. It is a CDI device of its own because a
// container may use only one of several requests that have the same device.
func (p *Preparer) describeDevices(pl *plan) error {
	m, r := pl.spec.Metadata, pl.record
	if m == nil {
		return nil
	}
	m.Requests = nil
	m.Claim = metadata.Claim{UID: r.ClaimUID, Namespace: r.Namespace, Name: r.Name, PodClaimName: m.PodClaimName}
	for i, d := range r.Devices {
		at := slices.IndexFunc(m.Requests, func(there metadata.Request) bool { return there.Name == d.Request })
		if at < 0 {
			edits, err := p.opts.Edits.MetadataEdits(m.Claim, d.Request)
			if err != nil {
				return cause.Wrap(cause.Claim, err)
			}
			at, m.Requests = len(m.Requests), append(m.Requests, metadata.Request{Name: d.Request})
			name := cdi.ClaimDeviceName(r.ClaimUID, "metadata-"+resourceclaim.BaseRequestRef(d.Request), nil)
			pl.spec.Devices = append(pl.spec.Devices, specs.Device{Name: name, ContainerEdits: edits})
			pl.answer[i].CDIDeviceIDs = append(pl.answer[i].CDIDeviceIDs, cdi.ClaimKind+"="+name)
		}
		m.Requests[at].Devices = append(m.Requests[at].Devices, upstream.Device{
			Driver: device.DriverName, Pool: d.Pool, Name: d.Device, Attributes: describe(d, pl.requests[i], pl.snapshot.Node.Driver),
		})
	}
	return nil
}

// describe returns the attributes with which a claim's device is published, and what only the
// claim's preparation decides: the UUID of its partition, and the limits of its share.
func describe(d checkpoint.Device, req deviceRequest, driver device.Driver) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	attributes := device.AllocatedAttributes(req.gpu, req.name, d.Fraction, driver)
	if d.MIGUUID != "" {
		attributes["uuid"] = resourceapi.DeviceAttribute{StringValue: &d.MIGUUID}
	}
	if req.name.Share && d.AdminAccess { // no share, and the kind of the others' shares is unknown
		delete(attributes, "sharing")
		delete(attributes, "memoryLimit")
	}
	for capacity, attribute := range limits {
		if amount, ok := d.ConsumedCapacity[capacity]; ok && !amount.IsZero() {
			attributes[attribute] = resourceapi.DeviceAttribute{IntValue: ptr.To(amount.Value())}
		}
	}
	return attributes
}

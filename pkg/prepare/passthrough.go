package prepare

import (
	"slices"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claim"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// planPassthrough plans the step that binds the GPU of the result, a device for virtual machines,
// to VFIO. It returns an error if the GPU cannot serve the device now.
func planPassthrough(r claim.Result, req *deviceRequest) error {
	facts := req.gpu.Passthrough
	switch {
	case r.AdminAccess:
		return cause.Errorf(cause.Claim, "request %s: device %s cannot be had with admin access: it belongs to one virtual machine",
			r.Request, r.Device)
	case facts == nil:
		return cause.Errorf(cause.Device, "request %s: the GPU of device %s cannot be passed to virtual machines now", r.Request, r.Device)
	}
	req.passthrough = &steps.Passthrough{GPU: req.name.GPU, Card: req.gpu.Card(), ByAdmin: facts.BoundByAdmin}
	if c, ok := r.Config.(*v1beta1.VfioDeviceConfig); ok && c.IOMMU != nil {
		req.passthrough.PreferIOMMUFD = c.IOMMU.BackendPolicy == v1beta1.IOMMUPreferIommuFD
		req.passthrough.APIDevice = c.IOMMU.EnableAPIDevice != nil && *c.IOMMU.EnableAPIDevice
	}
	return nil
}

// onlyPassthrough reports whether the claim has GPUs for virtual machines only, for which the node
// needs no NVIDIA driver.
func onlyPassthrough(r checkpoint.Record) bool {
	return !slices.ContainsFunc(r.Devices, func(d checkpoint.Device) bool {
		name, _ := device.ParseName(d.Device)
		return !name.Passthrough
	})
}

// adoptPassthrough replaces the planned passthrough by the recorded one, with the planned
// configuration. It returns false if the recorded steps are not those of the claim's devices.
func (pl *plan) adoptPassthrough() bool {
	recorded := steps.Of[*steps.Passthrough](pl.steps)
	for i := range pl.requests {
		req := &pl.requests[i]
		if !req.name.Passthrough {
			continue
		}
		at := slices.IndexFunc(recorded, func(s *steps.Passthrough) bool { return s.GPU == req.name.GPU })
		if at < 0 {
			return false
		}
		if asked := req.passthrough; asked != nil {
			recorded[at].PreferIOMMUFD, recorded[at].APIDevice = asked.PreferIOMMUFD, asked.APIDevice
		}
		req.passthrough = recorded[at]
		recorded = slices.Delete(recorded, at, at+1)
	}
	return len(recorded) == 0
}

// passthroughEdits returns the CDI edits of a GPU that is bound to VFIO. The container gets none of
// NVIDIA's files, also from a runtime that gives them to containers by itself.
func passthroughEdits(s *steps.Passthrough) specs.ContainerEdits {
	edits := specs.ContainerEdits{
		Env: []string{"NVIDIA_VISIBLE_DEVICES=void"}, DeviceNodes: []*specs.DeviceNode{{Path: s.Access.Node}},
	}
	if s.APIDevice {
		edits.DeviceNodes = append(edits.DeviceNodes, &specs.DeviceNode{Path: s.Access.API})
	}
	return edits
}

// wasReplaced reports whether another card than that of the record is at the device's PCI address.
// A GPU that NVIDIA's driver does not have shows no UUID.
func wasReplaced(d checkpoint.Device, req deviceRequest) bool {
	unknown := req.name.Passthrough && (d.GPUUUID == "" || req.gpu.UUID == "")
	return req.gpu.UUID != d.GPUUUID && !unknown
}

package driver

import (
	"encoding/json"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

// readyCondition is the one that Kubernetes proposes for a device that is set up as the claim asks.
const readyCondition = "Ready"

// givenDevice is a device of a claim as the claim got it.
type givenDevice struct {
	Pool, Device string
	ShareID      *types.UID
	Data         givenData
}

// givenData is what monitoring needs in order to find the device on the node. It is public: names and meanings are in docs/mig.md.
type givenData struct {
	// Type is that of the device's attribute: gpu or mig, gpu-share or mig-share.
	Type string `json:"type"`
	// UUID is the GPU's or the MIG device's, as nvidia-smi -L prints it in the container.
	UUID string `json:"uuid"`
	// ParentUUID is the GPU's.
	ParentUUID string `json:"parentUUID"`
	PCIBusID   string `json:"pciBusID,omitempty"`
	// The rest is a MIG device's: its profile, and where it is on the GPU.
	Profile           string            `json:"profile,omitempty"`
	Placement         *device.Placement `json:"placement,omitempty"`
	GPUInstanceID     *uint32           `json:"gpuInstanceID,omitempty"`
	ComputeInstanceID *uint32           `json:"computeInstanceID,omitempty"`
}

// given has it said, when it is asked for, which devices a prepared claim has.
func (d *Driver) given(claim types.UID) func() ([]givenDevice, error) {
	return func() ([]givenDevice, error) {
		given, err := d.preparer.Given(claim)
		return givenDevices(given, d.inv.Snapshot().Node.GPUs), err
	}
}

// givenDevices says of a prepared claim which devices it has. gpus are those of the node.
func givenDevices(given []prepare.Given, gpus []nvidia.GPU) []givenDevice {
	devices := make([]givenDevice, len(given))
	for i, g := range given {
		d := givenDevice{
			Pool: g.Pool, Device: g.Device.Device, ShareID: g.ShareID,
			Data: givenData{Type: "gpu", UUID: g.GPUUUID, ParentUUID: g.GPUUUID},
		}
		if at := slices.IndexFunc(gpus, func(n nvidia.GPU) bool { return n.WholeName() == g.GPU }); at >= 0 {
			d.Data.PCIBusID = string(gpus[at].PCIAddress)
		}
		if name, ok := device.ParseName(g.Device.Device); ok {
			d.Data.Type = typeOf(name)
		}
		if g.MIGUUID != "" {
			d.Data.UUID = g.MIGUUID
		}
		if g.Instance != nil && g.Compute != nil {
			d.Data.Profile, d.Data.Placement = g.Compute.Name, &g.Instance.Placement
			d.Data.GPUInstanceID, d.Data.ComputeInstanceID = &g.Instance.ID, &g.Compute.ID
		}
		devices[i] = d
	}
	return devices
}

// entry is the device as a claim's status has it, without the time of its condition.
func (g givenDevice) entry() (resourceapi.AllocatedDeviceStatus, error) {
	data, err := json.Marshal(g.Data)
	if err != nil {
		return resourceapi.AllocatedDeviceStatus{}, fmt.Errorf("encode device %s: %w", g.Device, err)
	}
	return resourceapi.AllocatedDeviceStatus{
		Driver: DriverName, Pool: g.Pool, Device: g.Device, ShareID: (*string)(g.ShareID), Data: &runtime.RawExtension{Raw: data},
		Conditions: []metav1.Condition{{Type: readyCondition, Status: metav1.ConditionTrue, Reason: "Prepared", Message: "The device is set up for the claim"}},
	}, nil
}

// ours is what a claim's status says of this driver's devices.
func ours(c *resourceapi.ResourceClaim) []resourceapi.AllocatedDeviceStatus {
	var entries []resourceapi.AllocatedDeviceStatus
	for _, e := range c.Status.Devices {
		if e.Driver == DriverName {
			entries = append(entries, *e.DeepCopy())
		}
	}
	return entries
}

// entries are what the claim's status is to say. A condition keeps its time for as long as its status stays.
func (c statusChange) entries(now metav1.Time) ([]resourceapi.AllocatedDeviceStatus, error) {
	entries := make([]resourceapi.AllocatedDeviceStatus, 0, len(c.said))
	if c.given == nil {
		for _, e := range c.said {
			entries = append(entries, *e.DeepCopy())
		}
	} else {
		given, err := c.given()
		if err != nil {
			return nil, fmt.Errorf("find out which devices the claim has: %w", err)
		}
		for _, g := range given {
			e, err := g.entry()
			if err != nil {
				return nil, err
			}
			ready := e.Conditions[0]
			ready.LastTransitionTime = now
			e.Conditions = nil
			if said := find(c.said, e); said != nil {
				e.Conditions = slices.Clone(said.Conditions)
			}
			meta.SetStatusCondition(&e.Conditions, ready)
			entries = append(entries, e)
		}
	}
	for _, l := range c.lost {
		for i := range entries {
			if entries[i].Device == l.device {
				meta.SetStatusCondition(&entries[i].Conditions, metav1.Condition{
					Type: readyCondition, Status: metav1.ConditionFalse, Reason: l.reason, Message: l.message, LastTransitionTime: now,
				})
			}
		}
	}
	return entries, nil
}

// find is the entry about the same device, or nil.
func find(entries []resourceapi.AllocatedDeviceStatus, e resourceapi.AllocatedDeviceStatus) *resourceapi.AllocatedDeviceStatus {
	for i, o := range entries {
		if o.Driver == e.Driver && o.Pool == e.Pool && o.Device == e.Device && equalIDs(o.ShareID, e.ShareID) {
			return &entries[i]
		}
	}
	return nil
}

func equalIDs(a, b *string) bool {
	return a == b || a != nil && b != nil && *a == *b
}

// saysAlready says whether writing the entries would change nothing but times.
func saysAlready(said, entries []resourceapi.AllocatedDeviceStatus) bool {
	return len(said) == len(entries) && !slices.ContainsFunc(entries, func(e resourceapi.AllocatedDeviceStatus) bool {
		o := find(said, e)
		if o == nil || !equalData(o.Data, e.Data) {
			return true
		}
		return slices.ContainsFunc(e.Conditions, func(c metav1.Condition) bool {
			was := meta.FindStatusCondition(o.Conditions, c.Type)
			return was == nil || was.Status != c.Status || was.Reason != c.Reason || was.Message != c.Message
		})
	})
}

// equalData compares what was written with what is to be: the API server may have put the keys into another order.
func equalData(a, b *runtime.RawExtension) bool {
	if a == nil || b == nil {
		return a == b
	}
	var x, y any
	if json.Unmarshal(a.Raw, &x) != nil || json.Unmarshal(b.Raw, &y) != nil {
		return false
	}
	return equality.Semantic.DeepEqual(x, y)
}

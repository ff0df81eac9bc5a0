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

// readyCondition is the condition type that Kubernetes suggests for a device that is ready for use
// by its claim.
const readyCondition = "Ready"

// statusDevice describes one device of a claim for the claim's status.
type statusDevice struct {
	Pool, Device string
	ShareID      *types.UID
	Data         statusDeviceData
}

// statusDeviceData is the data of a status entry. Monitoring uses it to find the device on the
// node. It is public API: docs/mig.md describes its fields.
type statusDeviceData struct {
	// Type is the device's attribute "type": gpu, mig, gpu-share or mig-share.
	Type string `json:"type"`
	// UUID is the UUID of the GPU or MIG device, as nvidia-smi -L prints it in the container.
	UUID string `json:"uuid"`
	// ParentUUID is the GPU's UUID.
	ParentUUID string `json:"parentUUID"`
	PCIBusID   string `json:"pciBusID,omitempty"`
	// The remaining fields are set for MIG devices only.
	Profile           string            `json:"profile,omitempty"`
	Placement         *device.Placement `json:"placement,omitempty"`
	GPUInstanceID     *uint32           `json:"gpuInstanceID,omitempty"`
	ComputeInstanceID *uint32           `json:"computeInstanceID,omitempty"`
}

// claimDevices returns a function that looks up the devices in the claim's checkpoint record and
// describes them for the claim's status.
func (d *Driver) claimDevices(claim types.UID) func() ([]statusDevice, error) {
	return func() ([]statusDevice, error) {
		devices, err := d.preparer.PreparedDevices(claim)
		return statusDevices(devices, d.inv.Snapshot().Node.GPUs), err
	}
}

// statusDevices describes a prepared claim's devices for the claim's status. gpus are the node's
// GPUs.
func statusDevices(prepared []prepare.PreparedDevice, gpus []nvidia.GPU) []statusDevice {
	devices := make([]statusDevice, len(prepared))
	for i, g := range prepared {
		d := statusDevice{
			Pool: g.Pool, Device: g.Device.Device, ShareID: g.ShareID,
			Data: statusDeviceData{Type: "gpu", UUID: g.GPUUUID, ParentUUID: g.GPUUUID},
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

// entry returns the device's entry for the claim's status, with the condition Ready. The caller
// sets the condition's transition time.
func (g statusDevice) entry() (resourceapi.AllocatedDeviceStatus, error) {
	data, err := json.Marshal(g.Data)
	if err != nil {
		return resourceapi.AllocatedDeviceStatus{}, fmt.Errorf("encode device %s: %w", g.Device, err)
	}
	return resourceapi.AllocatedDeviceStatus{
		Driver: DriverName, Pool: g.Pool, Device: g.Device, ShareID: (*string)(g.ShareID), Data: &runtime.RawExtension{Raw: data},
		Conditions: []metav1.Condition{{
			Type: readyCondition, Status: metav1.ConditionTrue, Reason: "Prepared", Message: "The device is set up for the claim"}},
	}, nil
}

// ownEntries returns this driver's entries in the claim's status.
func ownEntries(c *resourceapi.ResourceClaim) []resourceapi.AllocatedDeviceStatus {
	var entries []resourceapi.AllocatedDeviceStatus
	for _, e := range c.Status.Devices {
		if e.Driver == DriverName {
			entries = append(entries, *e.DeepCopy())
		}
	}
	return entries
}

// entries returns the entries to write to the claim's status. If the condition Ready has the same
// status (True or False) as in the current entry, it keeps its transition time.
func (c statusChange) entries(now metav1.Time) ([]resourceapi.AllocatedDeviceStatus, error) {
	entries := make([]resourceapi.AllocatedDeviceStatus, 0, len(c.current))
	if c.devices == nil {
		for _, e := range c.current {
			entries = append(entries, *e.DeepCopy())
		}
	} else {
		devices, err := c.devices()
		if err != nil {
			return nil, fmt.Errorf("look up the claim's devices: %w", err)
		}
		for _, g := range devices {
			e, err := g.entry()
			if err != nil {
				return nil, err
			}
			ready := e.Conditions[0]
			ready.LastTransitionTime = now
			e.Conditions = nil
			if current := findEntry(c.current, e); current != nil {
				e.Conditions = slices.Clone(current.Conditions)
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

// findEntry returns the entry in entries for the same device as e, or nil.
func findEntry(entries []resourceapi.AllocatedDeviceStatus, e resourceapi.AllocatedDeviceStatus) *resourceapi.AllocatedDeviceStatus {
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

// upToDate reports whether the entries in current (from the claim) and in entries (to be written)
// are equal except for their times.
func upToDate(current, entries []resourceapi.AllocatedDeviceStatus) bool {
	return len(current) == len(entries) && !slices.ContainsFunc(entries, func(e resourceapi.AllocatedDeviceStatus) bool {
		entry := findEntry(current, e)
		if entry == nil || !equalData(entry.Data, e.Data) {
			return true
		}
		return slices.ContainsFunc(e.Conditions, func(c metav1.Condition) bool {
			was := meta.FindStatusCondition(entry.Conditions, c.Type)
			return was == nil || was.Status != c.Status || was.Reason != c.Reason || was.Message != c.Message
		})
	})
}

// equalData compares the data of two status entries. It ignores the order of keys, which the API
// server may have changed.
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

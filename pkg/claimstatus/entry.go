package claimstatus

import (
	"encoding/json"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	metav1apply "k8s.io/client-go/applyconfigurations/meta/v1"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
)

// readyCondition is the condition type that Kubernetes suggests for a device that is ready for use
// by its claim.
const readyCondition = "Ready"

// deviceData is the data of a status entry. Monitoring uses it to find the device on the
// node. It is public API: docs/mig.md describes its fields.
type deviceData struct {
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

// newEntry returns the status entry of a prepared claim's device, with the condition Ready. The
// caller sets the condition's transition time.
func newEntry(d ledger.PreparedDevice) (resourceapi.AllocatedDeviceStatus, error) {
	data, err := json.Marshal(describe(d))
	if err != nil {
		return resourceapi.AllocatedDeviceStatus{}, fmt.Errorf("encode device %s: %w", d.Device.Device, err)
	}
	return resourceapi.AllocatedDeviceStatus{
		Driver: device.DriverName, Pool: d.Pool, Device: d.Device.Device, ShareID: (*string)(d.ShareID),
		Data: &runtime.RawExtension{Raw: data},
		Conditions: []metav1.Condition{{
			Type: readyCondition, Status: metav1.ConditionTrue, Reason: "Prepared", Message: "The device is set up for the claim"}},
	}, nil
}

func describe(d ledger.PreparedDevice) deviceData {
	data := deviceData{Type: "gpu", UUID: d.GPUUUID, ParentUUID: d.GPUUUID}
	if name, ok := device.ParseName(d.Device.Device); ok {
		data.Type, data.PCIBusID = name.Type(), string(name.PCIAddress())
	}
	if d.MIGUUID != "" {
		data.UUID = d.MIGUUID
	}
	if d.Instance != nil && d.Compute != nil {
		data.Profile, data.Placement = d.Compute.Name, &d.Instance.Placement
		data.GPUInstanceID, data.ComputeInstanceID = &d.Instance.ID, &d.Compute.ID
	}
	return data
}

// ownEntries returns this driver's entries in the claim's status.
func ownEntries(c *resourceapi.ResourceClaim) []resourceapi.AllocatedDeviceStatus {
	var entries []resourceapi.AllocatedDeviceStatus
	for _, e := range c.Status.Devices {
		if e.Driver == device.DriverName {
			entries = append(entries, *e.DeepCopy())
		}
	}
	return entries
}

// entries returns the entries to write to the claim's status. If the condition Ready has the same
// status (True or False) as in the current entry, it keeps its transition time.
func (u update) entries(claims Claims, now metav1.Time) ([]resourceapi.AllocatedDeviceStatus, error) {
	entries := make([]resourceapi.AllocatedDeviceStatus, 0, len(u.current))
	if u.lookUp {
		devices, err := claims.PreparedDevices(u.claim.UID)
		if err != nil {
			return nil, fmt.Errorf("look up the claim's devices: %w", err)
		}
		for _, d := range devices {
			e, err := newEntry(d)
			if err != nil {
				return nil, err
			}
			ready := e.Conditions[0]
			ready.LastTransitionTime = now
			e.Conditions = nil
			if current := findEntry(u.current, e); current != nil {
				e.Conditions = slices.Clone(current.Conditions)
			}
			meta.SetStatusCondition(&e.Conditions, ready)
			entries = append(entries, e)
		}
	} else {
		for _, e := range u.current {
			entries = append(entries, *e.DeepCopy())
		}
	}
	for _, l := range u.lost {
		for i := range entries {
			if entries[i].Device == l.device {
				meta.SetStatusCondition(&entries[i].Conditions, metav1.Condition{
					Type: readyCondition, Status: metav1.ConditionFalse, Reason: "Lost", Message: l.message, LastTransitionTime: now,
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

// applyConfiguration converts the status entry e to the type that server-side apply takes.
func applyConfiguration(e resourceapi.AllocatedDeviceStatus) *resourceapply.AllocatedDeviceStatusApplyConfiguration {
	a := resourceapply.AllocatedDeviceStatus().WithDriver(e.Driver).WithPool(e.Pool).WithDevice(e.Device)
	if e.ShareID != nil {
		a.WithShareID(*e.ShareID)
	}
	if e.Data != nil {
		a.WithData(*e.Data)
	}
	for _, c := range e.Conditions {
		condition := metav1apply.Condition().WithType(c.Type).WithStatus(c.Status).WithReason(c.Reason).
			WithMessage(c.Message).WithLastTransitionTime(c.LastTransitionTime)
		a.WithConditions(condition)
	}
	return a
}

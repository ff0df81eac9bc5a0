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
	"k8s.io/utils/ptr"

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

// updateEntries returns the status entries for the claim's devices, of which it has lost some.
// changed says whether they differ from the current entries. A condition keeps its transition time
// as long as its status stays the same.
func updateEntries(
	current []resourceapi.AllocatedDeviceStatus, devices []ledger.PreparedDevice, lost map[string]string, now metav1.Time,
) (entries []resourceapi.AllocatedDeviceStatus, changed bool, _ error) {
	changed = len(current) != len(devices)
	for _, d := range devices {
		data, err := json.Marshal(describe(d))
		if err != nil {
			return nil, false, fmt.Errorf("encode device %s: %w", d.Device.Device, err)
		}
		e := resourceapi.AllocatedDeviceStatus{
			Driver: device.DriverName, Pool: d.Pool, Device: d.Device.Device, ShareID: (*string)(d.ShareID),
			Data: &runtime.RawExtension{Raw: data},
		}
		if i := slices.IndexFunc(current, func(o resourceapi.AllocatedDeviceStatus) bool { return sameDevice(o, e) }); i < 0 {
			changed = true
		} else {
			e.Conditions = slices.Clone(current[i].Conditions)
			changed = changed || !equalData(current[i].Data, e.Data)
		}
		ready := metav1.Condition{
			Type: readyCondition, Status: metav1.ConditionTrue, Reason: "Prepared", Message: "The device is set up for the claim",
			LastTransitionTime: now,
		}
		if message, is := lost[e.Device]; is {
			ready.Status, ready.Reason, ready.Message = metav1.ConditionFalse, "Lost", message
		}
		if meta.SetStatusCondition(&e.Conditions, ready) {
			changed = true
		}
		entries = append(entries, e)
	}
	return entries, changed, nil
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

func sameDevice(a, b resourceapi.AllocatedDeviceStatus) bool {
	return a.Pool == b.Pool && a.Device == b.Device && ptr.Equal(a.ShareID, b.ShareID)
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

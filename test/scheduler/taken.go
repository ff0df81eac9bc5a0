package scheduler

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// Taken has the devices that are allocated to one claim alone, and the allocated shares of shared
// devices.
type Taken struct {
	devices  sets.Set[structured.DeviceID]
	shares   sets.Set[structured.SharedDeviceID]
	capacity structured.ConsumedCapacityCollection
}

// NewTaken returns an empty Taken.
func NewTaken() *Taken {
	return &Taken{sets.New[structured.DeviceID](), sets.New[structured.SharedDeviceID](), structured.NewConsumedCapacityCollection()}
}

// Take adds the devices and shares of allocation results. Results with admin access add nothing.
func (t *Taken) Take(results ...resourceapi.DeviceRequestAllocationResult) {
	for _, r := range results {
		id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
		switch {
		case ptr.Deref(r.AdminAccess, false):
		case r.ShareID == nil:
			t.devices.Insert(id)
		default:
			t.shares.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
			t.capacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
		}
	}
}

// Free removes the devices and shares of allocation results.
func (t *Taken) Free(results ...resourceapi.DeviceRequestAllocationResult) {
	for _, r := range results {
		id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
		switch {
		case ptr.Deref(r.AdminAccess, false):
		case r.ShareID == nil:
			t.devices.Delete(id)
		default:
			t.shares.Delete(structured.MakeSharedDeviceID(id, r.ShareID))
			t.capacity.Remove(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
		}
	}
}

// Clone returns a copy of t.
func (t *Taken) Clone() *Taken {
	return &Taken{t.devices.Clone(), t.shares.Clone(), t.capacity.Clone()}
}

// Len returns the number of allocated devices and shares.
func (t *Taken) Len() int { return t.devices.Len() + t.shares.Len() }

// Clear removes all devices and shares.
func (t *Taken) Clear() { *t = *NewTaken() }

func (t *Taken) state() structured.AllocatedState {
	return structured.AllocatedState{AllocatedDevices: t.devices, AllocatedSharedDeviceIDs: t.shares, AggregatedCapacity: t.capacity}
}

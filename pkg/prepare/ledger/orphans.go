package ledger

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// OrphanReason returns why the driver may unprepare the claim of record r without a call from the
// kubelet, or "" if it may not. The parameter "now" is the claim with r's name in the API server,
// or nil if there is none. An allocated claim is no orphan, even if no Pod reserves it.
func (l *Ledger) OrphanReason(r checkpoint.Record, now *resourceapi.ResourceClaim) (why string) {
	switch {
	case now == nil:
		return "it was deleted"
	case now.UID != r.ClaimUID:
		return "it was deleted, and another claim now has its name (UID " + string(now.UID) + ")"
	case now.Status.Allocation == nil:
		return "it is no longer allocated"
	}
	for _, d := range r.Devices {
		if !slices.ContainsFunc(now.Status.Allocation.Devices.Results, func(a resourceapi.DeviceRequestAllocationResult) bool {
			return a.Driver == device.DriverName && a.Pool == d.Pool && a.Device == d.Device && a.Request == d.Request &&
				ptr.Equal(a.ShareID, d.ShareID) && ptr.Deref(a.AdminAccess, false) == d.AdminAccess
		}) {
			return "it is no longer allocated device " + d.Device
		}
	}
	return ""
}

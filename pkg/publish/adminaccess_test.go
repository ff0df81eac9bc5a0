package publish

import (
	"slices"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fakeapi"
)

// recordsOnDisk answers which devices claims hold from real records.
type recordsOnDisk struct {
	*fakeRecords
	ledger *ledger.Ledger
}

func (r recordsOnDisk) AllocatedDevices() (device.Allocations, error) {
	return r.ledger.AllocatedDevices()
}

// On a cluster without device taints, the slices keep an unhealthy device that a claim holds. A
// claim with admin access takes nothing from other claims, so it keeps no device there.
func TestAdminAccessKeepsNoUnhealthyDevice(t *testing.T) {
	s := readyWith("0000:43:00.0", "0000:1b:00.0")
	_, all := newMarker(t, Features{}, s, &health.View{}, nil)
	for _, admin := range []bool{false, true} {
		records, err := checkpoint.Open(t.TempDir(), durable.OS{})
		if err != nil {
			t.Fatal(err)
		}
		held := checkpoint.Device{Device: secondGPU, GPU: secondGPU, AdminAccess: admin}
		if err := records.Save(checkpoint.Record{ClaimUID: "uid", State: checkpoint.Prepared, Devices: []checkpoint.Device{held}}); err != nil {
			t.Fatal(err)
		}
		u := newPublishingNode(t, fakeapi.New(), s)
		u.publisher.opts.Claims = recordsOnDisk{u.records, ledger.New(records, "boot", u.inv)}
		u.health.view = viewWithXIDs(t, time.Now(), s, 79)
		marked := (&publication{Publisher: u.publisher, offer: offer{slices: all, snapshot: s}}).firstMark(t.Context())
		var names []string
		for _, d := range marked[0].Devices {
			names = append(names, d.Name)
		}
		want := []string{firstGPU, secondGPU}
		if admin {
			want = []string{firstGPU}
		}
		if !slices.Equal(names, want) {
			t.Errorf("admin access %v: published %v, want %v", admin, names, want)
		}
	}
}

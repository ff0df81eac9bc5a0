// The ledger answers from the records alone: from their file names where those suffice, and also
// while records are unreadable.

package ledger_test

import (
	"fmt"
	"maps"
	"path/filepath"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

const (
	gpu0  = "gpu-0000-1b-00-0"
	gpu1  = "gpu-0000-1c-00-0"
	part  = gpu1 + "-mig-19-6"
	share = gpu0 + "-share"
)

// node is a node's records and the ledger that reads them.
type node struct {
	*ledger.Ledger
	disk    *durabletest.Disk
	records *checkpoint.Store
}

func newNode(t *testing.T) node {
	t.Helper()
	disk := durabletest.New()
	records, err := checkpoint.Open("/state", disk)
	if err != nil {
		t.Fatal(err)
	}
	return node{ledger.New(records, "boot-1", nil), disk, records}
}

// save saves the record of the claim called name, which has these devices.
func (n node) save(t *testing.T, name string, state checkpoint.State, devices ...checkpoint.Device) checkpoint.Record {
	t.Helper()
	r := checkpoint.Record{
		ClaimUID: types.UID("uid-" + name), Namespace: "default", Name: name, State: state, BootID: "boot-1", Devices: devices,
	}
	if err := n.records.Save(r); err != nil {
		t.Fatal(err)
	}
	return r
}

// makeUnreadable damages every record on the disk.
func (n node) makeUnreadable() {
	for _, name := range n.disk.Names("/state/claims") {
		n.disk.Put(filepath.Join("/state/claims", name), []byte("{"))
	}
}

// of returns the record's entry for the device, as Prepare stores it.
func of(name string) checkpoint.Device {
	parsed, _ := device.ParseName(name)
	return checkpoint.Device{Request: "r", Pool: "node-1", Device: name, GPU: parsed.GPU}
}

func TestPreparedClaimsLeavesOutUnfinishedClaims(t *testing.T) {
	n := newNode(t)
	n.save(t, "whole", checkpoint.Prepared, of(gpu0))
	n.save(t, "unfinished", checkpoint.Preparing, of(gpu1))
	claims, err := n.PreparedClaims()
	if err != nil || len(claims) != 1 || claims[0].Name != "whole" || claims[0].ClaimUID != "uid-whole" {
		t.Errorf("%v, %v", claims, err)
	}
}

func TestDevicesAreKnownThoughRecordsAreUnreadable(t *testing.T) {
	n := newNode(t)
	n.save(t, "part", checkpoint.Prepared, of(part))
	n.save(t, "unfinished", checkpoint.Preparing, of(gpu1))
	n.save(t, "share", checkpoint.Prepared, of(share))
	for _, when := range []string{"readable", "unreadable"} {
		want := ledger.Usage{Claims: 3, GPUs: 2, Partitions: 1}
		if got, err := n.Usage(); err != nil || got != want {
			t.Errorf("%s: usage %+v, %v", when, got, err)
		}
		devices, err := n.AllocatedDevices()
		if err != nil || !maps.Equal(devices.Exclusive, map[string]string{part: "uid-part", gpu1: "uid-unfinished"}) {
			t.Errorf("%s: exclusive devices %v, %v", when, devices.Exclusive, err)
		}
		if !maps.Equal(devices.Shared, map[string]bool{share: false}) {
			t.Errorf("%s: shared devices %v", when, devices.Shared)
		}
		for gpu, want := range map[string]bool{gpu0: true, gpu1: true, "gpu-0000-99-00-0": false} {
			if used, err := n.InUse(gpu); err != nil || used != want {
				t.Errorf("%s: %s in use: %v, %v", when, gpu, used, err)
			}
		}
		n.makeUnreadable()
	}
}

func TestVirtualMachineIsNoUseByContainers(t *testing.T) {
	n := newNode(t)
	many := []checkpoint.Device{of(gpu0 + "-vfio")}
	for i := range 20 { // too many for the name of the record's file
		many = append(many, of(fmt.Sprintf("gpu-0000-%02x-00-0-vfio", 0x40+i)))
	}
	n.save(t, "machine", checkpoint.Prepared, many...)
	n.save(t, "part", checkpoint.Reverting, of(part))
	for gpu, want := range map[string]bool{gpu0: false, "gpu-0000-41-00-0": false, gpu1: true} {
		if used, err := n.InUseByContainers(gpu); err != nil || used != want {
			t.Errorf("%s: %v, %v", gpu, used, err)
		}
	}
	n.makeUnreadable() // any GPU may be one of the many
	for _, gpu := range []string{gpu0, gpu1, "gpu-0000-99-00-0"} {
		if used, err := n.InUseByContainers(gpu); err != nil || !used {
			t.Errorf("unreadable: %s: %v, %v", gpu, used, err)
		}
	}
}

func TestOrphanReason(t *testing.T) {
	n := newNode(t)
	r := n.save(t, "c", checkpoint.Prepared, of(gpu0))
	// claim returns the claim c as it is in the API server, allocated these devices.
	claim := func(devices ...string) *resourceapi.ResourceClaim {
		c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c", UID: "uid-c"}}
		c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod", UID: "uid-pod"}}
		c.Status.Allocation = &resourceapi.AllocationResult{}
		for _, d := range devices {
			c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results,
				resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: device.DriverName, Pool: "node-1", Device: d})
		}
		return c
	}
	unreserved := func(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
		c.Status.ReservedFor = nil
		return c
	}
	replaced := claim(gpu0)
	replaced.UID = "another"
	deallocated := claim()
	deallocated.Status.Allocation = nil
	group := resourceapi.ResourceClaimConsumerReference{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "gang", UID: "uid-of-gang"}
	ofGroup := claim(gpu0)
	ofGroup.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{group}
	onlyAdmin := claim(gpu0)
	onlyAdmin.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(true)
	leftByGroup := unreserved(claim()) // the claim controller deallocates with the last reservation
	leftByGroup.Status.Allocation = nil
	for name, c := range map[string]struct {
		now      *resourceapi.ResourceClaim
		orphaned bool
	}{
		"deleted":                   {nil, true},
		"replaced":                  {replaced, true},
		"not allocated":             {deallocated, true},
		"allocated another device":  {claim(gpu1), true},
		"another device and no Pod": {unreserved(claim(gpu1)), true},
		"it with admin access":      {onlyAdmin, true},
		"its PodGroup was deleted":  {leftByGroup, true},
		"unchanged":                 {claim(gpu0), false},
		"reserved for a PodGroup":   {ofGroup, false},
		"between two Pods":          {unreserved(claim(gpu0)), false},
		"has a further device":      {claim(gpu0, gpu1), false},
	} {
		if why := n.OrphanReason(r, c.now); why != "" != c.orphaned {
			t.Errorf("%s: %q", name, why)
		}
	}
}

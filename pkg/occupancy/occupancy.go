// Package occupancy says what the node has, which claims have it, and what is free, for metrics.
//
// It computes that at each scrape from the node view, the claims' records and the published slices,
// and keeps nothing. It writes nothing and reads no hardware. What is free is what the scheduler
// could still allocate from the slices. A claim that is allocated but not prepared yet is not known
// here, so its device counts as free for a moment.
package occupancy

import (
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
)

// Source has what the occupancy is computed from.
type Source struct {
	NodeName  string
	Node      interface{ View() *nodeview.View }
	Publisher interface {
		// Slices returns the published slices. ok is false if another plugin instance publishes.
		Slices() (_ []resourceslice.Slice, ok bool)
	}
	Claims Claims
}

// Claims reads the records of claims.
type Claims interface {
	ListPrepared() ([]ledger.PreparedClaim, error)
	AllocatedDevices() (device.Allocations, error)
}

// Read returns the node's occupancy now. ok is false in a plugin instance that does not publish, so
// that no two instances of a node report it, and if the records cannot be read.
func (s Source) Read() (_ metrics.Occupancy, ok bool) {
	published, leading := s.Publisher.Slices()
	claims, err := s.Claims.ListPrepared()
	allocated, allocatedErr := s.Claims.AllocatedDevices()
	if !leading || err != nil || allocatedErr != nil {
		return metrics.Occupancy{}, false
	}
	taken := allocated.Names()
	now := metrics.Occupancy{Node: s.NodeName, Devices: s.devices(), Allocations: allocations(claims)}
	now.FreeGPUs, now.Partitions = free(published, taken)
	exists := map[string]bool{}
	for _, d := range now.Devices {
		exists[d.Name] = true
	}
	now.Shares = shares(published, exists, used(claims))
	return now, true
}

// devices returns the node's GPUs and their MIG devices.
func (s Source) devices() []metrics.Device {
	var all []metrics.Device
	for _, g := range s.Node.View().GPUs {
		whole := metrics.Device{
			Name: g.WholeName(), UUID: g.UUID, PCIBusID: string(g.PCIAddress), Model: g.ProductName, ParentUUID: g.UUID,
		}
		all = append(all, whole)
		if g.MIG == nil {
			continue
		}
		for _, i := range g.MIG.Instances {
			for _, c := range i.Compute {
				part := whole
				part.Name, part.UUID, part.Profile, part.Instance = i.DeviceName(whole.Name, c), c.UUID, c.Name, fmt.Sprint(i.ID)
				all = append(all, part)
			}
		}
	}
	return all
}

// allocations returns the devices of the claims.
func allocations(claims []ledger.PreparedClaim) []metrics.Allocation {
	var all []metrics.Allocation
	for _, c := range claims {
		for _, d := range c.Prepared {
			a := metrics.Allocation{
				Namespace: c.Namespace, Claim: c.Name, Pod: c.Pod,
				Device: unshared(d.Device.Device), UUID: d.GPUUUID, ParentUUID: d.GPUUUID, AdminAccess: d.AdminAccess,
			}
			if d.MIGUUID != "" {
				a.UUID = d.MIGUUID
			}
			if d.Instance != nil {
				a.Instance = fmt.Sprint(d.Instance.ID)
			}
			all = append(all, a)
		}
	}
	return all
}

// unshared returns the name of the device that is shared, if name is that of a share.
func unshared(name string) string {
	if n, ok := device.ParseName(name); ok {
		return n.Unshared().String()
	}
	return name
}

// used returns how much of each resource of each shared device the claims have.
func used(claims []ledger.PreparedClaim) map[string]map[string]*resource.Quantity {
	all := map[string]map[string]*resource.Quantity{}
	for _, c := range claims {
		for _, d := range c.Prepared {
			if d.AdminAccess || len(d.ConsumedCapacity) == 0 {
				continue
			}
			of := all[d.Device.Device]
			if of == nil {
				of = map[string]*resource.Quantity{}
				all[d.Device.Device] = of
			}
			for name, amount := range d.ConsumedCapacity {
				if of[name] == nil {
					of[name] = &resource.Quantity{}
				}
				of[name].Add(amount)
			}
		}
	}
	return all
}

// shares returns the resources of the shared devices that exist or of which claims have shares. It
// leaves out shares of partitions that do not exist yet, because these are many.
func shares(published []resourceslice.Slice, exists map[string]bool, used map[string]map[string]*resource.Quantity) []metrics.Share {
	var all []metrics.Share
	for _, slice := range published {
		for _, d := range slice.Devices {
			if d.AllowMultipleAllocations == nil || !*d.AllowMultipleAllocations || !exists[unshared(d.Name)] && used[d.Name] == nil {
				continue
			}
			for _, name := range slices.Sorted(maps.Keys(d.Capacity)) {
				total := d.Capacity[name].Value
				share := metrics.Share{Device: unshared(d.Name), Resource: string(name), Capacity: total.AsApproximateFloat64()}
				if amount := used[d.Name][string(name)]; amount != nil {
					share.Used = amount.AsApproximateFloat64()
				}
				all = append(all, share)
			}
		}
	}
	return all
}

// Package inventorytest fakes an inventory for unit tests. The test sets what a scan finds.
package inventorytest

import (
	"sync"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// Inventory is an inventory that scans nothing.
type Inventory struct {
	mu sync.Mutex
	s  inventory.Snapshot
}

// New returns an inventory with the snapshot s.
func New(s inventory.Snapshot) *Inventory { return &Inventory{s: s} }

// Snapshot returns the snapshot that was set last.
func (i *Inventory) Snapshot() inventory.Snapshot {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.s
}

// Set sets the snapshot.
func (i *Inventory) Set(s inventory.Snapshot) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.s = s
}

// RequestScan does nothing.
func (*Inventory) RequestScan() {}

// Ready returns the snapshot of a node that is ready and has a GPU without MIG at each address.
func Ready(addresses ...device.PCIAddress) inventory.Snapshot {
	s := inventory.Snapshot{Ready: true, Known: true}
	s.Node.Driver = device.Driver{Version: "580.65.06", CUDAVersion: "13.0"}
	for _, a := range addresses {
		s.Node.GPUs = append(s.Node.GPUs, nvidia.GPU{GPU: device.GPU{
			PCIAddress: a, UUID: "GPU-" + string(a), ProductName: "NVIDIA H100", MemoryBytes: 80 << 30,
		}})
	}
	return s
}

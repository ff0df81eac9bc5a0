package driver

import (
	"sync"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fakeapi"
)

const firstGPU, secondGPU = "gpu-0000-1b-00-0", "gpu-0000-43-00-0"

var (
	apiServer      = fakeapi.New
	prependReactor = fakeapi.Prepend
	published      = fakeapi.Devices
	mustList       = fakeapi.Slices
	eventually     = fakeapi.Eventually
	storedWrites   = fakeapi.SliceWrites
)

// fakeInventory fakes an inventory. It returns the snapshot that the test has set.
type fakeInventory struct {
	mu sync.Mutex
	s  inventory.Snapshot
}

func (f *fakeInventory) Snapshot() inventory.Snapshot {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.s
}

func (f *fakeInventory) RequestScan() {}

func (f *fakeInventory) set(s inventory.Snapshot) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.s = s
}

func readyWith(addresses ...device.PCIAddress) inventory.Snapshot {
	s := inventory.Snapshot{Ready: true, Known: true}
	s.Node.Driver = device.Driver{Version: "580.65.06", CUDAVersion: "13.0"}
	for _, a := range addresses {
		s.Node.GPUs = append(s.Node.GPUs, nvidia.GPU{GPU: device.GPU{
			PCIAddress: a, UUID: "GPU-" + string(a), ProductName: "NVIDIA H100", MemoryBytes: 80 << 30,
		}})
	}
	return s
}

const gpuName = "gpu-0000-1b-00-0"

// snapshotOfHalves returns a snapshot with one GPU, which has two memory slices and can be split
// into halves.
func snapshotOfHalves() inventory.Snapshot {
	return inventory.Snapshot{Ready: true, Known: true, Node: nvidia.Node{GPUs: []nvidia.GPU{{GPU: device.GPU{
		PCIAddress: "0000:1b:00.0", UUID: "GPU-1", ProductName: "NVIDIA H100", MemoryBytes: 80 << 30,
		MIG: &device.MIG{
			Profiles: []device.Profile{{ID: 9, Name: "3g.40gb", Slices: 3, MaxInstances: 2, MemoryBytes: 40 << 30, Size: 1, Starts: []uint32{0, 1}}},
		},
	}}}}}
}

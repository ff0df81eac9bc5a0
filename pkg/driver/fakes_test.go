package driver

import (
	"context"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fakeapi"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/inventorytest"
)

const firstGPU, secondGPU = "gpu-0000-1b-00-0", "gpu-0000-43-00-0"

var (
	apiServer      = fakeapi.New
	prependReactor = fakeapi.Prepend
	published      = fakeapi.Devices
	mustList       = fakeapi.Slices
	eventually     = fakeapi.Eventually
	storedWrites   = fakeapi.SliceWrites
	readyWith      = inventorytest.Ready
)

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

// watchNothing is a hardware watcher that runs and reports no event and no answer.
func watchNothing(ctx context.Context, report func(device.Signal)) error {
	report(device.Signal{Watcher: &device.WatcherState{Up: true, Events: true}})
	<-ctx.Done()
	return nil
}

func noWorkers(context.Context) error { return nil }

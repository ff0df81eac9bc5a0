package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory/preview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// The specs have what is offered: a GPU without MIG mode whole, one in MIG mode by its MIG devices.
func TestInventoryShowsCDISpecsOfOfferedDevices(t *testing.T) {
	gpu := func(address device.PCIAddress, minor int, mig *device.MIG) nvidia.GPU {
		node := &specs.DeviceNode{Path: fmt.Sprintf("/dev/nvidia%d", minor)}
		return nvidia.GPU{
			GPU:   device.GPU{PCIAddress: address, UUID: "GPU-" + string(address), Minor: minor, MemoryBytes: 1 << 30, MIG: mig},
			Edits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{node}},
		}
	}
	place := device.Placement{Start: 4, Size: 1}
	instance := device.Instance{ID: 7, ProfileID: 19, Placement: place, Minor: 66, Compute: []device.ComputeInstance{
		{Name: "1g.10gb", UUID: "MIG-1", Placement: device.Placement{Size: 1}, Minor: 67},
	}}
	profile := device.Profile{ID: 19, Name: "1g.10gb", Size: 1, Starts: []uint32{0, 1, 2, 3, 4, 5, 6}, Slices: 1, MaxInstances: 7}
	mig := func(instances ...device.Instance) *device.MIG {
		return &device.MIG{Enabled: true, Profiles: []device.Profile{profile}, Instances: instances}
	}
	node := nvidia.Node{
		Common: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidiactl"}}},
		GPUs:   []nvidia.GPU{gpu("0000:1b:00.0", 0, nil), gpu("0000:1c:00.0", 1, mig()), gpu("0000:1d:00.0", 2, mig(instance))},
	}
	offer, err := preview.Rules{}.Offer(node)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := show(&out, "cdi", nvidia.Paths{Proc: t.TempDir()}, "", offer, nil); err != nil {
		t.Fatal(err)
	}
	var kinds, devices []string
	for decoder := json.NewDecoder(strings.NewReader(out.String())); decoder.More(); {
		var spec specs.Spec
		if err := decoder.Decode(&spec); err != nil {
			t.Fatal(err)
		}
		kinds = append(kinds, spec.Kind)
		for _, d := range spec.Devices {
			line := d.Name
			for _, n := range d.ContainerEdits.DeviceNodes {
				line += " " + n.Path
			}
			devices = append(devices, line)
		}
	}
	want := []string{
		"driver", "claim-gpu-0000-1b-00-0 /dev/nvidia0",
		"claim-gpu-0000-1d-00-0-mig-19-4 /dev/nvidia2 /dev/nvidia-caps/nvidia-cap66 /dev/nvidia-caps/nvidia-cap67",
	}
	if !slices.Equal(kinds, []string{"k8s.gpu.nvidia.com/base", "k8s.gpu.nvidia.com/claim"}) || !slices.Equal(devices, want) {
		t.Errorf("%v\n%s\nwant\n%s", kinds, strings.Join(devices, "\n"), strings.Join(want, "\n"))
	}
}

func TestInventoryWithoutGPUsHasNoCDISpec(t *testing.T) {
	var out strings.Builder
	if err := show(&out, "cdi", nvidia.Paths{}, "", preview.Offer{}, nil); err != nil || out.Len() != 0 {
		t.Errorf("%q, %v", out.String(), err)
	}
}

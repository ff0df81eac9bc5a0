package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory/preview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

func TestInventoryShowsCDISpecs(t *testing.T) {
	node := nvidia.Node{
		Common: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidiactl"}}},
		GPUs: []nvidia.GPU{{
			GPU:   device.GPU{PCIAddress: "0000:1b:00.0"},
			Edits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidia0"}}},
		}},
	}
	var out strings.Builder
	if err := show(&out, "cdi", "", preview.Offer{Node: node}, nil); err != nil {
		t.Fatal(err)
	}
	var kinds, devices []string
	for decoder := json.NewDecoder(strings.NewReader(out.String())); decoder.More(); {
		var spec specs.Spec
		if err := decoder.Decode(&spec); err != nil {
			t.Fatal(err)
		}
		kinds, devices = append(kinds, spec.Kind), append(devices, spec.Devices[0].Name)
	}
	if !slices.Equal(kinds, []string{"k8s.gpu.nvidia.com/base", "k8s.gpu.nvidia.com/claim"}) || !slices.Equal(devices,
		[]string{"driver", "claim-gpu-0000-1b-00-0"}) {
		t.Errorf("%v %v:\n%s", kinds, devices, out.String())
	}
}

func TestInventoryWithoutGPUsHasNoCDISpec(t *testing.T) {
	var out strings.Builder
	if err := show(&out, "cdi", "", preview.Offer{}, nil); err != nil || out.Len() != 0 {
		t.Errorf("%q, %v", out.String(), err)
	}
}

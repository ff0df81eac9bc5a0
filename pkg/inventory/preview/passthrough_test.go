package preview

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// The table names each GPU that NVML does not list, and says whether virtual machines can get it.
func TestTableListsGPUsThatNVMLDoesNotList(t *testing.T) {
	sysfsOnly := func(address device.PCIAddress, p *device.Passthrough, refusal string) device.GPU {
		return device.GPU{PCIAddress: address, Passthrough: p, NoPassthrough: refusal}
	}
	bound := &device.Passthrough{BoundByAdmin: true, HasDriver: true}
	node := nodeWith("0000:1b:00.0")
	node.Passthrough = []device.GPU{
		sysfsOnly("0000:aa:00.0", bound, ""), sysfsOnly("0000:bb:00.0", bound, ""), sysfsOnly("0000:cc:00.0", bound, ""),
		sysfsOnly("0000:dd:00.0", nil, "it has no IOMMU group"), sysfsOnly("0000:ee:00.0", &device.Passthrough{}, ""),
	}
	for _, a := range []device.PCIAddress{"0000:aa:00.0", "0000:bb:00.0", "0000:cc:00.0"} {
		node.Problems = append(node.Problems, nvidia.Problem{PCIAddress: a, Message: "bound to the kernel driver vfio-pci, not to nvidia"})
	}
	off := []device.PassthroughRule{{GPUs: "0000:cc:00.0", Enabled: ptr.To(false)}}
	policies, errs := device.PassthroughSettings{Enabled: ptr.To(true), Rules: off}.Policies(nil)
	if errs != nil {
		t.Fatal(errs)
	}
	rules := Rules{Policies: policies, Records: records{inUse: "gpu-0000-bb-00-0"}}
	var out strings.Builder
	offer := previewOf(t, rules, node)
	offer.Holders = map[device.PCIAddress][]nvidia.Process{"0000:1b:00.0": {{PID: 4711, Name: "python"}}}
	if err := WriteTable(&out, offer); err != nil {
		t.Fatal(err)
	}
	want := `Driver 580.65.06, CUDA 13.0

NAME              PRODUCT      MEMORY  NUMA  PCIE ROOT  MINOR  UUID
gpu-0000-1b-00-0  NVIDIA H200  1Gi     -     -          0      GPU-0000:1b:00.0
gpu-0000-aa-00-0  -            -       -     -          -      -
gpu-0000-bb-00-0  -            -       -     -          -      -

NAME              MIG POLICY  DEVICES OFFERED
gpu-0000-1b-00-0  -           1 x whole
gpu-0000-aa-00-0  -           1 x whole for a virtual machine
gpu-0000-bb-00-0  -           1 x whole for a virtual machine

Not listed by NVML:
  gpu-0000-aa-00-0: bound to VFIO by no claim: for virtual machines only
  gpu-0000-bb-00-0: a claim has it for a virtual machine
  gpu-0000-cc-00-0: bound to the kernel driver vfio-pci, not to nvidia; not for virtual machines: passthrough is off for it
  gpu-0000-dd-00-0: NVML does not list it; not for virtual machines: it has no IOMMU group
  gpu-0000-ee-00-0: NVML does not list it

Not offered, or only in part:
  gpu-0000-1b-00-0: not offered to virtual machines: passthrough is off in the plugin's settings, so it may not bind GPUs to VFIO
  gpu-0000-aa-00-0: a VFIO driver has the GPU and no claim does, so only virtual machines can get it: to give it back to its driver, ` +
		"write on the node for its PCI address A, and for the other functions of its slot: echo > /sys/bus/pci/devices/A/driver_override && " +
		"echo A > /sys/bus/pci/devices/A/driver/unbind && echo A > /sys/bus/pci/drivers_probe\n" + `
Open in other processes:
  gpu-0000-1b-00-0: python (process 4711)
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}

	node.Driver, node.GPUs = device.Driver{}, nil
	out.Reset()
	p := previewOf(t, rules, node)
	if err := WriteTable(&out, p); err != nil || !strings.Contains(out.String(), "Driver missing") ||
		!strings.Contains(out.String(), "gpu-0000-ee-00-0: no kernel driver has it, and NVIDIA's driver is missing") {
		t.Errorf("%s%v", &out, err)
	}
	rules.Records = records{inUse: "gpu-0000-bb-00-0", inPods: "gpu-0000-ee-00-0"}
	if left := previewOf(t, rules, node).Node.GPUs; len(left) != 2 {
		t.Errorf("a claim has gpu-0000-ee-00-0 for containers, and virtual machines are offered %+v", left)
	}
	if slices := p.Slices("gpu.nvidia.com", "node"); len(slices) != 1 || len(slices[0].Spec.Devices) != 3 {
		t.Errorf("%+v", slices)
	}
}

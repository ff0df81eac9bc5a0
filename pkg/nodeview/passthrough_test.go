package nodeview

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

func passthrough(t *testing.T, s device.PassthroughSettings) device.Policies {
	t.Helper()
	p, errs := s.Policies(nil)
	if errs != nil {
		t.Fatal(errs)
	}
	return p
}

// sysfsOnly is a GPU that NVML does not list.
func sysfsOnly(a device.PCIAddress, bound bool) device.GPU {
	return device.GPU{PCIAddress: a, Passthrough: &device.Passthrough{BoundByAdmin: bound, HasDriver: bound}}
}

func preparable(n *Node) (addresses []device.PCIAddress) {
	s := n.View().Preparable
	if !s.Ready {
		return nil
	}
	for _, g := range s.Node.GPUs {
		addresses = append(addresses, g.PCIAddress)
	}
	return addresses
}

func TestGPUBoundByAdminIsAddedWherePassthroughIsOn(t *testing.T) {
	const other = device.PCIAddress("0000:aa:00.0")
	s := inventory.Snapshot{Ready: true, Known: true, Node: nvidia.Node{
		Driver: device.Driver{Version: "580.65.06"}, GPUs: []nvidia.GPU{{GPU: gpu(first)}},
		Passthrough: []device.GPU{sysfsOnly(other, true), sysfsOnly("0000:bb:00.0", false)},
		Problems:    []nvidia.Problem{{PCIAddress: other, Message: "bound to vfio-pci"}},
	}}
	w := newWorld(s)
	n := New(fakeInventory{w}, fakeHealth{w}, fakeReference{w}, w.inUse)
	expect := func(when string, want int) {
		t.Helper()
		if got := preparable(n); len(got) != want {
			t.Errorf("%s: the node has %v", when, got)
		}
	}
	n.SetConfigured(passthrough(t, device.PassthroughSettings{Enabled: ptr.To(true)}))
	expect("before the annotation is known", 1)
	n.SetNodePolicies(device.Policies{})
	expect("on", 2)
	if problems := n.View().Offered.Node.Problems; len(problems) != 0 {
		t.Errorf("the GPU is offered with problem %v", problems)
	}
	notThis := []device.PassthroughRule{{GPUs: string(other), Enabled: ptr.To(false)}}
	n.SetNodePolicies(passthrough(t, device.PassthroughSettings{Rules: notThis}))
	expect("off for this GPU", 1)
	if problems := n.View().Offered.Node.Problems; len(problems) != 1 {
		t.Errorf("the GPU is not offered, with problems %v", problems)
	}
}

// A node that never had NVIDIA's driver offers its GPUs. One that waits for the driver does not.
func TestNodeWithoutDriverOffersItsGPUs(t *testing.T) {
	nouveau := device.GPU{PCIAddress: first, Passthrough: &device.Passthrough{HasDriver: true}}
	for name, c := range map[string]struct {
		driver, code string
		gpu          device.GPU
		want         int
	}{
		"no driver":                {"", inventory.CodeDriverMissing, sysfsOnly(first, false), 1},
		"driver is reloaded":       {"580.65.06", inventory.CodeDriverMissing, sysfsOnly(first, false), 0},
		"another driver has it":    {"", inventory.CodeDriverMissing, nouveau, 0},
		"cannot be passed on":      {"", inventory.CodeDriverMissing, device.GPU{PCIAddress: first, NoPassthrough: "no IOMMU"}, 0},
		"no scan":                  {"", inventory.CodeScanFailed, sysfsOnly(first, false), 0},
		"bound by admin, no other": {"580.65.06", inventory.CodeNoGPU, sysfsOnly(first, true), 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(inventory.Snapshot{Code: c.code, Reason: "why", Since: time.Now(), Node: nvidia.Node{
					Driver: device.Driver{Version: c.driver}, Passthrough: []device.GPU{c.gpu},
				}})
				n := New(fakeInventory{w}, fakeHealth{w}, fakeReference{w}, w.inUse)
				n.SetConfigured(passthrough(t, device.PassthroughSettings{Enabled: ptr.To(true)}))
				n.SetNodePolicies(device.Policies{})
				if got := preparable(n); c.code == inventory.CodeDriverMissing && len(got) != 0 {
					t.Errorf("at once the node has %v", got)
				}
				<-time.After(driverGrace)
				n.Update()
				if got := preparable(n); len(got) != c.want {
					t.Errorf("the node has %v", got)
				}
			})
		})
	}
}

// After a reboot the driver may come late, and a claim of the last boot gets its partition or whole
// GPU again. Until its record is gone, no virtual machine may have that GPU.
func TestGPUThatAClaimHasForContainersIsNotForVirtualMachines(t *testing.T) {
	for name, c := range map[string]struct {
		bound   bool
		usedErr error
	}{
		"no driver": {}, "bound to VFIO at boot": {bound: true}, "unreadable directory": {usedErr: errors.New("I/O error")},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(inventory.Snapshot{Code: inventory.CodeDriverMissing, Reason: "no driver", Since: time.Now(), Node: nvidia.Node{
					Passthrough: []device.GPU{sysfsOnly(first, c.bound), sysfsOnly(second, c.bound)},
				}})
				w.used, w.usedErr = map[string]bool{first.WholeName(): true}, c.usedErr
				n := New(fakeInventory{w}, fakeHealth{w}, fakeReference{w}, w.inUse)
				n.SetConfigured(passthrough(t, device.PassthroughSettings{Enabled: ptr.To(true)}))
				n.SetNodePolicies(device.Policies{})
				<-time.After(driverGrace)
				n.Update()
				want := []device.PCIAddress{second}
				if c.usedErr != nil {
					want = nil
				}
				if got := preparable(n); !slices.Equal(got, want) {
					t.Errorf("the node has %v, want %v", got, want)
				}
				if problems := n.View().Offered.Node.Problems; len(problems) == 0 || problems[0].PCIAddress != first {
					t.Errorf("problems %v", problems)
				}
				w.set(func() { w.used, w.usedErr = nil, nil })
				n.Update()
				if got := preparable(n); !slices.Equal(got, []device.PCIAddress{first, second}) {
					t.Errorf("after the claim's end the node has %v", got)
				}
			})
		})
	}
}

// A GPU that a claim has for a virtual machine stays as it was, whatever the policy says now.
func TestLentGPUStaysPreparableAndOffered(t *testing.T) {
	bound := sysfsOnly(second, true)
	w := newWorld(inventory.Snapshot{Ready: true, Known: true, Node: nvidia.Node{
		GPUs: []nvidia.GPU{{GPU: gpu(first)}}, Passthrough: []device.GPU{bound},
		Problems: []nvidia.Problem{{PCIAddress: second, Message: "bound to vfio-pci"}},
	}})
	w.lent = []device.GPU{gpu(second)}
	n := New(fakeInventory{w}, fakeHealth{w}, fakeReference{w}, w.inUse)
	for _, p := range []device.PassthroughSettings{{}, {Enabled: ptr.To(true)}} {
		n.SetNodePolicies(passthrough(t, p))
		v := n.View()
		for what, s := range map[string]inventory.Snapshot{"preparable": v.Preparable, "offered": v.Offered} {
			if len(s.Node.GPUs) != 2 || s.Node.GPUs[1].UUID != gpu(second).UUID || s.Node.GPUs[1].Passthrough != nil ||
				len(s.Node.Problems) != 0 || len(s.Node.Passthrough) != 0 {
				t.Errorf("%s: %+v", what, s.Node)
			}
		}
	}
	// The only GPU of a node is no reason to be unready.
	w.snapshot = inventory.Snapshot{Known: true, Code: inventory.CodeNoGPU, Reason: "no GPU", Since: time.Now()}
	n.Update()
	if v := n.View(); !v.Preparable.Ready || len(v.Conditions) != 0 {
		t.Errorf("%+v", v.Preparable)
	}
}

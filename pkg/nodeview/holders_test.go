package nodeview

import (
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// The plugin asks only about GPUs that a virtual machine could get, while no claim has them.
func TestGPUThatAProcessHasOpenIsHeld(t *testing.T) {
	machine := func(a device.PCIAddress, minor int) nvidia.GPU {
		g := gpu(a)
		g.Minor, g.Passthrough = minor, &device.Passthrough{HasDriver: true}
		return nvidia.GPU{GPU: g}
	}
	plain := machine("0000:99:00.0", 2)
	plain.Passthrough = nil
	bound := machine("0000:aa:00.0", 3)
	bound.Passthrough.BoundByAdmin = true
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(inventory.Snapshot{Ready: true, Known: true, Node: nvidia.Node{
			GPUs: []nvidia.GPU{machine(first, 7), machine(second, 1), plain, bound, machine("0000:bb:00.0", 4)},
		}})
		n := New(fakeInventory{w}, fakeHealth{w}, fakeReference{w}, w.inUse)
		var mu sync.Mutex // for the four below
		var asked []device.PCIAddress
		var claimErr error
		used, began := map[string]bool{second.WholeName(): true}, time.Now()
		processes := map[device.PCIAddress][]nvidia.Process{first: {{PID: 77, Name: "python"}}}
		go Holders{
			Node: n,
			Foreign: func(gpus []device.GPU) map[device.PCIAddress][]nvidia.Process {
				mu.Lock()
				defer mu.Unlock()
				for _, g := range gpus {
					asked = append(asked, g.PCIAddress)
				}
				return processes
			},
			InUse: func(gpu string) (bool, error) {
				mu.Lock()
				defer mu.Unlock()
				return used[gpu], claimErr
			},
		}.Run(t.Context())
		synctest.Wait()
		mu.Lock()
		look := func() []device.PCIAddress {
			asked = nil
			mu.Unlock()
			<-time.After(holdersInterval)
			synctest.Wait()
			mu.Lock()
			var held []device.PCIAddress
			for a, since := range n.View().Held {
				held = append(held, a)
				if !since.After(began) {
					t.Errorf("%s is held since %s", a, since)
				}
			}
			return held
		}
		generation := n.View().Generation
		if held := look(); len(held) > 0 || len(asked) > 0 || n.View().Generation != generation {
			t.Errorf("passthrough is off: asked for %v, held %v", asked, held)
		}
		rules := []device.PassthroughRule{{GPUs: "0000:bb:00.0", Enabled: ptr.To(false)}}
		n.SetConfigured(passthrough(t, device.PassthroughSettings{Enabled: ptr.To(true), Rules: rules}))
		n.SetNodePolicies(device.Policies{})
		if held := look(); !slices.Equal(held, []device.PCIAddress{first}) || !slices.Equal(asked, []device.PCIAddress{first}) {
			t.Errorf("asked for %v, held %v", asked, held)
		}
		since := n.View().Held[first]
		if look(); !n.View().Held[first].Equal(since) {
			t.Error("a second look changes since when the GPU is held")
		}
		claimErr = errors.New("unreadable")
		if held := look(); len(held) != 1 || len(asked) > 0 {
			t.Errorf("nothing is known of the claims: asked for %v, held %v", asked, held)
		}
		claimErr = nil
		processes = nil
		if held := look(); len(held) > 0 {
			t.Errorf("held after the process ended: %v", held)
		}
		mu.Unlock()
	})
}

package nodeview

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
)

// View is the node at one moment. Its readers must not modify it.
type View struct {
	inputs
	// Generation is one higher than that of the View before.
	Generation uint64
	// Preparable is the Inventory as claims may use it. While a condition is reported it is not ready,
	// and Reason has the messages. It lacks the GPUs that claims of NVIDIA's DRA driver may use, and
	// its Problems name these claims.
	Preparable inventory.Snapshot
	// Offered is what the slices are built from: Preparable, and the unhealthy GPUs that the inventory
	// no longer finds. They stay in the slices with a taint: admins then see which Pods have them.
	Offered inventory.Snapshot
	// GPUs are all GPUs of the node: those of the Inventory, and the unhealthy ones that it lacks.
	GPUs []nvidia.GPU

	changed chan struct{}
}

// inputs is what a View is made of.
type inputs struct {
	// Inventory is the node as the last scan found it, with the GPUs that only virtual machines can
	// use.
	Inventory inventory.Snapshot
	// Conditions has the reported conditions, sorted by source, and after them the inventory's.
	Conditions []Condition
	// missing are the unhealthy GPUs that the Inventory lacks.
	missing []device.GPU
	// ReferenceClaims are the claims that NVIDIA's DRA driver prepared and that have not ended. If
	// they cannot be read, ReferenceErr says why, and Preparable and Offered have no GPU.
	ReferenceClaims []predecessor.Claim
	ReferenceErr    string
	// Held says since when processes have GPUs open that no claim has, so that no virtual machine can
	// get them.
	Held map[device.PCIAddress]time.Time
}

// Changed returns a channel that is closed when there is a newer View.
func (v *View) Changed() <-chan struct{} { return v.changed }

// Blocked reports whether there is a condition other than the inventory's.
func (v *View) Blocked() bool {
	return slices.ContainsFunc(v.Conditions, func(c Condition) bool { return c.Source != inventorySource })
}

// Due says whether the slices must show that the node is not ready. due is true if a condition is
// due at the time now, pending if one is due later.
func (v *View) Due(now time.Time) (due, pending bool) {
	for _, c := range v.Conditions {
		due = due || !now.Before(c.due())
		pending = pending || now.Before(c.due())
	}
	return due, pending
}

func (in inputs) view(generation uint64) *View {
	v := &View{inputs: in, Generation: generation, GPUs: in.Inventory.Node.GPUs, changed: make(chan struct{})}
	ready := in.Inventory
	for _, c := range in.Conditions {
		if c.Source != inventorySource {
			ready.Ready, ready.Reason = false, strings.TrimPrefix(ready.Reason+"; "+c.Message, "; ")
		}
	}
	offered := ready
	if ready.Known && len(in.missing) > 0 {
		v.GPUs = slices.Clone(v.GPUs)
		for _, g := range in.missing {
			v.GPUs = append(v.GPUs, nvidia.GPU{GPU: g})
		}
		offered.Empty, offered.Node.GPUs = false, v.GPUs
		if len(ready.Node.GPUs) == 0 && !v.Blocked() {
			offered.Ready, offered.Reason = true, "" // the node was not ready only because all GPUs are missing
		}
	}
	v.Preparable, v.Offered = in.withhold(ready, v.GPUs), in.withhold(offered, v.GPUs)
	return v
}

// withhold returns s without the GPUs that claims of NVIDIA's DRA driver may still use. all are the
// GPUs among which the claims' devices are looked up.
func (in inputs) withhold(s inventory.Snapshot, all []nvidia.GPU) inventory.Snapshot {
	if in.ReferenceErr == "" && len(in.ReferenceClaims) == 0 {
		return s
	}
	var free []nvidia.GPU
	problems := slices.Clone(s.Node.Problems)
	for _, g := range s.Node.GPUs {
		why := in.ReferenceErr
		if i := slices.IndexFunc(in.ReferenceClaims, func(c predecessor.Claim) bool { return c.MayUse(g.GPU, all) }); i >= 0 {
			why = fmt.Sprintf("NVIDIA's DRA driver prepared this GPU for %s: wait until that claim ends", in.ReferenceClaims[i])
		}
		if why == "" {
			free = append(free, g)
			continue
		}
		problems = append(problems, nvidia.Problem{PCIAddress: g.PCIAddress, Message: why})
	}
	s.Node.GPUs, s.Node.Problems = free, problems
	return s
}

package driver

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

// predecessorFilter hides GPUs that claims of NVIDIA's DRA driver still use. That driver prepared
// these claims before this driver was installed on the node. This driver neither publishes nor
// prepares such a GPU, and its error for the GPU names the claim.
type predecessorFilter struct {
	inventorySource
	store *predecessor.Store
}

func (f predecessorFilter) Snapshot() inventory.Snapshot {
	s := f.inventorySource.Snapshot()
	claims, err := f.store.Claims()
	if err == nil && len(claims) == 0 {
		return s
	}
	var free []nvidia.GPU
	problems := slices.Clone(s.Node.Problems)
	for _, g := range s.Node.GPUs {
		why := ""
		if err != nil {
			why = err.Error()
		} else if i := slices.IndexFunc(claims, func(c predecessor.Claim) bool { return c.MayUse(g.GPU, s.Node.GPUs) }); i >= 0 {
			why = fmt.Sprintf("NVIDIA's DRA driver prepared this GPU for %s: wait until that claim ends", claims[i])
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

// refusePredecessorClaim returns an error if the claim was prepared by NVIDIA's DRA driver. Such a
// claim already has devices, under names that this driver does not know.
func (d *Driver) refusePredecessorClaim(uid types.UID, name string) error {
	claims, err := d.predecessor.Claims()
	if err != nil {
		return nil //nolint:nilerr // every GPU is withheld, and a Prepare fails with the reason
	}
	for _, c := range claims {
		if c.UID == uid {
			return cause.Refusal(name, cause.Claim,
				"NVIDIA's DRA driver prepared it on this node as %s: its Pods keep running but cannot restart here: delete them",
				strings.Join(c.DeviceNames(), ", "))
		}
	}
	return nil
}

// reportWithheldGPUs writes an Event about the GPUs that claims of NVIDIA's DRA driver still use,
// if they changed since the last Event.
func (d *Driver) reportWithheldGPUs() {
	var lines []string
	claims, err := d.predecessor.Claims()
	if err != nil {
		lines = []string{err.Error()}
	}
	for _, c := range claims {
		lines = append(lines, fmt.Sprintf("%s holds %s", c, strings.Join(c.DeviceNames(), ", ")))
	}
	now := strings.Join(lines, "; ")
	d.events.WarnOnChange("GPUsWithheld", now,
		"Not offering the GPUs of claims that NVIDIA's DRA driver prepared, until these claims end: "+now)
	d.metrics.ReferenceDriver(len(claims), err != nil)
}

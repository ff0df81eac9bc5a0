package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
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

// endPredecessorClaim releases the devices that NVIDIA's DRA driver prepared for the claim. It does
// nothing if that driver's checkpoint does not contain the claim.
func (d *Driver) endPredecessorClaim(ctx context.Context, uid types.UID) error {
	claims, err := d.predecessor.Claims()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Failed to read which devices NVIDIA's DRA driver prepared for the claim; offering no GPU")
		return nil
	}
	i := slices.IndexFunc(claims, func(c predecessor.Claim) bool { return c.UID == uid })
	if i < 0 {
		return nil
	}
	c := claims[i]
	s := d.inv.Snapshot()
	changedHardware := c.MPS || c.TimeSlices || slices.ContainsFunc(c.Devices, func(d predecessor.Device) bool { return d.MIG != nil })
	if changedHardware && !s.Known {
		return cause.Refusal("with UID "+string(uid), cause.NotReady,
			"cannot release the devices that NVIDIA's DRA driver prepared for it, because the hardware is not scanned yet: %s", s.Reason)
	}
	cards := map[string]device.GPU{}
	for _, held := range c.Devices {
		if g, known := held.FindGPU(s.Node.GPUs); known {
			cards[g.WholeName()] = g
		}
	}
	gpus := make([]string, 0, len(cards))
	for name := range cards {
		gpus = append(gpus, name)
	}
	err = d.preparer.WithLocks(ctx, uid, gpus, func(ctx context.Context) error {
		return d.undoPredecessorClaim(ctx, c, cards, s.Node.GPUs)
	})
	if err != nil {
		return err
	}
	reports{d.events, d.metrics}.Repaired(prepare.Repair{
		Kind: "predecessor-claim", What: "Released the devices of a claim that NVIDIA's DRA driver prepared", Object: c.String(),
	})
	wake(d.toPublisher)
	return nil
}

// undoPredecessorClaim releases the devices of the claim c of NVIDIA's DRA driver. The caller holds
// the locks of the claim and of the GPUs in cards.
func (d *Driver) undoPredecessorClaim(
	ctx context.Context, c predecessor.Claim, cards map[string]device.GPU, all []nvidia.GPU,
) error {
	logger := klog.FromContext(ctx)
	d.reportPredecessorDaemons(c)
	for _, held := range c.Devices {
		g, known := held.FindGPU(all)
		if !known || held.MIG == nil {
			continue
		}
		if err := d.destroyPredecessorPartition(ctx, g, held); err != nil {
			return err
		}
	}
	for name, g := range cards {
		if c.MPS {
			if err := d.preparer.Partitions.SetComputeMode(ctx, g.Card(), device.ComputeDefault); err != nil {
				logger.Error(err, "Failed to reset the compute mode that NVIDIA's DRA driver set", "gpu", name)
			}
		}
		if c.TimeSlices {
			if err := d.preparer.Partitions.SetTimeSlice(ctx, g.Card(), device.TimeSliceDefault); err != nil {
				logger.Error(err, "Failed to reset the time slices that NVIDIA's DRA driver set", "gpu", name)
			}
		}
	}
	spec := filepath.Join(d.cfg.CDIRoot, cdi.Vendor+"-claim_"+string(c.UID)+".yaml")
	if err := os.Remove(spec); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the CDI spec of NVIDIA's DRA driver: %w", err)
	}
	renamedTo, err := d.predecessor.MarkEnded(c.UID)
	if err == nil && renamedTo != "" {
		logger.Info("Renamed the checkpoint of NVIDIA's DRA driver after its last claim ended", "file", renamedTo)
	}
	return err
}

// destroyPredecessorPartition destroys the partition on the GPU g whose UUID and MIG IDs are those
// in the checkpoint of NVIDIA's DRA driver. If a UUID or ID differs, the partition may belong to
// another claim by now, and is kept.
func (d *Driver) destroyPredecessorPartition(ctx context.Context, g device.GPU, held predecessor.Device) error {
	state, err := d.preparer.Partitions.Look(ctx, g.Card())
	if err != nil {
		return fmt.Errorf("find %s of NVIDIA's DRA driver on %s: %w", held.Name, g.WholeName(), err)
	}
	for _, in := range state.MIG.Instances {
		if len(in.Compute) != 1 || held.MIG.UUID == "" || in.Compute[0].UUID != held.MIG.UUID ||
			held.MIG.GPUInstanceID != nil && *held.MIG.GPUInstanceID != in.ID ||
			held.MIG.ComputeInstanceID != nil && *held.MIG.ComputeInstanceID != in.Compute[0].ID {
			continue
		}
		if err := d.preparer.Partitions.Destroy(ctx, g.Card(), in); err != nil {
			return fmt.Errorf("remove %s, which NVIDIA's DRA driver created, from %s: %w", held.Name, g.WholeName(), err)
		}
		klog.FromContext(ctx).Info("Removed a MIG instance of NVIDIA's DRA driver",
			"gpu", g.WholeName(), "device", held.Name, "migUUID", held.MIG.UUID)
	}
	return nil
}

// reportPredecessorDaemons writes an Event for each MPS daemon that still runs after the claim of
// NVIDIA's DRA driver ended. The admin has to delete it: it is a Deployment whose name is not known
// in advance, so this driver would need permission to delete any Deployment.
func (d *Driver) reportPredecessorDaemons(c predecessor.Claim) {
	for _, id := range c.Daemons {
		d.events.Warn("PredecessorDaemon", fmt.Sprintf("%s has ended, but its MPS daemon, "+
			"a Deployment of NVIDIA's DRA driver, still runs. To delete it, run: "+
			"kubectl delete deployments --all-namespaces --field-selector metadata.name=mps-control-daemon-%s", c, id))
	}
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

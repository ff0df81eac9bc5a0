package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

// withheld is an inventory without the GPUs that claims of the reference driver hold, which
// prepared them before this driver came to the node. They are neither published nor prepared; who
// asks for one of them is told whose it is.
type withheld struct {
	inventorySource
	before *predecessor.Store
}

func (w withheld) Snapshot() inventory.Snapshot {
	s := w.inventorySource.Snapshot()
	claims, err := w.before.Claims()
	if err == nil && len(claims) == 0 {
		return s
	}
	var free []nvidia.GPU
	problems := slices.Clone(s.Node.Problems)
	for _, g := range s.Node.GPUs {
		why := ""
		if err != nil {
			why = err.Error()
		} else if i := slices.IndexFunc(claims, func(c predecessor.Claim) bool { return mayHold(c, g.GPU, s.Node.GPUs) }); i >= 0 {
			why = fmt.Sprintf("%s holds it still, which NVIDIA's reference driver prepared: it is free when that claim has ended", claims[i])
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

// mayHold says whether a claim holds the card or a part of it. A device that cannot be told to be any one of the node's cards may be every one.
func mayHold(c predecessor.Claim, g device.GPU, all []nvidia.GPU) bool {
	return slices.ContainsFunc(c.Devices, func(d predecessor.Device) bool {
		card, known := cardOf(d, all)
		return !known || card.PCIAddress == g.PCIAddress
	})
}

var byMinor = regexp.MustCompile(`^gpu-([0-9]+)(-mig-.*)?$`)

// cardOf is the card of a device: by UUID, by place, by the partition's UUID, or, of a preparation that was only begun, by the number in its name.
func cardOf(d predecessor.Device, all []nvidia.GPU) (device.GPU, bool) {
	number := -1
	if m := byMinor.FindStringSubmatch(d.Name); m != nil {
		number, _ = strconv.Atoi(m[1]) // one that is too large is no card's
	}
	for _, is := range []func(g device.GPU) bool{
		func(g device.GPU) bool { return d.GPUUUID != "" && g.UUID == d.GPUUUID },
		func(g device.GPU) bool { return d.PCIBusID != "" && samePlace(g.PCIAddress, d.PCIBusID) },
		func(g device.GPU) bool { return d.MIG != nil && hasPartition(g, d.MIG.UUID) },
		func(g device.GPU) bool {
			return d.GPUUUID == "" && d.PCIBusID == "" && d.MIG == nil && g.Minor == number
		},
	} {
		if i := slices.IndexFunc(all, func(g nvidia.GPU) bool { return is(g.GPU) }); i >= 0 {
			return all[i].GPU, true
		}
	}
	return device.GPU{}, false
}

func samePlace(a device.PCIAddress, other string) bool {
	b, err := device.ParsePCIAddress(strings.ToLower(other))
	return err == nil && a == b
}

func hasPartition(g device.GPU, uuid string) bool {
	return uuid != "" && g.MIG != nil && slices.ContainsFunc(g.MIG.Instances, func(in device.Instance) bool {
		return slices.ContainsFunc(in.Compute, func(c device.ComputeInstance) bool { return c.UUID == uuid })
	})
}

// refuseForeign refuses a claim that the reference driver has prepared: it was allocated devices by names that mean nothing here, and holds them already.
func (d *Driver) refuseForeign(uid types.UID, name string) error {
	claims, err := d.before.Claims()
	if err != nil {
		return nil //nolint:nilerr // every GPU is withheld, and who asks for one is told why
	}
	for _, c := range claims {
		if c.UID == uid {
			return prepare.Refused(name, prepare.CauseClaim, "NVIDIA's reference driver prepared it on this node as %s: its Pods go on as they are, and cannot be started again here: delete them",
				strings.Join(deviceNames(c), ", "))
		}
	}
	return nil
}

func deviceNames(c predecessor.Claim) []string {
	names := make([]string, len(c.Devices))
	for i, d := range c.Devices {
		names[i] = d.Name
	}
	return names
}

// endForeign gives back what a claim holds that the reference driver prepared, as far as its checkpoint proves that it made it. It does nothing about any other
// claim.
func (d *Driver) endForeign(ctx context.Context, uid types.UID) error {
	claims, err := d.before.Claims()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Whether the claim held anything from the driver before cannot be told; nothing is given to others")
		return nil
	}
	i := slices.IndexFunc(claims, func(c predecessor.Claim) bool { return c.UID == uid })
	if i < 0 {
		return nil
	}
	c := claims[i]
	s := d.inv.Snapshot()
	hard := c.MPS || c.TimeSlices || slices.ContainsFunc(c.Devices, func(d predecessor.Device) bool { return d.MIG != nil })
	if hard && !s.Known {
		return prepare.Refused("with UID "+string(uid), prepare.CauseNotReady, "what it held of the reference driver's cannot be looked at yet: %s", s.Reason)
	}
	cards := map[string]device.GPU{}
	for _, held := range c.Devices {
		if g, known := cardOf(held, s.Node.GPUs); known {
			cards[g.WholeName()] = g
		}
	}
	gpus := make([]string, 0, len(cards))
	for name := range cards {
		gpus = append(gpus, name)
	}
	err = d.preparer.Locked(ctx, uid, gpus, func(ctx context.Context) error { return d.undoForeign(ctx, c, cards, s.Node.GPUs) })
	if err != nil {
		return err
	}
	d.repaired(prepare.Repair{Kind: "predecessor-claim", What: "Gave back what NVIDIA's reference driver had prepared", Object: c.String()})
	wake(d.toPublisher)
	return nil
}

// undoForeign is endForeign under the locks.
func (d *Driver) undoForeign(ctx context.Context, c predecessor.Claim, cards map[string]device.GPU, all []nvidia.GPU) error {
	logger := klog.FromContext(ctx)
	d.tellForeignDaemons(c)
	for _, held := range c.Devices {
		g, known := cardOf(held, all)
		if !known || held.MIG == nil {
			continue
		}
		if err := d.destroyForeign(ctx, g, held); err != nil {
			return err
		}
	}
	for name, g := range cards {
		if c.MPS {
			if err := d.preparer.Partitions.SetComputeMode(ctx, g.Card(), device.ComputeDefault); err != nil {
				logger.Error(err, "Could not set the compute mode back that the reference driver had set", "gpu", name)
			}
		}
		if c.TimeSlices {
			if err := d.preparer.Partitions.SetTimeSlice(ctx, g.Card(), device.TimeSliceDefault); err != nil {
				logger.Error(err, "Could not set the time slices back that the reference driver had set", "gpu", name)
			}
		}
	}
	spec := filepath.Join(d.cfg.CDIRoot, cdi.Vendor+"-claim_"+string(c.UID)+".yaml")
	if err := os.Remove(spec); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the CDI spec of the reference driver: %w", err)
	}
	aside, err := d.before.End(c.UID)
	if err == nil && aside != "" {
		logger.Info("All claims of the reference driver have ended; its checkpoint is set aside", "file", aside)
	}
	return err
}

// destroyForeign removes the partition if what is there is exactly what the checkpoint tells of. Anything else may be somebody else's by now.
func (d *Driver) destroyForeign(ctx context.Context, g device.GPU, held predecessor.Device) error {
	state, err := d.preparer.Partitions.Look(ctx, g.Card())
	if err != nil {
		return fmt.Errorf("look for %s of the reference driver on %s: %w", held.Name, g.WholeName(), err)
	}
	for _, in := range state.MIG.Instances {
		if len(in.Compute) != 1 || held.MIG.UUID == "" || in.Compute[0].UUID != held.MIG.UUID ||
			held.MIG.GPUInstanceID != nil && *held.MIG.GPUInstanceID != in.ID ||
			held.MIG.ComputeInstanceID != nil && *held.MIG.ComputeInstanceID != in.Compute[0].ID {
			continue
		}
		if err := d.preparer.Partitions.Destroy(ctx, g.Card(), in); err != nil {
			return fmt.Errorf("remove %s, which the reference driver made, from %s: %w", held.Name, g.WholeName(), err)
		}
		klog.FromContext(ctx).Info("Removed an instance that the reference driver had made", "gpu", g.WholeName(), "device", held.Name, "migUUID", held.MIG.UUID)
	}
	return nil
}

// tellForeignDaemons says which MPS daemons of the claim go on: they are Deployments of the reference driver's, with names that cannot be known before, so that
// the right to delete one is the right to delete any in that namespace. No node's plugin has it.
func (d *Driver) tellForeignDaemons(c predecessor.Claim) {
	for _, id := range c.Daemons {
		d.events.warn("PredecessorDaemon", fmt.Sprintf("%s has ended, and its MPS daemon, a Deployment of NVIDIA's reference driver, goes on: kubectl delete deployments --all-namespaces --field-selector metadata.name=mps-control-daemon-%s", c, id))
	}
}

// tellWithheld says, where it has changed, which GPUs are withheld and why. Only one loop calls it.
func (d *Driver) tellWithheld() {
	var lines []string
	claims, err := d.before.Claims()
	if err != nil {
		lines = []string{err.Error()}
	}
	for _, c := range claims {
		lines = append(lines, fmt.Sprintf("%s holds %s", c, strings.Join(deviceNames(c), ", ")))
	}
	now := strings.Join(lines, "; ")
	if now != d.toldWithheld && now != "" {
		d.events.warn("GPUsWithheld", "GPUs that NVIDIA's reference driver gave to claims are not offered until these end: "+now)
	}
	d.toldWithheld = now
	d.metrics.Withheld(len(claims), err != nil)
}

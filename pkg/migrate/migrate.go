// Package migrate ends claims that NVIDIA's DRA driver prepared on this node before this driver
// took over.
//
// A [Migrator] releases what the claim held: its MIG instances, the GPU settings that were changed
// for it, and its CDI spec. It destroys a MIG instance only if its UUID and IDs are those in the
// checkpoint. It never deletes an MPS daemon of NVIDIA's DRA driver: an Event tells the admin how.
//
// Package predecessor reads the checkpoint. Package nodeview withholds the GPUs of claims that have
// not ended.
package migrate

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

// Checkpoint has the claims of NVIDIA's DRA driver that have not ended.
type Checkpoint interface {
	Claim(uid types.UID) (c predecessor.Claim, found bool, err error)
	MarkEnded(c predecessor.Claim) (renamedTo string, err error)
}

// GPUs changes GPUs and their partitions.
type GPUs interface {
	Look(ctx context.Context, card device.Card) (device.CardState, error)
	Destroy(ctx context.Context, card device.Card, in device.Instance) error
	SetComputeMode(ctx context.Context, card device.Card, mode device.ComputeMode) error
	SetTimeSlice(ctx context.Context, card device.Card, slice device.TimeSlice) error
}

// Reports tells admins about claims that have ended.
type Reports interface {
	Repaired(r prepare.Repair)
	Event(reason events.Reason, message string)
}

// Options are the settings and dependencies of a [Migrator].
type Options struct {
	// CDIRoot is the directory of the CDI specs.
	CDIRoot string

	Checkpoint Checkpoint
	// Snapshot has the node's GPUs as of the last scan.
	Snapshot func() inventory.Snapshot
	// WithLocks runs work under the locks of a claim and of GPUs, which are given by name.
	WithLocks func(ctx context.Context, claim types.UID, gpus []string, work func(context.Context) error) error
	GPUs      GPUs
	Reports   Reports
	// Update looks again which GPUs can be offered.
	Update func()
}

// Migrator ends claims of NVIDIA's DRA driver.
type Migrator struct{ opts Options }

// New returns a Migrator.
func New(o Options) *Migrator { return &Migrator{o} }

// EndClaim releases the devices that NVIDIA's DRA driver prepared for the claim. It does nothing if
// that driver's checkpoint does not contain the claim.
func (m *Migrator) EndClaim(ctx context.Context, uid types.UID) error {
	c, found, err := m.opts.Checkpoint.Claim(uid)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Failed to read which devices NVIDIA's DRA driver prepared for the claim; offering no GPU")
		return nil
	}
	if !found {
		return nil
	}
	s := m.opts.Snapshot()
	if changedHardware(c) && !s.Known {
		return cause.Refusal("with UID "+string(uid), cause.NotReady,
			"cannot release the devices that NVIDIA's DRA driver prepared for it, because the hardware is not scanned yet: %s", s.Reason)
	}
	gpus := map[string]device.GPU{}
	for _, held := range c.Devices {
		if g, known := held.FindGPU(s.Node.GPUs); known {
			gpus[g.WholeName()] = g
		}
	}
	err = m.opts.WithLocks(ctx, uid, slices.Collect(maps.Keys(gpus)), func(ctx context.Context) error {
		return m.release(ctx, c, s, gpus)
	})
	if err != nil {
		return err
	}
	m.opts.Reports.Repaired(prepare.Repair{
		Kind: "predecessor-claim", What: "Released the devices of a claim that NVIDIA's DRA driver prepared", Object: c.String(),
	})
	m.opts.Update()
	return nil
}

func changedHardware(c predecessor.Claim) bool {
	return c.MPS || c.TimeSlices || slices.ContainsFunc(c.Devices, func(d predecessor.Device) bool { return d.MIG != nil })
}

// release releases the devices of the claim c, which are on these GPUs (by name). The caller holds
// the locks of the claim and of the GPUs.
func (m *Migrator) release(ctx context.Context, c predecessor.Claim, s inventory.Snapshot, gpus map[string]device.GPU) error {
	logger := klog.FromContext(ctx)
	m.reportDaemons(c)
	for _, held := range c.Devices {
		if g, known := held.FindGPU(s.Node.GPUs); known && held.MIG != nil {
			if err := m.destroy(ctx, g, held); err != nil {
				return err
			}
		}
	}
	for name, g := range gpus {
		if c.MPS {
			if err := m.opts.GPUs.SetComputeMode(ctx, g.Card(), device.ComputeDefault); err != nil {
				logger.Error(err, "Failed to reset the compute mode that NVIDIA's DRA driver set", "gpu", name)
			}
		}
		if c.TimeSlices {
			if err := m.opts.GPUs.SetTimeSlice(ctx, g.Card(), device.TimeSliceDefault); err != nil {
				logger.Error(err, "Failed to reset the time slices that NVIDIA's DRA driver set", "gpu", name)
			}
		}
	}
	spec := filepath.Join(m.opts.CDIRoot, cdi.Vendor+"-claim_"+string(c.UID)+".yaml")
	if err := os.Remove(spec); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the CDI spec of NVIDIA's DRA driver: %w", err)
	}
	renamedTo, err := m.opts.Checkpoint.MarkEnded(c)
	if err == nil && renamedTo != "" {
		logger.Info("Renamed the checkpoint of NVIDIA's DRA driver after its last claim ended", "file", renamedTo)
	}
	return err
}

// destroy destroys the MIG instance whose UUID and IDs are those in the checkpoint. If a UUID or ID
// differs, the instance may belong to another claim by now, and is kept.
func (m *Migrator) destroy(ctx context.Context, g device.GPU, held predecessor.Device) error {
	state, err := m.opts.GPUs.Look(ctx, g.Card())
	if err != nil {
		return fmt.Errorf("find %s of NVIDIA's DRA driver on %s: %w", held.Name, g.WholeName(), err)
	}
	for _, in := range state.MIG.Instances {
		if !isSame(in, *held.MIG) {
			continue
		}
		if err := m.opts.GPUs.Destroy(ctx, g.Card(), in); err != nil {
			return fmt.Errorf("remove %s, which NVIDIA's DRA driver created, from %s: %w", held.Name, g.WholeName(), err)
		}
		klog.FromContext(ctx).Info("Removed a MIG instance of NVIDIA's DRA driver",
			"gpu", g.WholeName(), "device", held.Name, "migUUID", held.MIG.UUID)
	}
	return nil
}

// isSame reports whether the MIG instance is the one in the checkpoint. IDs that the checkpoint
// does not have are not compared.
func isSame(in device.Instance, held predecessor.MIG) bool {
	return len(in.Compute) == 1 && held.UUID != "" && in.Compute[0].UUID == held.UUID &&
		(held.GPUInstanceID == nil || *held.GPUInstanceID == in.ID) &&
		(held.ComputeInstanceID == nil || *held.ComputeInstanceID == in.Compute[0].ID)
}

// reportDaemons writes an Event for each MPS daemon that still runs after the claim ended. The
// admin has to delete it: it is a Deployment whose name is not known in advance, so this driver
// would need permission to delete any Deployment.
func (m *Migrator) reportDaemons(c predecessor.Claim) {
	for _, id := range c.Daemons {
		m.opts.Reports.Event(events.PredecessorDaemon, fmt.Sprintf("%s has ended, but its MPS daemon, "+
			"a Deployment of NVIDIA's DRA driver, still runs. To delete it, run: "+
			"kubectl delete deployments --all-namespaces --field-selector metadata.name=mps-control-daemon-%s", c, id))
	}
}

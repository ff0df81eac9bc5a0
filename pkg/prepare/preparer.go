package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
)

// Hardware is what the node has, as known already: asking it must not touch a GPU.
type Hardware interface {
	Snapshot() inventory.Snapshot
}

// Specs is where the container runtime finds what a device is.
type Specs interface {
	WriteBase(edits specs.ContainerEdits) error
	WriteClaim(uid types.UID, devices []cdi.ClaimDevice) error
	RemoveClaim(uid types.UID) error
	Claims() ([]types.UID, error)
}

// Options wires a Preparer.
type Options struct {
	DriverName string
	// Pool is the name of this node's pool.
	Pool     string
	Hardware Hardware
	Specs    Specs
	// Verify makes sure that what edits name is really on the node.
	Verify  func(specs.ContainerEdits) error
	Records *checkpoint.Store
	Locks   *lock.Set
	// Reread gets a claim from the API server again, after a wait in which it may have changed.
	Reread func(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error)
	// GivenBack, if set, is told of each claim that was given back, also to be prepared anew, while
	// its lock is held. Overtaken, if set, says that this was so since the call came that the
	// context is of.
	GivenBack func(uid types.UID)
	Overtaken func(ctx context.Context, uid types.UID) bool
	BootID    string
	Now       func() time.Time
	// HeldPatience is how long Prepare waits for a device that another claim holds; without it there is no waiting. Stopping, if set, ends such waits when it
	// is closed: another instance will serve the kubelet's next call.
	HeldPatience time.Duration
	Stopping     <-chan struct{}

	// Partitions cuts GPUs and sets how processes share them. Without it whole GPUs are prepared as they are, and all else is refused.
	Partitions Partitions
	// MPS runs control daemons. Where nobody answers for it, or without it, MPS and fractions are refused.
	MPS Daemons
	// NoMPS says that MPS is switched off in the cluster: claims that ask for it are refused. Those
	// that have it can be given back.
	NoMPS bool
	// MPSEdits make a container a client of the daemon with this ID. They are asked for only where there is MPS.
	MPSEdits func(daemon string) specs.ContainerEdits
	// LimitEdits hold a container to so many MiB of the GPU with this UUID, where the GPU can do that.
	LimitEdits func(gpuUUID string, mebibytes uint64) specs.ContainerEdits
	// MIGEdits are those of a MIG device, given those of the whole GPU.
	MIGEdits func(parent specs.ContainerEdits, in device.Instance, c device.ComputeInstance) specs.ContainerEdits
	// Totals is what claims can hold together of a device that is shared, by capacity, as it is offered.
	// Without it the number of plain shares is not known.
	Totals func(device.GPU, device.Name) map[string]resource.Quantity
	// Repaired, if set, is told of each thing that was put in order, by several at once. It must not block.
	Repaired func(Repair)
	// NotLooked, if set, is called by Reconcile for each claim whose devices it could not look at, by
	// several at once. How they are is as open as before.
	NotLooked func(uid types.UID)
	// Changed, if set, is told of each prepared claim whose devices are others than before: a partition that was made again has another UUID.
	// It must not block.
	Changed func(ctx context.Context, claim kubeletplugin.NamespacedObject)
}

// Preparer prepares and unprepares claims. It holds no state of its own.
type Preparer struct{ Options }

// New returns a Preparer over what Options name.
func New(o Options) *Preparer {
	if o.Partitions == nil {
		o.Partitions = uncut{}
	}
	if o.MPS == nil {
		o.MPS = unserved{}
	}
	if o.MPSEdits == nil {
		o.MPSEdits = func(string) specs.ContainerEdits { return specs.ContainerEdits{} }
	}
	if o.LimitEdits == nil {
		o.LimitEdits = func(string, uint64) specs.ContainerEdits { return specs.ContainerEdits{} }
	}
	if o.GivenBack == nil {
		o.GivenBack = func(types.UID) {}
	}
	if o.Overtaken == nil {
		o.Overtaken = func(context.Context, types.UID) bool { return false }
	}
	if o.Repaired == nil {
		o.Repaired = func(Repair) {}
	}
	if o.Totals == nil {
		o.Totals = func(g device.GPU, n device.Name) map[string]resource.Quantity {
			return device.ShareRules{}.Totals(g, 0, n)
		}
	}
	if o.NotLooked == nil {
		o.NotLooked = func(types.UID) {}
	}
	if o.Changed == nil {
		o.Changed = func(context.Context, kubeletplugin.NamespacedObject) {}
	}
	return &Preparer{o}
}

// Held is how much is held on the node. GPUs are those of which a claim holds the whole or a part.
type Held struct{ Claims, GPUs, Partitions int }

// Held counts by one look at the records' names; only a claim with more devices than fit into a name costs a look at its record.
func (p *Preparer) Held() (Held, error) {
	entries, err := p.Records.List()
	if err != nil {
		return Held{}, because(CauseRecord, "%w", err)
	}
	h := Held{Claims: len(entries)}
	gpus := map[string]bool{}
	for _, e := range entries {
		for _, d := range p.devicesOf(e) {
			name, ok := device.ParseName(d)
			if !ok {
				continue // of a later version
			}
			gpus[name.GPU] = true
			if name.Partition != nil {
				h.Partitions++
			}
		}
	}
	h.GPUs = len(gpus)
	return h, nil
}

// claimLocks is the file of all claims' locks. GPUs' locks have the GPU's name.
const claimLocks = "claims"

func claimLock(uid types.UID) lock.Name {
	return lock.Name{File: claimLocks, Part: string(uid)}
}

// gpuLocks names each GPU once.
func gpuLocks(gpus ...string) []lock.Name {
	gpus = slices.Clone(gpus)
	slices.Sort(gpus)
	names := make([]lock.Name, 0, len(gpus))
	for _, g := range slices.Compact(gpus) {
		names = append(names, lock.Name{File: g})
	}
	return names
}

func (p *Preparer) lock(ctx context.Context, uid types.UID) (*lock.Held, error) {
	held, err := p.Locks.Acquire(ctx, claimLock(uid))
	if err != nil {
		return nil, notLocked("another call for the same claim is under way", err)
	}
	return held, nil
}

func lockGPUs(ctx context.Context, held *lock.Held, gpus ...string) error {
	if err := held.Add(ctx, gpuLocks(gpus...)...); err != nil {
		return notLocked("another claim is being prepared or unprepared on the same GPU", err)
	}
	return nil
}

// notLocked tells a lock that was waited for in vain from one that the disk does not give.
func notLocked(waitedFor string, err error) error {
	if isBusy(err) {
		return because(CauseCanceled, "%s: %w", waitedFor, err)
	}
	return because(CauseRecord, "%w", err)
}

func isBusy(err error) bool {
	busy := new(lock.BusyError)
	return errors.As(err, &busy)
}

// unlessBusy does work under the claim's lock. A call that holds the lock knows better what the claim
// needs, so that is no error. A lock that the disk does not give is an error.
func (p *Preparer) unlessBusy(waiting context.Context, uid types.UID, work func(held *lock.Held) error) error {
	held, err := p.lock(waiting, uid)
	if isBusy(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer held.Release()
	return work(held)
}

// revert undoes a record's steps and removes it. The caller holds the claim and its GPUs.
func (p *Preparer) revert(ctx context.Context, r checkpoint.Record) error {
	steps, err := restore(r.Steps)
	if err != nil {
		return because(CauseRecord, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	return p.undo(ctx, &r, steps)
}

// undo reverts steps that may know more than the record. What was cut is not destroyed before the record says that the claim is on its way out; a disk
// that does not take that keeps nobody from giving back, because what a Prepared record promises is looked at before it is believed.
func (p *Preparer) undo(ctx context.Context, r *checkpoint.Record, steps []Step) error {
	env := p.env(r, steps)
	if r.State == checkpoint.Prepared && hard(steps) && !env.Forgotten {
		r.State = checkpoint.Reverting
		if err := env.Journal(); err != nil {
			klog.FromContext(ctx).Error(err, "Could not note that a claim is being given back", "claim", klog.KRef(r.Namespace, r.Name))
		}
	}
	work, cancel := within(ctx, destroyTime, answerTime)
	defer cancel()
	if err := revertAll(work, env, steps); err != nil {
		return stepError(fmt.Errorf("claim %s/%s: %w", r.Namespace, r.Name, err))
	}
	if err := p.Records.Remove(r.ClaimUID); err != nil {
		return because(CauseRecord, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	return nil
}

// stepError gives an error of a step its cause, if it has none of its own.
func stepError(err error) error {
	if CauseOf(err) != causeOther {
		return err
	}
	return because(CauseStep, "%w", err)
}

// setAside resolves a record that cannot be read, at the moment when the claim itself is prepared or unprepared. The spec has the claim's name and is
// removed, and the claim leaves what it shares. What was cut for the claim alone stays, because nothing proves any more that an instance is its: from here on it is like an admin's, who is told.
func (p *Preparer) setAside(ctx context.Context, uid types.UID, unreadable *checkpoint.UnreadableError) error {
	entries, err := p.Records.List()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	if err := p.Specs.RemoveClaim(uid); err != nil {
		return because(CauseStep, "%w", err)
	}
	if err := p.leaveAll(ctx, uid); err != nil {
		return err
	}
	places, err := p.Records.Quarantine(uid, p.Now())
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	logger := klog.FromContext(ctx).WithValues("claimUID", uid, "quarantine", places)
	logger.Error(unreadable, "Set an unreadable record aside")
	p.Repaired(Repair{"unreadable-record", "Set an unreadable record aside", string(uid)})
	if parts, some := mayHaveCut(entries, uid); some {
		logger.Error(nil, "MIG instances that were made for the claim stay on the node, and their GPUs are offered only as they are cut: remove those that nothing uses with nvidia-smi mig -dci and -dgi, or set the GPU's policy to adopt",
			"devices", parts)
	}
	return nil
}

// mayHaveCut are the partitions in the names of a claim's records. There may be some also where the names tell none.
func mayHaveCut(entries []checkpoint.Entry, uid types.UID) (parts []string, some bool) {
	for _, e := range entries {
		if e.ClaimUID != uid {
			continue
		}
		some = some || e.Inexact()
		for _, d := range e.Devices {
			if name, ok := device.ParseName(d); ok && name.Partition != nil && !name.Share {
				parts = append(parts, d)
			}
		}
	}
	return parts, some || len(parts) > 0
}

// env is what the steps of a record work on. Their journal is the record.
func (p *Preparer) env(r *checkpoint.Record, steps []Step) *Env {
	return &Env{
		ClaimUID: r.ClaimUID, Namespace: r.Namespace, Name: r.Name, BootID: p.BootID, Now: p.Now,
		Specs: p.Specs, Partitions: p.Partitions, MPS: p.MPS, Looks: newLooks(p.Partitions), Records: p.Records,
		Sharers: p.sharers,
		Journal: func() error {
			stored, err := store(steps, r.Steps)
			if err == nil {
				r.Steps = stored
				err = p.Records.Save(*r)
			}
			if err != nil {
				return because(CauseRecord, "%w", err)
			}
			return nil
		},
		Forgotten: r.BootID != p.BootID,
		Present:   func(card device.Card) bool { return present(p.Hardware.Snapshot(), card) },
	}
}

package prepare

import (
	"context"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
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
	BootID string
	Now    func() time.Time
}

// Preparer prepares and unprepares claims. It holds no state of its own.
type Preparer struct{ Options }

// New returns a Preparer over what Options name.
func New(o Options) *Preparer { return &Preparer{o} }

// Held is how much is held on the node.
type Held struct{ Claims, GPUs int }

// Held counts by one look at the records' names; only a claim with more GPUs than fit into a name costs a look at its record.
func (p *Preparer) Held() (Held, error) {
	entries, err := p.Records.List()
	if err != nil {
		return Held{}, because(CauseRecord, "%w", err)
	}
	h := Held{Claims: len(entries)}
	for _, e := range entries {
		h.GPUs += len(e.Devices)
		if !e.Inexact() {
			continue
		}
		// One that cannot be read counts as a claim and, for want of better knowledge, as no GPU.
		if r, found, err := p.Records.Load(e.ClaimUID); err == nil && found {
			h.GPUs += len(r.GPUs())
		}
	}
	return h, nil
}

// claimLockPrefix begins the names of claims' locks. GPUs' locks have the GPU's name.
const claimLockPrefix = "claim-"

func claimLock(uid types.UID) lock.Name {
	return lock.Name{File: claimLockPrefix + string(uid), Temporary: true}
}

// gpuLocks are in a fixed order, so that two claims cannot wait for each other.
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
		return nil, notLocked(ctx, "another call for the same claim is under way", err)
	}
	return held, nil
}

func lockGPUs(ctx context.Context, held *lock.Held, gpus ...string) error {
	if err := held.Add(ctx, gpuLocks(gpus...)...); err != nil {
		return notLocked(ctx, "another claim is being prepared or unprepared on the same GPU", err)
	}
	return nil
}

// notLocked tells a lock that was waited for in vain from one that the disk does not give.
func notLocked(ctx context.Context, waitedFor string, err error) error {
	if ctx.Err() != nil {
		return because(CauseCanceled, "%s: %w", waitedFor, err)
	}
	return because(CauseRecord, "%w", err)
}

// revert undoes a record's steps and removes it. The caller holds the claim and its GPUs.
func (p *Preparer) revert(ctx context.Context, r checkpoint.Record) error {
	steps, err := restore(r.Steps)
	if err != nil {
		return because(CauseRecord, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	if err := revertAll(ctx, p.env(r.ClaimUID), steps); err != nil {
		return because(CauseStep, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	if err := p.Records.Remove(r.ClaimUID); err != nil {
		return because(CauseRecord, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	return nil
}

// setAside resolves a record that cannot be read, at the moment when the claim itself is prepared or unprepared: all that it can have left is the spec
// with the claim's name.
func (p *Preparer) setAside(ctx context.Context, uid types.UID, unreadable *checkpoint.UnreadableError) error {
	if err := p.Specs.RemoveClaim(uid); err != nil {
		return because(CauseStep, "%w", err)
	}
	places, err := p.Records.Quarantine(uid, p.Now())
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	klog.FromContext(ctx).Error(unreadable, "Set an unreadable record aside", "claimUID", uid, "quarantine", places)
	return nil
}

func (p *Preparer) env(uid types.UID) *Env { return &Env{ClaimUID: uid, Specs: p.Specs} }

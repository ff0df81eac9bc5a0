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

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// Options has the settings and the dependencies of a Preparer.
type Options struct {
	DriverName string
	// Pool is the name of this node's resource pool.
	Pool     string
	Hardware steps.Hardware
	Specs    steps.Specs
	// Verify returns an error if a file or device node that the edits name does not exist on the node.
	Verify  func(specs.ContainerEdits) error
	Records *checkpoint.Store
	Locks   *lock.Set
	// ReadClaim reads a claim from the API server again. Prepare calls it after a wait in which the
	// claim may have changed.
	ReadClaim func(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error)
	// OnUnprepared, if set, is called under the claim's lock whenever a claim was unprepared. That
	// includes the case that Prepare reverts an earlier preparation of the claim.
	OnUnprepared func(uid types.UID)
	// UnpreparedSince, if set, reports whether the claim was unprepared since the arrival of the call
	// to which ctx belongs.
	UnpreparedSince func(ctx context.Context, uid types.UID) bool
	BootID          string
	Now             func() time.Time
	// ConflictWait is how long Prepare waits for a device that another claim uses. Zero means that
	// Prepare does not wait.
	ConflictWait time.Duration
	// Stopping, if set, is closed when the plugin stops. That ends the waits for other claims, because
	// the kubelet's next call goes to another plugin instance.
	Stopping <-chan struct{}

	// Partitions changes MIG partitions and GPU settings. If it is nil, the Preparer can prepare only
	// whole GPUs and does not change them.
	Partitions steps.Partitions
	// MPS starts and stops MPS control daemons. If it is nil or not running, claims that need MPS or
	// have fractions are refused.
	MPS steps.Daemons
	// MPSDisabled means that the administrator switched MPS off. Prepare refuses claims that need MPS.
	// Claims that were prepared with MPS before can still be unprepared.
	MPSDisabled bool
	// MPSEdits returns the CDI edits that make a container a client of the MPS daemon with this ID. It
	// is called only if MPS is set.
	MPSEdits func(daemon string) specs.ContainerEdits
	// LimitEdits returns the CDI edits that limit a whole container to mebibytes MiB of the GPU's
	// memory. It is called only for GPUs that support this.
	LimitEdits func(gpuUUID string, mebibytes uint64) specs.ContainerEdits
	// MIGEdits returns the CDI edits of the MIG device with GPU instance in and compute instance c. It
	// derives them from parent, the edits of the whole GPU.
	MIGEdits func(parent specs.ContainerEdits, in device.Instance, c device.ComputeInstance) specs.ContainerEdits
	// ShareTotals returns how much of each capacity of a shared device all claims together can use. If
	// ShareTotals is nil, the number of plain shares is not limited.
	ShareTotals func(device.GPU, device.Name) map[string]resource.Quantity
	// OnRepaired, if set, is called for each repair. Calls may be concurrent and must not block.
	OnRepaired func(Repair)
	// OnSkipped, if set, is called for each claim whose devices Reconcile could not examine, for
	// example because a call for the claim was running. The claim's reported health then stays as it
	// was.
	OnSkipped func(uid types.UID)
	// OnChanged, if set, is called for each prepared claim whose device got another UUID, because the
	// driver recreated its partition. It must not block.
	OnChanged func(ctx context.Context, claim kubeletplugin.NamespacedObject)
}

// Preparer prepares and unprepares claims. It keeps no state between calls.
type Preparer struct{ Options }

// New returns a Preparer. It replaces optional fields of o that are nil by defaults.
func New(o Options) *Preparer {
	if o.Partitions == nil {
		o.Partitions = steps.NoPartitions{}
	}
	if o.MPS == nil {
		o.MPS = steps.NoDaemons{}
	}
	if o.MPSEdits == nil {
		o.MPSEdits = func(string) specs.ContainerEdits { return specs.ContainerEdits{} }
	}
	if o.LimitEdits == nil {
		o.LimitEdits = func(string, uint64) specs.ContainerEdits { return specs.ContainerEdits{} }
	}
	if o.OnUnprepared == nil {
		o.OnUnprepared = func(types.UID) {}
	}
	if o.UnpreparedSince == nil {
		o.UnpreparedSince = func(context.Context, types.UID) bool { return false }
	}
	if o.OnRepaired == nil {
		o.OnRepaired = func(Repair) {}
	}
	if o.ShareTotals == nil {
		o.ShareTotals = func(g device.GPU, n device.Name) map[string]resource.Quantity {
			return device.ShareRules{}.Totals(g, 0, n)
		}
	}
	if o.OnSkipped == nil {
		o.OnSkipped = func(types.UID) {}
	}
	if o.OnChanged == nil {
		o.OnChanged = func(context.Context, kubeletplugin.NamespacedObject) {}
	}
	return &Preparer{o}
}

// Usage is the number of claims with a record, the number of GPUs of which these claims use all or
// a part, and the number of their partitions.
type Usage struct{ Claims, GPUs, Partitions int }

// Usage counts the claims and their devices from the records' file names. It reads a record only if
// the file name does not list the devices.
func (p *Preparer) Usage() (Usage, error) {
	entries, err := p.Records.List()
	if err != nil {
		return Usage{}, cause.Wrap(cause.Record, err)
	}
	h := Usage{Claims: len(entries)}
	gpus := map[string]bool{}
	for _, e := range entries {
		for _, d := range p.devicesOf(e) {
			name, ok := device.ParseName(d)
			if !ok {
				continue // a later version of the driver wrote this device name
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

// claimLocks is the name of the lock file of all claims. Each GPU has its own lock file.
const claimLocks = "claims"

func claimLock(uid types.UID) lock.Name {
	return lock.Name{File: claimLocks, Part: string(uid)}
}

// gpuLocks returns the names of the locks of the named GPUs, sorted and without duplicates.
func gpuLocks(gpus ...string) []lock.Name {
	gpus = slices.Clone(gpus)
	slices.Sort(gpus)
	names := make([]lock.Name, 0, len(gpus))
	for _, g := range slices.Compact(gpus) {
		names = append(names, lock.Name{File: g})
	}
	return names
}

func (p *Preparer) lockClaim(ctx context.Context, uid types.UID) (*lock.Guard, error) {
	locks, err := p.Locks.Acquire(ctx, claimLock(uid))
	if err != nil {
		return nil, lockError("another call for the same claim is still running", err)
	}
	return locks, nil
}

func lockGPUs(ctx context.Context, locks *lock.Guard, gpus ...string) error {
	if err := locks.Add(ctx, gpuLocks(gpus...)...); err != nil {
		return lockError("another claim is being prepared or unprepared on the same GPU", err)
	}
	return nil
}

// lockError adds a cause to err, an error of package lock. If another call has the lock, the error
// begins with waitedFor, which says what that call does. Otherwise the lock file itself failed.
func lockError(waitedFor string, err error) error {
	if isBusy(err) {
		return cause.Errorf(cause.Canceled, "%s: %w", waitedFor, err)
	}
	return cause.Wrap(cause.Record, err)
}

func isBusy(err error) bool {
	busy := new(lock.BusyError)
	return errors.As(err, &busy)
}

// runUnlessBusy runs work under the claim's lock and returns its error. If another call has the
// lock until the context waiting ends, it returns nil without running work, because that call takes
// care of the claim. If the lock file cannot be used, it returns an error.
func (p *Preparer) runUnlessBusy(waiting context.Context, uid types.UID, work func(locks *lock.Guard) error) error {
	locks, err := p.lockClaim(waiting, uid)
	if isBusy(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer locks.Release()
	return work(locks)
}

// revert undoes the steps of record r and deletes the record. The caller holds the locks of the
// claim and of its GPUs.
func (p *Preparer) revert(ctx context.Context, r checkpoint.Record) error {
	list, err := steps.Decode(r.Steps)
	if err != nil {
		return cause.Errorf(cause.Record, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	return p.undo(ctx, &r, list)
}

// undo reverts the steps and removes the record r. steps may have results that r lacks. Before undo
// destroys a MIG instance, it saves the state Reverting, but goes on if that fails, because a later
// call verifies the devices of a record in state Prepared.
func (p *Preparer) undo(ctx context.Context, r *checkpoint.Record, list []steps.Step) error {
	env := p.newEnv(r, list)
	if r.State == checkpoint.Prepared && steps.NeedsHardware(list) && !env.EarlierBoot {
		r.State = checkpoint.Reverting
		if err := env.Journal(); err != nil {
			klog.FromContext(ctx).Error(err, "Failed to record that a claim is being unprepared; reverting anyway", "claim",
				klog.KRef(r.Namespace, r.Name))
		}
	}
	work, cancel := steps.WithTimeout(ctx, steps.DestroyTime, steps.AnswerTime)
	defer cancel()
	if err := steps.RevertAll(work, env, list); err != nil {
		return cause.OrStep(fmt.Errorf("claim %s/%s: %w", r.Namespace, r.Name, err))
	}
	if err := p.Records.Remove(r.ClaimUID); err != nil {
		return cause.Errorf(cause.Record, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	return nil
}

// quarantineRecord moves an unreadable record away when its claim is prepared or unprepared. It
// removes the claim's CDI spec, and removes the claim from all settings, daemons and partitions
// that it shares. MIG instances that were created for this claim alone stay, because nothing proves
// any more that this driver created them.
func (p *Preparer) quarantineRecord(ctx context.Context, uid types.UID, unreadable *statefile.UnreadableError) error {
	entries, err := p.Records.List()
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	if err := p.Specs.RemoveClaim(uid); err != nil {
		return cause.Wrap(cause.Step, err)
	}
	if err := p.leaveSharedSteps(ctx, uid); err != nil {
		return err
	}
	places, err := p.Records.Quarantine(uid, p.Now())
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	logger := klog.FromContext(ctx).WithValues("claimUID", uid, "quarantine", places)
	logger.Error(unreadable, "Quarantined unreadable claim record")
	p.OnRepaired(Repair{"unreadable-record", "Quarantined unreadable claim record", string(uid)})
	if parts, some := possiblePartitions(entries, uid); some {
		logger.Error(nil, "Kept the MIG instances of a claim whose record was quarantined; until they are removed, their GPUs are offered "+
			"with their present partitions only: remove unused instances with nvidia-smi mig -dci and -dgi, or set the GPU's policy to adopt",
			"devices", parts)
	}
	return nil
}

// possiblePartitions returns the unshared partitions in the file names of the claim's records. The
// result some is true if there are any, or if a file name has no room to list the devices.
func possiblePartitions(entries []checkpoint.Entry, uid types.UID) (parts []string, some bool) {
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

// steps.NewEnv returns the environment in which the steps of record r run.
func (p *Preparer) newEnv(r *checkpoint.Record, list []steps.Step) *steps.Env {
	return steps.NewEnv(steps.Node{
		BootID: p.BootID, Now: p.Now, Records: p.Records, Specs: p.Specs, Hardware: p.Hardware, Partitions: p.Partitions, MPS: p.MPS,
	}, r, list)
}

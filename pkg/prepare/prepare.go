package prepare

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claim"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// readClaimTime limits how long Prepare waits for the API server. It is far below the kubelet's
// timeout of 45 s, so that an error still reaches the kubelet.
const readClaimTime = 5 * time.Second

// Prepare makes the claim's devices usable and returns the CDI devices that the container runtime
// injects. The kubelet may call it again at any time.
//
// If another claim uses one of the devices, Prepare waits for that claim, at most ConflictWait. A
// Pod deleted by force frees its claim for the scheduler before the kubelet has stopped the Pod.
// Without this wait the kubelet would retry only after ten seconds or more.
func (p *Preparer) Prepare(ctx context.Context, c *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	devices, err := p.prepare(ctx, c, false)
	if err == nil {
		return devices, nil
	}
	if cause.Of(err) == cause.Held {
		devices, err = p.prepareAfterConflict(ctx, c, err)
	}
	if err != nil {
		return nil, cause.ForClaim(c.Namespace+"/"+c.Name, err)
	}
	return devices, nil
}

// prepare tries once to prepare the claim. If "waited" is true, the claim may have changed since c
// was read from the API server, so prepare reads it again.
func (p *Preparer) prepare(ctx context.Context, c *resourceapi.ResourceClaim, waited bool) ([]kubeletplugin.Device, error) {
	locks, err := p.LockClaim(ctx, c.UID)
	if err != nil {
		return nil, err
	}
	defer locks.Release()
	if err := checkReserved(c); err != nil {
		return nil, err
	}
	old, found, unread := p.node.Records.Load(c.UID)
	// A claim that is refused changes nothing, and does not wait for a GPU that hangs.
	pl, done, err := p.admit(c, old)
	defer done()
	if err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, canceledError(ctx)
	}
	// No other call can unprepare the claim while it is locked, so the API server's answer stays valid
	// until this call has locked the GPUs. Asking before that keeps other claims on the GPUs from
	// waiting for the API server.
	if waited || locks.Waited || p.opts.Claims.UnpreparedSince(ctx, c.UID) {
		if err := p.checkUnchanged(ctx, c); err != nil {
			return nil, err
		}
	}
	unreadable := new(statefile.UnreadableError)
	switch {
	case errors.As(unread, &unreadable):
		if err := p.quarantineRecord(ctx, c.UID, unreadable); err != nil {
			return nil, err
		}
		found = false
	case unread != nil:
		return nil, cause.Wrap(cause.Record, unread)
	}
	if err := LockGPUs(ctx, locks, append(pl.record.GPUs(), old.GPUs()...)...); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, canceledError(ctx)
	}
	pl, again, err := p.admit(c, old) // the node may have changed since
	defer again()
	if err != nil {
		return nil, err
	}
	if found {
		kept, err := p.reprepare(ctx, old, pl)
		if err != nil {
			return nil, err
		}
		if kept {
			return pl.answer, nil
		}
	}
	if len(pl.record.Devices) == 0 {
		return nil, nil
	}
	sameAllocation := found && slices.EqualFunc(old.Devices, pl.record.Devices, sameDevice)
	if err := p.checkConflicts(pl, sameAllocation); err != nil {
		return nil, err
	}
	if err := p.execute(ctx, pl); err != nil {
		return nil, err
	}
	return pl.answer, nil
}

// admit asks whether the node may prepare the claim now, whose record is old, and makes the plan.
// The hardware may be used until the caller calls done.
func (p *Preparer) admit(c *resourceapi.ResourceClaim, old checkpoint.Record) (pl *plan, done func(), err error) {
	done, err = p.opts.Admit(c, old)
	if err == nil {
		pl, err = p.makePlan(p.node.Hardware.Snapshot(), c)
	}
	return pl, done, err
}

// checkReserved refuses a claim that is reserved for no Pod. The kubelet never prepares such a
// claim, so this must be a late call: its Pod is gone and the claim was already unprepared. If the
// call succeeded, no later call would unprepare the claim.
//
// A late call cannot always be recognized. The call for the claim's next Pod has the same UID and
// allocation, and a PodGroup keeps its claim reserved while it has no Pod. If a late call prepares
// such a claim, the driver unprepares the claim once the PodGroup is gone: see
// [ledger.Ledger.OrphanReason].
func checkReserved(c *resourceapi.ResourceClaim) error {
	if c.Status.Allocation != nil && len(c.Status.ReservedFor) == 0 {
		return cause.Errorf(cause.Claim, "the claim is not reserved for any Pod: this call is late, or was sent twice")
	}
	return nil
}

// canceledError refuses a call that the kubelet has canceled. After that the kubelet unprepares the
// claim.
func canceledError(ctx context.Context) error {
	return cause.Errorf(cause.Canceled, "the kubelet canceled this call: %w", ctx.Err())
}

// checkUnchanged reads the claim from the API server. It returns an error unless the claim has the
// same allocation and is reserved for a Pod, because the kubelet may have canceled this call while
// it waited, and the claim's next Pod may be on another node.
func (p *Preparer) checkUnchanged(ctx context.Context, c *resourceapi.ResourceClaim) error {
	reading, cancel := context.WithTimeoutCause(ctx, readClaimTime, fmt.Errorf("the API server did not answer within %s: the kubelet retries",
		readClaimTime))
	defer cancel()
	now, err := p.opts.Claims.Read(reading, c.Namespace, c.Name)
	if err != nil {
		return cause.Errorf(cause.Canceled, "read the claim again after a wait: %w", cmp.Or(context.Cause(reading), err))
	}
	if now.UID != c.UID {
		return cause.Errorf(cause.Claim, "another claim of the same name (UID %s) replaced the claim while this call waited", now.UID)
	}
	before, _ := claim.Read(c, device.DriverName)
	after, err := claim.Read(now, device.DriverName)
	if err != nil {
		return cause.Errorf(cause.Claim, "after a wait: %w", err)
	}
	if err := checkReserved(now); err != nil {
		return err
	}
	if !equality.Semantic.DeepEqual(before, after) {
		return cause.Errorf(cause.Canceled, "the claim's allocation changed while this call waited: the kubelet retries")
	}
	return nil
}

// verifyNode writes the node-wide CDI spec if there is no usable one, unless the claim is for
// virtual machines only. It returns an error if a file that every GPU container needs does not
// exist.
func (p *Preparer) verifyNode(pl *plan) error {
	if !slices.ContainsFunc(pl.requests, func(req deviceRequest) bool { return !req.name.Passthrough }) {
		return nil
	}
	if err := p.opts.Edits.Verify(pl.snapshot.Node.Common); err != nil {
		return cause.Errorf(cause.NotReady, "files that every GPU container needs are missing on this node: %w", err)
	}
	return cause.Wrap(cause.Step, p.node.Specs.EnsureBase(pl.snapshot.Node.Common, p.opts.Edits.Verify))
}

// execute prepares the claim: it plans the steps, saves them as a record, applies them and saves
// the result. If one of these fails, execute reverts the steps. If that fails too, the record
// stays, and the claim's next call, the plugin's next start or Reconcile reverts it.
func (p *Preparer) execute(ctx context.Context, pl *plan) (err error) {
	if err := p.verifyNode(pl); err != nil {
		return err
	}
	work, cancel := steps.WithTimeout(ctx, steps.CallTime, steps.AnswerTime+steps.UndoTime)
	defer cancel()
	if len(pl.sharing.clients) > 0 {
		if err := p.checkSupervisor(work); err != nil {
			return err
		}
	}
	r := &pl.record
	env := steps.NewEnv(p.node, r, nil)
	env.UUID = pl.deviceUUID
	pl.spec = &steps.ClaimSpec{Clients: pl.sharing.clients, Metadata: pl.metadata}
	pl.steps = nil // reprepare may have adopted those of the claim's old record
	for _, req := range pl.requests {
		if req.passthrough != nil {
			pl.steps = append(pl.steps, req.passthrough)
		}
	}
	if pl.partitioned {
		if err := p.resolvePartitions(work, env, pl); err != nil {
			return err
		}
	}
	for _, s := range pl.sharing.shared {
		pl.steps = append(pl.steps, s)
	}
	r.State = checkpoint.Preparing
	env.Steps = pl.allSteps()
	if err := p.leaveMIGModes(work, env, pl); err != nil {
		return err
	}
	// The CDI spec alone need not be recorded first, because the plugin's next start removes a spec
	// without a record.
	if len(pl.steps) > 0 {
		if err := env.Journal(); err != nil {
			return errors.Join(err, p.node.Records.Remove(r.ClaimUID))
		}
		err = steps.ApplyAll(work, env, pl.steps)
	}
	if err == nil {
		err = p.writeSpec(work, env, pl)
	}
	if err == nil {
		err = p.recordResult(r, env)
	}
	if err == nil {
		return nil
	}
	undo, cancelUndo := context.WithTimeout(context.WithoutCancel(ctx), steps.UndoTime+steps.AnswerTime)
	defer cancelUndo()
	if rerr := p.undo(undo, r, env.Steps); rerr != nil {
		klog.FromContext(ctx).Error(rerr, "Failed to revert a failed preparation; the next call for the claim, or Reconcile, reverts it")
	}
	return cause.OrStep(err)
}

// leaveMIGModes disables the MIG mode of the GPUs of which the claim has the whole or a share.
// Nothing must revert that: creating the next partition enables the mode. It reads a GPU only if
// the inventory or a mark of this driver on disk says that the mode may be enabled.
func (p *Preparer) leaveMIGModes(ctx context.Context, env *steps.Env, pl *plan) error {
	checked := map[string]bool{} // the claim may have several shares of a GPU
	for i, req := range pl.requests {
		d, mig := pl.record.Devices[i], req.gpu.MIG
		bound := req.passthrough
		away := bound != nil && (bound.ByAdmin || bound.Found != nil || bound.Card.UUID == "") // NVIDIA's driver does not have it
		if req.name.Partition != nil || d.AdminAccess || checked[d.GPU] || away {
			continue
		}
		checked[d.GPU] = true
		_, marked, err := p.node.Records.Marked(d.GPU)
		if err != nil {
			return cause.Errorf(cause.Record, "request %s: %w", d.Request, err)
		}
		if !marked && (mig == nil || !mig.Enabled) {
			continue
		}
		if err := p.leaveMIGMode(ctx, env, req.gpu); err != nil {
			return cause.Errorf(cause.Of(err), "request %s: %w", d.Request, err)
		}
	}
	return nil
}

// writeSpec writes the claim's CDI spec and metadata, and fills in the answer to the kubelet and
// the MIG UUIDs of the record. All steps that create partitions were applied before. If a file or
// device node in the spec does not exist, writeSpec returns an error instead.
func (p *Preparer) writeSpec(ctx context.Context, env *steps.Env, pl *plan) error {
	pl.spec.Devices, pl.answer = nil, nil
	for i, req := range pl.requests {
		d, edits := &pl.record.Devices[i], req.gpuEdits
		switch {
		case req.passthrough != nil:
			edits = passthroughEdits(req.passthrough)
		case req.name.Partition != nil:
			part, err := req.partition()
			if err != nil {
				return err
			}
			d.MIGUUID = part.compute.UUID
			edits = p.opts.Edits.MIG(edits, part.instance, part.compute)
		}
		if err := p.checkBinding(req); err != nil {
			return err
		}
		d.Binding = req.binding
		if err := p.opts.Edits.Verify(edits); err != nil {
			return cause.Errorf(cause.Device, "device %s: %w", d.Device, err)
		}
		for _, c := range pl.spec.Clients {
			if slices.Contains(c.Devices, i) {
				edits = p.addClientEdits(edits, c, req.gpu.Minor)
			}
		}
		if d.AdminAccess {
			edits = mergeEdits(edits, p.opts.Edits.Monitor())
		}
		// Two requests with admin access may have the same device, but a CDI spec may name each device
		// only once.
		name := cdi.ClaimDeviceName(pl.record.ClaimUID, d.Device, d.ShareID)
		if !slices.ContainsFunc(pl.spec.Devices, func(there specs.Device) bool { return there.Name == name }) {
			pl.spec.Devices = append(pl.spec.Devices, specs.Device{Name: name, ContainerEdits: edits})
		}
		given := kubeletplugin.Device{Requests: []string{d.Request}, PoolName: p.opts.Pool, DeviceName: d.Device, ShareID: d.ShareID}
		if !req.name.Passthrough {
			given.CDIDeviceIDs = []string{cdi.BaseID}
		}
		given.CDIDeviceIDs = append(given.CDIDeviceIDs, cdi.ClaimKind+"="+name)
		pl.answer = append(pl.answer, given)
	}
	for _, c := range pl.spec.Clients {
		if err := p.opts.Edits.Verify(p.opts.Edits.MPSClient(c.Daemon)); err != nil {
			return cause.Errorf(cause.Step, "files that clients of MPS daemon %s need are missing on this node: %w", c.Daemon, err)
		}
	}
	if err := p.describeDevices(pl); err != nil {
		return err
	}
	return pl.spec.Apply(ctx, env)
}

// recordResult saves r as the record of a prepared claim, with the steps of env.
func (p *Preparer) recordResult(r *checkpoint.Record, env *steps.Env) error {
	r.State, r.BootID = checkpoint.Prepared, p.node.BootID
	return env.Journal()
}

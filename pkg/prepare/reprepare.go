package prepare

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// reprepare keeps or reverts the claim's earlier preparation, which old records. If it was finished
// with the same allocation and sharing, in this boot where that matters, reprepare repairs it and
// returns kept true. Otherwise it reverts it, and the caller prepares the claim anew.
func (p *Preparer) reprepare(ctx context.Context, old checkpoint.Record, pl *plan) (kept bool, err error) {
	logger := klog.FromContext(ctx)
	if old.State != checkpoint.Prepared || len(pl.record.Devices) == 0 || !slices.EqualFunc(old.Devices, pl.record.Devices, sameDevice) {
		logger.Info("Reverting earlier preparation of claim: it is unfinished, or the allocation changed",
			"state", old.State, "devices", deviceNames(old.Devices))
		return false, p.revertOld(ctx, old)
	}
	rebooted, replaced := old.BootID != p.node.BootID, false
	for i, d := range old.Devices {
		req := &pl.requests[i]
		if wasReplaced(d, *req) {
			// A reboot ended all that was prepared on the old card, so one of the same model can take its
			// place, as when a cloud starts a virtual machine on another host.
			if model := req.gpu.Model(); !rebooted || model == "" || model != d.Model {
				return false, replacedError(d, req.gpu)
			}
			replaced = true
		}
		req.gpu.UUID = cmp.Or(req.gpu.UUID, d.GPUUUID)
	}
	bound := slices.ContainsFunc(pl.requests, func(req deviceRequest) bool { return req.passthrough != nil })
	if (replaced || pl.partitioned || steps.HasShared(old) || bound) && rebooted {
		if err := p.checkForeignPartitions(ctx, old, pl); err != nil {
			return false, err
		}
		logger.Info("Preparing claim anew: its partitions and settings were lost at a reboot, or a card of the same model has the place of "+
			"its GPU since then", "devices", deviceNames(old.Devices), "replaced", replaced)
		return false, p.revertOld(ctx, old)
	}
	asked := pl.sharing
	known, err := p.adoptSteps(pl, old)
	if err != nil {
		return false, cause.Wrap(cause.Record, err)
	}
	if !known || !pl.matchesSharing(asked) {
		logger.Info("Preparing claim anew: its sharing configuration changed, or another version of the driver recorded other steps",
			"devices", deviceNames(old.Devices))
		return false, p.revertOld(ctx, old)
	}
	// The answer to the kubelet relies on the record. A killed process may have written it without
	// syncing the directory.
	if err := p.node.Records.SyncDirs(steps.HasShared(old)); err != nil {
		return false, cause.Wrap(cause.Record, err)
	}
	if err := p.verifyNode(pl); err != nil {
		return false, err
	}
	work, cancel := steps.WithTimeout(ctx, steps.CallTime, steps.AnswerTime)
	defer cancel()
	env := steps.NewEnv(p.node, &old, nil)
	if err := p.leaveMIGModes(work, env, pl); err != nil {
		return false, err
	}
	env.Steps = pl.allSteps()
	if err := steps.ApplyAll(work, env, steps.Of[*steps.Passthrough](pl.steps)); err != nil {
		return false, cause.OrStep(err)
	}
	return true, p.refresh(work, old, pl, p.restoreAll)
}

// revertOld undoes what the claim's old record says was prepared, so that the claim can be prepared
// anew.
func (p *Preparer) revertOld(ctx context.Context, old checkpoint.Record) error {
	if err := p.Revert(ctx, old); err != nil {
		return err
	}
	p.opts.Observer.Unprepared(old.ClaimUID)
	return nil
}

// checkForeignPartitions runs after a reboot. It returns an error if a partition of the claim that
// this driver did not create does not exist yet. The driver never creates such a partition itself.
func (p *Preparer) checkForeignPartitions(ctx context.Context, old checkpoint.Record, pl *plan) error {
	list, err := steps.Decode(old.Steps)
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	owned := map[string]bool{}
	for _, step := range list {
		if c, ok := steps.AsCreator(step); ok {
			owned[c.Partition()] = true
		}
	}
	work, cancel := steps.WithTimeout(ctx, steps.CallTime, steps.AnswerTime)
	defer cancel()
	env := steps.NewEnv(p.node, &old, nil)
	for i, d := range old.Devices {
		req := &pl.requests[i]
		if req.name.Partition == nil || d.AdminAccess || owned[d.Device] {
			continue
		}
		if _, _, found, err := p.instanceAtPlace(work, env, req); err != nil {
			return cause.Errorf(cause.Of(err), "request %s: %w", d.Request, err)
		} else if !found {
			return cause.Errorf(cause.NotReady,
				"request %s: device %s was created outside this driver and lost at a reboot: create it again (nvidia-smi mig), or delete the "+
					"claim's Pods to have another device allocated",
				d.Request, d.Device)
		}
	}
	return nil
}

// adoptSteps replaces the plan's steps by the recorded steps. It returns false if these do not fit
// the claim's devices: a step creates a partition for none of them, or the steps do not write
// exactly one CDI spec.
func (p *Preparer) adoptSteps(pl *plan, old checkpoint.Record) (bool, error) {
	list, err := steps.Decode(old.Steps)
	if err != nil {
		return false, err
	}
	specs := steps.Of[*steps.ClaimSpec](list)
	if len(specs) != 1 {
		return false, nil
	}
	pl.spec = specs[0]
	if pl.metadata != nil {
		pl.spec.Metadata = pl.metadata
	}
	pl.steps = slices.DeleteFunc(list, func(s steps.Step) bool { return s == steps.Step(specs[0]) })
	creators := map[string]steps.Creator{}
	for _, step := range pl.steps {
		if c, ok := steps.AsCreator(step); ok {
			if err := c.Load(p.node.Records, p.node.BootID); err != nil {
				return false, err
			}
			creators[c.Partition()] = c
		}
	}
	used := map[string]bool{}
	for i := range pl.requests {
		req, d := &pl.requests[i], old.Devices[i]
		pl.record.Devices[i].MIGUUID = d.MIGUUID
		if req.creator = creators[d.Device]; req.creator != nil {
			used[d.Device] = true
		}
	}
	return len(used) == len(creators) && pl.adoptPassthrough(), nil
}

// refresh repairs a finished preparation. First it calls ensure, which may recreate lost partitions
// and restore shared settings. Then it writes the CDI spec, and then the record if that changed.
func (p *Preparer) refresh(ctx context.Context, old checkpoint.Record, pl *plan, ensure driftCheck) error {
	r := old
	r.Devices = slices.Clone(old.Devices)
	env := steps.NewEnv(p.node, &r, pl.allSteps())
	env.UUID = pl.deviceUUID
	if pl.partitioned || len(steps.Of[*steps.Shared](pl.steps)) > 0 {
		if err := ensure(ctx, env, pl); err != nil {
			return err
		}
	}
	if err := p.writeSpec(ctx, env, pl); err != nil {
		return cause.OrStep(err)
	}
	// If ensure recreated a partition, the MIGInstance step that did so has already saved the new
	// partition in the claim's record.
	same, err := sameSteps(r.Steps, env.Steps)
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	changed, others := r.BootID != p.node.BootID || !same, false
	for i := range r.Devices {
		now := pl.record.Devices[i]
		if r.Devices[i].MIGUUID != now.MIGUUID {
			r.Devices[i].MIGUUID, changed, others = now.MIGUUID, true, true
		}
		if r.Devices[i].Binding != now.Binding {
			r.Devices[i].Binding, changed = now.Binding, true
		}
	}
	if !changed {
		return nil
	}
	if err := p.recordResult(&r, env); err != nil {
		return err
	}
	if others {
		p.opts.Observer.Changed(ctx, kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Namespace: r.Namespace, Name: r.Name},
			UID: r.ClaimUID})
	}
	return nil
}

// matchesSharing reports whether a plan made from a record has the same shared settings, MPS
// daemons and limits as "asked", which the claim's current configuration asks for. Their order may
// be that of another version of the driver.
func (pl *plan) matchesSharing(asked sharing) bool {
	there := slices.DeleteFunc(steps.Of[*steps.Shared](pl.steps), func(s *steps.Shared) bool {
		_, creates := steps.AsCreator(s)
		return creates
	})
	return sameSet(there, asked.shared, (*steps.Shared).Wants) && sameSet(pl.spec.Clients, asked.clients, sameClient)
}

// sameSet reports whether a and b have the same elements in any order. Each has an element once.
func sameSet[T any](a, b []T, same func(T, T) bool) bool {
	return len(a) == len(b) && !slices.ContainsFunc(a, func(x T) bool {
		return !slices.ContainsFunc(b, func(y T) bool { return same(x, y) })
	})
}

// sameClient reports whether a and b are equal except for Whole. Whole depends on what the hardware
// supported when the claim was prepared, and running containers keep that value.
func sameClient(a, b steps.MPSClient) bool {
	a.Whole, b.Whole = "", ""
	return reflect.DeepEqual(a, b)
}

func replacedError(d checkpoint.Device, now device.GPU) error {
	problem := "the card was replaced"
	if d.Model != "" && now.Model() != d.Model {
		problem += fmt.Sprintf(" by one of another model (it was %s, and is %s)", d.Model, cmp.Or(now.Model(), "unknown"))
	}
	return cause.Errorf(cause.Device,
		"request %s: device %s was GPU %s when the claim was prepared and is GPU %s now: %s: delete the claim's Pods",
		d.Request, d.Device, d.GPUUUID, now.UUID, problem)
}

// sameDevice reports whether old and now are the same device of the allocation. It ignores GPU
// UUIDs: a replaced card is no change of the allocation.
func sameDevice(old, now checkpoint.Device) bool {
	sameCapacity := maps.EqualFunc(old.ConsumedCapacity, now.ConsumedCapacity, func(a, b resource.Quantity) bool { return a.Equal(b) })
	return old.Request == now.Request && old.Pool == now.Pool && old.Device == now.Device && old.AdminAccess == now.AdminAccess &&
		ptr.Equal(old.ShareID, now.ShareID) && sameCapacity
}

// sameSteps reports whether the record already has these steps. It ignores fields that this version
// does not know, so that it does not rewrite a record only to drop them.
func sameSteps(recorded []checkpoint.Step, now []steps.Step) (bool, error) {
	before, err := steps.Decode(recorded)
	if err != nil {
		return false, err
	}
	a, err := steps.Encode(before)
	if err != nil {
		return false, err
	}
	b, err := steps.Encode(now)
	return slices.EqualFunc(a, b, func(x, y checkpoint.Step) bool {
		return x.Kind == y.Kind && bytes.Equal(x.Params, y.Params)
	}), err
}

func deviceNames(devices []checkpoint.Device) []string {
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = d.Device
	}
	return names
}

package reconciler

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/reconcile"
)

// maxNamedSpecs is how many repaired CDI specs an Event names. If someone removed the whole CDI
// directory, there may be hundreds.
const maxNamedSpecs = 5

// RepairSpecs restores the CDI specs of prepared claims that another process removed or altered.
// Specs whose repair needs the hardware are only queued, and RunSpecRepairs restores them.
// RepairSpecs returns only errors that a retry may fix.
func (r *Reconciler) RepairSpecs(ctx context.Context) error {
	if r.opts.NewerLeads() {
		return nil
	}
	done, ok := r.opts.Hardware.Use()
	defer done()
	if !ok {
		r.markSpecsUnchecked() // repairs may need the hardware, so do them after the release
		return nil
	}
	var err error
	if s := r.opts.Inventory.Snapshot(); s.Ready {
		err = r.opts.BaseSpec.WriteBase(s.Node.Common)
	}
	err = errors.Join(err, r.specs.Repair(ctx))
	retryable := reconcile.Retryable(err)
	if err != nil && retryable == nil {
		klog.FromContext(ctx).Error(err, "Failed to restore CDI specs of some claims; an operator has to act")
	}
	return retryable
}

// RunSpecRepairs restores the CDI specs whose repair needs the hardware, until the context ends.
func (r *Reconciler) RunSpecRepairs(ctx context.Context) { r.specs.Run(ctx) }

// TakeUncheckedSpecs reports whether CDI specs were not repaired because the GPUs were released.
// The caller must then call RepairSpecs: the next call of TakeUncheckedSpecs returns false.
func (r *Reconciler) TakeUncheckedSpecs() bool { return r.specsUnchecked.Swap(false) }

func (r *Reconciler) markSpecsUnchecked() { r.specsUnchecked.Store(true) }

// ReportRepairedSpecs reports that CDI specs with these names were restored.
func (r *Reconciler) ReportRepairedSpecs(ctx context.Context, specs []string) {
	const what = "Restored CDI specs that another process had removed or altered"
	klog.FromContext(ctx).Info(what, "specs", specs)
	object := strings.Join(specs[:min(len(specs), maxNamedSpecs)], ", ")
	if more := len(specs) - maxNamedSpecs; more > 0 {
		object += fmt.Sprintf(" and %d more", more)
	}
	r.opts.Reports.Repaired(prepare.Repair{Kind: "cdi-spec", What: what, Object: object})
}

// specQueue restores the CDI specs of prepared claims. A repair that needs no hardware access is
// done at once. Each other claim is repaired in a goroutine of its own, so that a hung GPU delays
// only the specs of its own claims.
type specQueue struct {
	claims interface {
		RepairSpecs(ctx context.Context) (left []types.UID, _ error)
		RepairClaimSpec(ctx context.Context, claim types.UID) error
	}
	hardware Hardware
	// onUnavailable is called instead of a repair if the GPUs are released. onFailure is called when a
	// repair failed.
	onUnavailable, onFailure func()
	// queue contains each claim at most once and never gives the same claim to two goroutines.
	queue workqueue.TypedInterface[types.UID]
}

// Repair restores all CDI specs whose repair needs no hardware access. It queues the claims whose
// CDI specs need it.
func (q *specQueue) Repair(ctx context.Context) error {
	left, err := q.claims.RepairSpecs(ctx)
	for _, uid := range left {
		q.queue.Add(uid)
	}
	return err
}

// Run restores the CDI specs of queued claims until the context ends.
func (q *specQueue) Run(ctx context.Context) {
	defer context.AfterFunc(ctx, q.queue.ShutDown)()
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		uid, ended := q.queue.Get()
		if ended {
			return
		}
		wg.Go(func() {
			defer q.queue.Done(uid)
			q.repairClaim(ctx, uid)
		})
	}
}

func (q *specQueue) repairClaim(ctx context.Context, uid types.UID) {
	done, ok := q.hardware.Use()
	defer done()
	if !ok {
		q.onUnavailable()
		return
	}
	if err := q.claims.RepairClaimSpec(ctx, uid); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Failed to restore the claim's CDI spec; the next reconciliation retries", "claimUID", uid)
		q.onFailure()
	}
}

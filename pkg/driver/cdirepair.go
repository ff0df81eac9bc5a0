package driver

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
)

// maxNamedSpecs is how many repaired CDI specs an Event names. If someone removed the whole CDI
// directory, there may be hundreds.
const maxNamedSpecs = 5

// repairSpecs restores the CDI specs of prepared claims that another process removed or altered.
// Specs whose repair needs the hardware are only queued, and are restored later. repairSpecs
// returns only errors that a retry may fix.
func (d *Driver) repairSpecs(ctx context.Context) error {
	if d.newerLeads.Load() {
		return nil
	}
	done, ok := d.quiesce.Use()
	defer done()
	if !ok {
		d.specsUnchecked.Store(true) // repairs may need the hardware, so do them after the release
		return nil
	}
	var err error
	if s := d.inv.Snapshot(); s.Ready {
		err = d.specs.WriteBase(s.Node.Common)
	}
	err = errors.Join(err, d.cdiRepairs.Repair(ctx))
	retryable := prepare.Retryable(err)
	if err != nil && retryable == nil {
		klog.FromContext(ctx).Error(err, "Failed to restore CDI specs of some claims; an operator has to act")
	}
	return retryable
}

func (d *Driver) reportRepairedSpecs(ctx context.Context, specs []string) {
	const what = "Restored CDI specs that another process had removed or altered"
	klog.FromContext(ctx).Info(what, "specs", specs)
	object := strings.Join(specs[:min(len(specs), maxNamedSpecs)], ", ")
	if more := len(specs) - maxNamedSpecs; more > 0 {
		object += fmt.Sprintf(" and %d more", more)
	}
	reports{d.events, d.metrics}.Repaired(prepare.Repair{Kind: "cdi-spec", What: what, Object: object})
}

// cdiRepairQueue restores the CDI specs of prepared claims. A repair that needs no hardware access
// is done at once. Each other claim is repaired in a goroutine of its own, so that a hung GPU
// delays only the specs of its own claims.
type cdiRepairQueue struct {
	claims interface {
		RepairSpecs(ctx context.Context) (left []types.UID, _ error)
		RepairClaimSpec(ctx context.Context, claim types.UID) error
	}
	// use must be called before any access to the hardware, and its result done after that. If ok is
	// false, the driver is releasing the GPUs, and the hardware must not be accessed.
	use func() (done func(), ok bool)
	// onUnavailable is called instead of a repair when use returns false, because the GPUs are
	// released.
	onUnavailable func()
	// onFailure is called when the repair of a claim's CDI spec failed. It wakes reconciliation, which
	// retries the repair.
	onFailure func()
	// queue contains each claim at most once and never gives the same claim to two goroutines.
	queue workqueue.TypedInterface[types.UID]
}

// Repair restores all CDI specs whose repair needs no hardware access. It queues the claims whose
// CDI specs need it.
func (q *cdiRepairQueue) Repair(ctx context.Context) error {
	left, err := q.claims.RepairSpecs(ctx)
	for _, uid := range left {
		q.queue.Add(uid)
	}
	return err
}

// Run restores the CDI specs of queued claims until the context ends.
func (q *cdiRepairQueue) Run(ctx context.Context) {
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

func (q *cdiRepairQueue) repairClaim(ctx context.Context, uid types.UID) {
	done, ok := q.use()
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

package reconciler

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"
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
	done, ok := r.opts.Use()
	defer done()
	if !ok {
		return nil // the reconciliation after the release writes the specs
	}
	var err error
	if s := r.opts.Inventory.Snapshot(); s.Ready {
		err = r.opts.WriteBase(s.Node.Common)
	}
	left, repairErr := r.opts.Claims.RepairSpecs(ctx)
	for _, uid := range left {
		r.specs.Add(uid)
	}
	err = errors.Join(err, repairErr)
	retryable := reconcile.Retryable(err)
	if err != nil && retryable == nil {
		klog.FromContext(ctx).Error(err, "Failed to restore CDI specs of some claims; an operator has to act")
	}
	return retryable
}

// RunSpecRepairs restores the CDI specs whose repair needs the hardware, until the context ends. It
// repairs each claim in a goroutine of its own, so that a hung GPU delays only its own claims.
func (r *Reconciler) RunSpecRepairs(ctx context.Context) {
	defer context.AfterFunc(ctx, r.specs.ShutDown)()
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		uid, ended := r.specs.Get()
		if ended {
			return
		}
		wg.Go(func() {
			defer r.specs.Done(uid)
			r.repairClaimSpec(ctx, uid)
		})
	}
}

func (r *Reconciler) repairClaimSpec(ctx context.Context, uid types.UID) {
	done, ok := r.opts.Use()
	defer done()
	if !ok {
		return
	}
	if err := r.opts.Claims.RepairClaimSpec(ctx, uid); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Failed to restore the claim's CDI spec; the next reconciliation retries", "claimUID", uid)
		r.Wake()
	}
}

// ReportRepairedSpecs reports that CDI specs with these names were restored.
func (r *Reconciler) ReportRepairedSpecs(ctx context.Context, specs []string) {
	const what = "Restored CDI specs that another process had removed or altered"
	klog.FromContext(ctx).Info(what, "specs", specs)
	object := strings.Join(specs[:min(len(specs), maxNamedSpecs)], ", ")
	if more := len(specs) - maxNamedSpecs; more > 0 {
		object += fmt.Sprintf(" and %d more", more)
	}
	r.opts.Repaired(prepare.Repair{Kind: "cdi-spec", What: what, Object: object})
}

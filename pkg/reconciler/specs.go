package reconciler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

// maxNamedSpecs is how many repaired CDI specs an Event names. If someone removed the whole CDI
// directory, there may be hundreds.
const maxNamedSpecs = 5

// repair writes the base spec, repairs the claims, and reports the CDI specs that were missing
// before and exist now.
func (r *Reconciler) repair(ctx context.Context) error {
	claims := uidsOf(r.specifiedClaims())
	missing := r.opts.Specs.Missing(claims)
	var err error
	if s := r.opts.Inventory.Snapshot(); s.Ready {
		err = r.opts.Specs.WriteBase(s.Node.Common)
	}
	err = errors.Join(err, r.opts.Claims.Reconcile(ctx))
	still := r.opts.Specs.Missing(claims)
	r.unrepaired = nil
	var repaired []string
	for _, spec := range missing {
		if slices.Contains(still, spec) {
			r.unrepaired = append(r.unrepaired, spec)
		} else {
			repaired = append(repaired, spec)
		}
	}
	if len(repaired) > 0 {
		r.reportRepaired(ctx, repaired)
	}
	return err
}

// specWasLost reports whether a CDI spec is missing that the last comparison may be able to repair.
// Before that it removes specs that may name another card's device nodes.
func (r *Reconciler) specWasLost(ctx context.Context) bool {
	if r.opts.NewerLeads() {
		return false
	}
	claims := r.specifiedClaims()
	if err := r.opts.Claims.WithdrawSpecs(ctx, claims); err != nil {
		klog.FromContext(ctx).V(2).Info("Failed to withdraw CDI specs; retrying", "err", err)
	}
	return slices.ContainsFunc(r.opts.Specs.Missing(uidsOf(claims)), func(spec string) bool {
		return !slices.Contains(r.unrepaired, spec)
	})
}

// specifiedClaims returns the claims that should have a CDI spec. After a reboot a claim has none
// until the kubelet prepares it again.
func (r *Reconciler) specifiedClaims() (here []checkpoint.Record) {
	claims, _ := r.opts.Claims.PreparedClaims() // Reconcile returns the same error
	for _, c := range claims {
		if c.BootID == r.opts.BootID {
			here = append(here, c)
		}
	}
	return here
}

func uidsOf(claims []checkpoint.Record) (uids []types.UID) {
	for _, c := range claims {
		uids = append(uids, c.ClaimUID)
	}
	return uids
}

func (r *Reconciler) reportRepaired(ctx context.Context, specs []string) {
	const what = "Restored missing CDI specs"
	klog.FromContext(ctx).Info(what, "specs", specs)
	object := strings.Join(specs[:min(len(specs), maxNamedSpecs)], ", ")
	if more := len(specs) - maxNamedSpecs; more > 0 {
		object += fmt.Sprintf(" and %d more", more)
	}
	r.opts.Repaired(prepare.Repair{Kind: "cdi-spec", What: what, Object: object})
}

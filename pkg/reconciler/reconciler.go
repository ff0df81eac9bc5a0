// Package reconciler runs reconciliation in the background: it compares the claims' checkpoint
// records with the hardware, regularly and when woken, and repairs what differs.
//
// After each comparison the [Reconciler] also adopts MIG instances that an admin handed over, and
// switches off MIG modes that nothing needs. While the GPUs are released for a driver upgrade, or a
// newer plugin instance leads, it does nothing, and makes up for it afterwards.
//
// A comparison also writes CDI specs that another process removed or altered. The Reconciler looks
// for removed ones every two seconds, because the kubelet does not call Prepare when a container
// restarts. As often it removes those whose device nodes may belong to other cards since the NVIDIA
// driver was loaded again, also while the GPUs are released.
//
// The package does not know how a difference is repaired: package prepare does.
package reconciler

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/wake"
)

// Claims works on the claims' checkpoint records and on what they describe.
type Claims interface {
	// WithdrawSpecs removes the CDI specs of those claims that may name another card's device nodes
	// now. It needs no access to the GPUs.
	WithdrawSpecs(ctx context.Context, claims []checkpoint.Record) error
	// Reconcile compares the records with the hardware, and finishes or rolls back interrupted calls.
	// Its error lists what still differs.
	Reconcile(ctx context.Context) error
	// Adopt removes the admin's MIG instances on the GPU that no claim has. It calls allocated only if
	// there may be one.
	Adopt(ctx context.Context, g device.GPU, allocated func() (device.Allocations, error)) error
	DisableUnusedMIGMode(ctx context.Context, g device.GPU) (off bool, _ error)
	PreparedClaims() ([]checkpoint.Record, error)
}

// Specs are the CDI specs. [cdi.Store] implements it.
type Specs interface {
	// WriteBase writes the node-wide CDI spec.
	WriteBase(common specs.ContainerEdits) error
	// Missing returns the names of the specs that were written once and do not exist: the node-wide
	// one, and those of these prepared claims.
	Missing(claims []types.UID) []string
}

// Inventory has the node's GPUs as of the last scan.
type Inventory interface {
	Snapshot() inventory.Snapshot
	RequestScan()
}

// Layouts knows the GPUs with MIG instances that an admin handed over, and those whose MIG mode
// nothing needs.
type Layouts interface {
	HandedOver() []device.GPU
	MIGModeUnneeded() []device.GPU
}

// Options are the settings and dependencies of a [Reconciler].
type Options struct {
	BootID string
	// NewerLeads reports whether a newer plugin instance leads on this node. Then that instance
	// reconciles, and this one does not.
	NewerLeads func() bool

	Claims Claims
	Specs  Specs
	// Use says whether the plugin may access the GPUs. The caller calls done after the access.
	Use       func() (done func(), ok bool)
	Inventory Inventory
	Layouts   Layouts
	// Allocations returns this node's devices that are allocated to claims, prepared or not.
	Allocations func(ctx context.Context) (device.Allocations, error)
	// ReportDaemons reports the MPS daemons to admins.
	ReportDaemons func(ctx context.Context)
	// Repaired tells admins about a repair.
	Repaired func(r prepare.Repair)
}

const (
	// interval is the usual pause between two comparisons. retryPause is the pause after a new error.
	interval   = 30 * time.Second
	retryPause = 5 * time.Second
	// specInterval is the pause between two looks for missing and outdated CDI specs. A look reads the
	// records, 25 microseconds each. Polling also sees a mount over the directory, and needs no
	// inotify instance.
	specInterval = 2 * time.Second
	// claimsTimeout limits the time for one list of claims, even in a cluster with many claims.
	claimsTimeout = 30 * time.Second
)

// Reconciler compares the records with the hardware, and repairs differences.
type Reconciler struct {
	opts   Options
	modes  *modeCleaner
	wakeup wake.Signal
	// unrepaired has the CDI specs that were missing before and after the last comparison. They do not
	// cause another one, since it would fail again, for example while the claim's GPU is away.
	unrepaired []string
}

// New returns a Reconciler that works while Run runs.
func New(o Options) *Reconciler {
	return &Reconciler{
		opts: o, wakeup: wake.New(),
		modes: newModeCleaner(o.Claims.DisableUnusedMIGMode, o.Inventory.RequestScan),
	}
}

// Wake requests a comparison soon. It does not block.
func (r *Reconciler) Wake() { r.wakeup.Wake() }

// Run compares the records with the hardware at every interval, when woken, and when a CDI spec was
// removed. It runs until the context ends.
func (r *Reconciler) Run(ctx context.Context) {
	var left discrepancies
	requested := true
	for ctx.Err() == nil {
		pause := interval
		if ran, err := r.reconcile(ctx); ran {
			pause = left.next(klog.FromContext(ctx), err, requested)
		}
		requested = r.wait(ctx, pause)
	}
}

// wait returns when the pause is over, or earlier if a comparison is requested or the context ends.
func (r *Reconciler) wait(ctx context.Context, pause time.Duration) (requested bool) {
	over := time.After(pause)
	for {
		select {
		case <-ctx.Done():
			return false
		case <-over:
			return false
		case <-r.wakeup:
			return true
		case <-time.After(specInterval):
			if r.specWasLost(ctx) {
				return true
			}
		}
	}
}

// reconcile compares the records with the hardware once and repairs differences. The error lists
// those that are left. compared is false if it did nothing, because a newer plugin instance leads
// or the GPUs are released.
func (r *Reconciler) reconcile(ctx context.Context) (compared bool, _ error) {
	if r.opts.NewerLeads() {
		return false, nil
	}
	withdrawn := r.opts.Claims.WithdrawSpecs(ctx, r.specifiedClaims())
	done, ok := r.opts.Use()
	defer done()
	if !ok {
		return false, nil // the end of the release wakes the Reconciler
	}
	err := errors.Join(withdrawn, r.repair(ctx), r.adopt(ctx), r.modes.Clean(ctx, r.opts.Layouts.MIGModeUnneeded()))
	r.opts.ReportDaemons(ctx)
	return true, err
}

// adopt takes over MIG instances that admins have handed over to the driver. It uses one goroutine
// per GPU, so that a hung GPU does not delay the others.
func (r *Reconciler) adopt(ctx context.Context) error {
	gpus := r.opts.Layouts.HandedOver()
	allocated := sync.OnceValues(func() (device.Allocations, error) {
		ctx, cancel := context.WithTimeout(ctx, claimsTimeout)
		defer cancel()
		return r.opts.Allocations(ctx)
	})
	errs := make([]error, len(gpus))
	var wg sync.WaitGroup
	for i, g := range gpus {
		wg.Go(func() {
			if err := r.opts.Claims.Adopt(ctx, g, allocated); err != nil {
				errs[i] = fmt.Errorf("adopt MIG instances that an admin handed over on %s: %w", g.WholeName(), err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Package claimgc releases the devices of orphaned claims: claims that were deleted or deallocated
// without an Unprepare. This happens if their finalizer was removed while the node was down, for
// example, or if the kubelet lost its state.
//
// A [Collector] releases a claim's devices only after the claim was orphaned for a whole grace
// period. Before that, it reads the stored claim, and asks the container runtime whether a running
// container has devices of the claim. If it cannot be sure, it keeps the devices and writes an
// Event. A lookup that fails neither starts nor resets a claim's grace period.
//
// An allocated claim is no orphan, even if no Pod reserves it: the kubelet may start its next Pod
// without another Prepare. Package ledger decides which claim is an orphan, and package reconcile
// unprepares it.
package claimgc

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

// lookupTimeout limits each request to the API server. The lookup before a release runs under the
// claim's lock, so a Prepare of the same claim waits for it.
const lookupTimeout = 5 * time.Second

// Claims has the prepared claims of this node.
type Claims interface {
	PreparedClaims() ([]checkpoint.Record, error)
	OrphanReason(r checkpoint.Record, now *resourceapi.ResourceClaim) (why string)
	UnprepareOrphan(ctx context.Context, uid types.UID, confirm func(ctx context.Context, r checkpoint.Record) error) (done bool, err error)
}

// Reports tells admins about released claims, and about claims whose devices were kept.
type Reports interface {
	Repaired(r prepare.Repair)
	Event(reason events.Reason, message string)
}

// Options are the settings and dependencies of a [Collector].
type Options struct {
	// Grace is how long a claim must be orphaned before its devices are released. Zero switches the
	// garbage collection off.
	Grace time.Duration
	// BootID identifies the node's current boot. No container of an earlier boot runs any more.
	BootID string
	// Client reads the claims. It must not be the one that Prepare uses, because lookups would use up
	// its request rate.
	Client kubernetes.Interface
	// NewerLeads reports whether a newer plugin instance leads on this node. Then that instance
	// collects orphaned claims, and this one does not.
	NewerLeads func() bool

	Claims Claims
	// UsersOf returns the Pods, as namespace/name, whose running containers have devices of a claim.
	UsersOf func(ctx context.Context, claim types.UID) ([]string, error)
	// Use says whether the plugin may access the GPUs. The caller calls done after the access.
	Use func() (done func(), ok bool)
	// Wake wakes reconciliation after a release, because it may have waited for the claim's devices.
	Wake    func()
	Reports Reports
}

// Collector releases the devices of orphaned claims.
//
// About once per grace period, at random times, it looks up each claim that has a checkpoint
// record. It uses no watch. The API server may answer the first lookup of a claim from its cache.
type Collector struct {
	opts Options

	// orphanedSince has the time at which the Collector first saw each claim as orphaned.
	orphanedSince map[types.UID]time.Time
	// keptReason has the last reported reason why it could not release a claim's devices.
	keptReason map[types.UID]string
}

// New returns a Collector that works while Run runs.
func New(o Options) *Collector {
	return &Collector{opts: o, keptReason: map[types.UID]string{}}
}

// Run collects orphaned claims until the context ends. The first pass comes after a fifth of the
// grace period, because claims may have been deleted while no plugin ran.
func (g *Collector) Run(ctx context.Context) {
	if g.opts.Grace == 0 {
		return
	}
	pause := g.opts.Grace / 5
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause/2 + rand.N(pause)):
		}
		pause = g.opts.Grace
		if !g.opts.NewerLeads() && g.collect(ctx) {
			pause = g.opts.Grace / 2
		}
	}
}

// collect looks up every claim with a checkpoint record, and releases the devices of those that
// were orphaned for the whole grace period. It returns true if orphaned claims are left. If the
// records cannot be listed, it logs the error and returns false.
func (g *Collector) collect(ctx context.Context) bool {
	logger := klog.FromContext(ctx)
	claims, err := g.opts.Claims.PreparedClaims()
	if err != nil {
		logger.Error(err, "Failed to list prepared claims for garbage collection")
		return false
	}
	since := map[types.UID]time.Time{}
	for _, r := range claims {
		if ctx.Err() != nil {
			return false
		}
		why, err := g.orphanReason(ctx, r)
		first, known := g.orphanedSince[r.ClaimUID]
		switch {
		case err != nil:
			logger.V(2).Info("Failed to look up prepared claim", "claim", klog.KRef(r.Namespace, r.Name), "claimUID", r.ClaimUID, "err", err)
			if known {
				since[r.ClaimUID] = first
			}
			continue
		case why == "":
			continue
		case !known:
			first = time.Now()
			logger.Info("Found orphaned claim; its devices are released after the grace period unless the kubelet unprepares it",
				"claim", klog.KRef(r.Namespace, r.Name), "claimUID", r.ClaimUID, "reason", why, "grace", g.opts.Grace)
		}
		since[r.ClaimUID] = first
		if time.Since(first) >= g.opts.Grace && g.release(ctx, r, why) {
			delete(since, r.ClaimUID)
		}
	}
	g.orphanedSince = since
	for uid := range g.keptReason {
		if _, still := since[uid]; !still {
			delete(g.keptReason, uid)
		}
	}
	return len(since) > 0
}

// orphanReason returns why the claim of record r is orphaned, or "" if it is not.
func (g *Collector) orphanReason(ctx context.Context, r checkpoint.Record) (string, error) {
	for _, latest := range []bool{false, true} {
		now, err := g.lookup(ctx, r, latest)
		if err != nil {
			return "", err
		}
		why := g.opts.Claims.OrphanReason(r, now)
		if why == "" || latest {
			return why, nil
		}
	}
	return "", nil
}

// errNotOrphaned stops the release of a claim's devices: the API server's latest version of the
// claim shows that it is not orphaned.
var errNotOrphaned = errors.New("the claim is no longer orphaned")

// keptError says why the Collector must not release the devices of an orphaned claim.
type keptError struct{ reason string }

func (e *keptError) Error() string { return e.reason }

func (g *Collector) release(ctx context.Context, listed checkpoint.Record, why string) bool {
	logger := klog.FromContext(ctx).WithValues("claim", klog.KRef(listed.Namespace, listed.Name), "claimUID", listed.ClaimUID)
	finished, ok := g.opts.Use()
	defer finished()
	if !ok {
		return false
	}
	done, err := g.opts.Claims.UnprepareOrphan(ctx, listed.ClaimUID, func(ctx context.Context, r checkpoint.Record) error {
		now, err := g.lookup(ctx, r, true)
		if err != nil {
			return err
		}
		switch {
		case g.opts.Claims.OrphanReason(r, now) == "":
			return errNotOrphaned
		case r.BootID != g.opts.BootID:
			return nil // no container survives the boot in which its claim was prepared
		default:
			return g.checkUnused(ctx, r.ClaimUID)
		}
	})
	inUse := new(keptError)
	switch {
	case errors.Is(err, errNotOrphaned):
		return true
	case errors.As(err, &inUse):
		g.reportKept(ctx, listed, why, inUse)
	case err != nil:
		logger.Error(err, "Failed to release orphaned claim; retrying")
	case done:
		g.reportReleased(ctx, listed, why)
		return true
	}
	return false
}

// checkUnused returns an error unless the container runtime confirms that no running container has
// devices of the claim. Otherwise the next claim could get devices that a container still uses.
func (g *Collector) checkUnused(ctx context.Context, uid types.UID) error {
	users, err := g.opts.UsersOf(ctx, uid)
	switch {
	case err != nil:
		return &keptError{fmt.Sprintf(
			"the plugin keeps its devices because it cannot check whether containers use them (%v): delete its Pods or restart the node", err)}
	case len(users) > 0:
		return &keptError{fmt.Sprintf("the plugin keeps its devices because containers use them: delete Pod %s", users[0])}
	}
	return nil
}

// lookup returns the claim that has the name in record r, or nil if there is none. With latest it
// bypasses the API server's cache.
func (g *Collector) lookup(ctx context.Context, r checkpoint.Record, latest bool) (*resourceapi.ResourceClaim, error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	options := metav1.GetOptions{}
	if !latest {
		options.ResourceVersion = "0"
	}
	claim, err := g.opts.Client.ResourceV1().ResourceClaims(r.Namespace).Get(ctx, r.Name, options)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return claim, err
}

func (g *Collector) reportReleased(ctx context.Context, r checkpoint.Record, why string) {
	g.opts.Wake()
	klog.FromContext(ctx).Info("Released orphaned claim", "claim", klog.KRef(r.Namespace, r.Name), "claimUID", r.ClaimUID, "reason", why)
	g.opts.Reports.Repaired(prepare.Repair{
		Kind: "abandoned-claim", What: "Released the devices of an orphaned claim (" + why + ")",
		Object: fmt.Sprintf("%s/%s (UID %s)", r.Namespace, r.Name, r.ClaimUID)})
}

// reportKept writes an Event about an orphaned claim whose devices the Collector must not release,
// so that an operator acts. It writes one Event per reason.
func (g *Collector) reportKept(ctx context.Context, r checkpoint.Record, why string, kept *keptError) {
	if g.keptReason[r.ClaimUID] == kept.reason {
		return
	}
	g.keptReason[r.ClaimUID] = kept.reason
	why += ", but " + kept.reason
	klog.FromContext(ctx).Info("Kept devices of orphaned claim",
		"claim", klog.KRef(r.Namespace, r.Name), "claimUID", r.ClaimUID, "reason", why)
	g.opts.Reports.Event(events.ClaimGone, fmt.Sprintf("Claim %s/%s (UID %s): %s", r.Namespace, r.Name, r.ClaimUID, why))
}

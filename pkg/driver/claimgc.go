package driver

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
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

// lookupTimeout limits each request of the claim GC to the API server. The lookup before a release
// runs under the claim's lock, so a Prepare of the same claim waits for it.
const lookupTimeout = 5 * time.Second

// claimGC releases the devices of orphaned claims: claims that were deleted or deallocated without
// an Unprepare. This happens if their finalizer was removed while the node was down, for example,
// or if the kubelet lost its state.
//
// About once per grace period, at random times, the GC looks up each claim that has a checkpoint
// record. It uses no watch. The API server may answer the first lookup of a claim from its cache.
// Before the GC treats a claim as orphaned or releases it, it reads the stored claim.
//
// A lookup that fails neither starts nor resets a claim's grace period.
type claimGC struct {
	grace time.Duration
	// newerLeads reports whether a newer plugin instance leads on this node. While it does, this
	// instance collects nothing.
	newerLeads func() bool
	// use must be called before any access to the hardware, and its result done after that. If ok is
	// false, the driver is releasing the GPUs, and the hardware must not be accessed.
	use    func() (done func(), ok bool)
	claims gcClaims
	// bootID identifies the node's current boot. After a reboot no container of an earlier boot runs
	// any more.
	bootID string
	// lookup returns the claim with this name, or nil if there is none. With latest it bypasses the
	// API server's cache.
	lookup func(ctx context.Context, name types.NamespacedName, latest bool) (*resourceapi.ResourceClaim, error)
	// users lists the Pods whose running containers have devices of the claim.
	users func(ctx context.Context, uid types.UID) ([]string, error)
	// onReleased is called when the devices of an orphaned claim were released; why says why it was
	// orphaned. onKept is called when the GC cannot release them and an operator has to act; why says
	// what prevents the release.
	onReleased, onKept func(ctx context.Context, c kubeletplugin.NamespacedObject, why string)

	// orphanedSince has the time at which the GC first saw each claim as orphaned.
	orphanedSince map[types.UID]time.Time
	// keptReason has the last reported reason why the GC could not release a claim's devices.
	keptReason map[types.UID]string
}

// gcClaims are the methods of the Preparer that the GC needs.
type gcClaims interface {
	PreparedClaims() ([]kubeletplugin.NamespacedObject, error)
	Record(uid types.UID) (r checkpoint.Record, found bool, err error)
	OrphanReason(r checkpoint.Record, now *resourceapi.ResourceClaim) (why string)
	UnprepareOrphan(ctx context.Context, uid types.UID, confirm func(ctx context.Context, r checkpoint.Record) error) (done bool, err error)
}

// Run collects orphaned claims until the context ends. The first pass comes after a fifth of the
// grace period, because claims may have been deleted while no plugin ran.
func (g *claimGC) Run(ctx context.Context) {
	if g.grace == 0 {
		return
	}
	pause := g.grace / 5
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause/2 + rand.N(pause)):
		}
		pause = g.grace
		if !g.newerLeads() && g.collect(ctx) {
			pause = g.grace / 2
		}
	}
}

// collect looks up every claim with a checkpoint record, and releases the devices of those that
// were orphaned for the whole grace period. It returns true if orphaned claims are left. If the
// records cannot be listed, it logs the error and returns false.
func (g *claimGC) collect(ctx context.Context) bool {
	logger := klog.FromContext(ctx)
	claims, err := g.claims.PreparedClaims()
	if err != nil {
		logger.Error(err, "Failed to list prepared claims for garbage collection")
		return false
	}
	since := map[types.UID]time.Time{}
	for _, c := range claims {
		if ctx.Err() != nil {
			return false
		}
		why, err := g.orphanReason(ctx, c)
		first, known := g.orphanedSince[c.UID]
		switch {
		case err != nil:
			logger.V(2).Info("Failed to look up prepared claim", "claim", c.NamespacedName, "claimUID", c.UID, "err", err)
			if known {
				since[c.UID] = first
			}
			continue
		case why == "":
			continue
		case !known:
			first = time.Now()
			logger.Info("Found orphaned claim; its devices are released after the grace period unless the kubelet unprepares it",
				"claim", c.NamespacedName, "claimUID", c.UID, "reason", why, "grace", g.grace)
		}
		since[c.UID] = first
		if time.Since(first) >= g.grace && g.release(ctx, c, why) {
			delete(since, c.UID)
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

// orphanReason returns why the claim c is orphaned, or "" if it is not or has no checkpoint record.
func (g *claimGC) orphanReason(ctx context.Context, c kubeletplugin.NamespacedObject) (string, error) {
	r, found, err := g.claims.Record(c.UID)
	if err != nil || !found {
		return "", err
	}
	for _, latest := range []bool{false, true} {
		now, err := g.lookup(ctx, c.NamespacedName, latest)
		if err != nil {
			return "", err
		}
		why := g.claims.OrphanReason(r, now)
		if why == "" || latest {
			return why, nil
		}
	}
	return "", nil
}

// errNotOrphaned stops the release of a claim's devices: the API server's latest version of the
// claim shows that it is not orphaned.
var errNotOrphaned = errors.New("the claim is no longer orphaned")

// keptError says why the GC must not release the devices of an orphaned claim.
type keptError struct{ reason string }

func (e *keptError) Error() string { return e.reason }

func (g *claimGC) release(ctx context.Context, c kubeletplugin.NamespacedObject, why string) bool {
	logger := klog.FromContext(ctx).WithValues("claim", c.NamespacedName, "claimUID", c.UID)
	finished, ok := g.use()
	defer finished()
	if !ok {
		return false
	}
	done, err := g.claims.UnprepareOrphan(ctx, c.UID, func(ctx context.Context, r checkpoint.Record) error {
		now, err := g.lookup(ctx, c.NamespacedName, true)
		if err != nil {
			return err
		}
		switch {
		case g.claims.OrphanReason(r, now) == "":
			return errNotOrphaned
		case r.BootID != g.bootID:
			return nil // no container survives the boot in which its claim was prepared
		default:
			return g.checkUnused(ctx, c.UID)
		}
	})
	inUse := new(keptError)
	switch {
	case errors.Is(err, errNotOrphaned):
		return true
	case errors.As(err, &inUse):
		if g.keptReason[c.UID] != inUse.reason {
			g.keptReason[c.UID] = inUse.reason
			g.onKept(ctx, c, why+", but "+inUse.reason)
		}
	case err != nil:
		logger.Error(err, "Failed to release orphaned claim; retrying")
	case done:
		g.onReleased(ctx, c, why)
		return true
	}
	return false
}

// checkUnused returns an error unless the container runtime confirms that no running container has
// devices of the claim. Otherwise the next claim could get devices that a container still uses.
func (g *claimGC) checkUnused(ctx context.Context, uid types.UID) error {
	users, err := g.users(ctx, uid)
	switch {
	case err != nil:
		return &keptError{fmt.Sprintf(
			"the plugin keeps its devices because it cannot check whether containers use them (%v): delete its Pods or restart the node", err)}
	case len(users) > 0:
		return &keptError{fmt.Sprintf("the plugin keeps its devices because containers use them: delete Pod %s", users[0])}
	}
	return nil
}

func (d *Driver) newClaimGC(client kubernetes.Interface) *claimGC {
	return &claimGC{
		grace: d.cfg.ClaimGrace, newerLeads: d.newerLeads.Load, use: func() (func(), bool) { return d.quiesce.Use() }, claims: d.preparer,
		bootID: d.preparer.BootID, keptReason: map[types.UID]string{},
		lookup: func(ctx context.Context, name types.NamespacedName, latest bool) (*resourceapi.ResourceClaim, error) {
			ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
			defer cancel()
			options := metav1.GetOptions{}
			if !latest {
				options.ResourceVersion = "0"
			}
			claim, err := client.ResourceV1().ResourceClaims(name.Namespace).Get(ctx, name.Name, options)
			if apierrors.IsNotFound(err) {
				return nil, nil
			}
			return claim, err
		},
		users: func(ctx context.Context, uid types.UID) ([]string, error) {
			return podsUsingClaim(ctx, d.cfg.CRISocket, uid)
		},
		onReleased: func(ctx context.Context, c kubeletplugin.NamespacedObject, why string) {
			wake(d.toReconcile)
			klog.FromContext(ctx).Info("Released orphaned claim", "claim", c.NamespacedName, "claimUID", c.UID, "reason", why)
			d.reportRepair(prepare.Repair{
				Kind: "abandoned-claim", What: "Released the devices of an orphaned claim (" + why + ")",
				Object: c.String() + " (UID " + string(c.UID) + ")"})
		},
		onKept: func(ctx context.Context, c kubeletplugin.NamespacedObject, why string) {
			klog.FromContext(ctx).Info("Kept devices of orphaned claim", "claim", c.NamespacedName, "claimUID", c.UID, "reason", why)
			d.events.Warn("ClaimGone", fmt.Sprintf("Claim %s (UID %s): %s", c.NamespacedName, c.UID, why))
		},
	}
}

// reportRepair counts the repair r in the metrics and writes an Event about it on the Node. A
// repair corrects something on the node that differed from the checkpoint records.
func (d *Driver) reportRepair(r prepare.Repair) {
	d.metrics.Repaired(r.Kind)
	d.events.Normal("Repaired", r.What+": "+r.Object)
}

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

// lookupTimeout bounds one question to the API server. While the last one before a claim is given back is asked, a Prepare of that claim waits.
const lookupTimeout = 5 * time.Second

// abandonment gives back what claims hold that were deleted, or lost their allocation, behind the
// kubelet's back. Their finalizer was removed while the node was down, say, or the kubelet lost what
// it knew. It looks up each held claim once in its grace time, not all nodes at the same moment, and
// there is no watch. The API server may answer the routine question from its memory; before anything
// follows from an answer, the store itself is asked.
//
// Only an answer counts. An API server that is away, slow or that refuses says nothing about a claim, and neither begins nor ends its time.
type abandonment struct {
	grace time.Duration
	// idle says that another instance looks after the node.
	idle func() bool
	// use is to be called before the hardware is used; ok is false while it may not be.
	use    func() (done func(), ok bool)
	claims abandonedClaims
	// bootID is the kernel's of now.
	bootID string
	// lookup gets a claim, nil if there is none of that name. latest asks for what is stored now.
	lookup func(ctx context.Context, name types.NamespacedName, latest bool) (*resourceapi.ResourceClaim, error)
	// users are the running containers that have devices of the claim.
	users func(ctx context.Context, uid types.UID) ([]string, error)
	// gone is told of a claim that was given back, kept of one that is kept for a reason that somebody has to see to.
	gone, kept func(ctx context.Context, c kubeletplugin.NamespacedObject, why string)

	// since is when each claim was first seen to be abandoned, told why it is kept.
	since map[types.UID]time.Time
	told  map[types.UID]string
}

// abandonedClaims is what is asked of the transaction.
type abandonedClaims interface {
	Prepared() ([]kubeletplugin.NamespacedObject, error)
	Holding(uid types.UID) (r checkpoint.Record, found bool, err error)
	Abandoned(r checkpoint.Record, now *resourceapi.ResourceClaim) (why string)
	GiveBack(ctx context.Context, uid types.UID, confirm func(ctx context.Context, r checkpoint.Record) error) (done bool, err error)
}

// Run looks until the context ends. A plugin that starts looks early, since claims may have gone while there was none.
func (a *abandonment) Run(ctx context.Context) {
	if a.grace == 0 {
		return
	}
	pause := a.grace / 5
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause/2 + rand.N(pause)):
		}
		pause = a.grace
		if !a.idle() && a.look(ctx) {
			pause = a.grace / 2
		}
	}
}

// look asks for every claim that is held, and says whether any of them seems to be abandoned.
func (a *abandonment) look(ctx context.Context) bool {
	logger := klog.FromContext(ctx)
	claims, err := a.claims.Prepared()
	if err != nil {
		logger.Error(err, "Could not list the claims that are held, to see whether they still exist")
		return false
	}
	since := map[types.UID]time.Time{}
	for _, c := range claims {
		if ctx.Err() != nil {
			return false
		}
		why, err := a.why(ctx, c)
		first, known := a.since[c.UID]
		switch {
		case err != nil:
			logger.V(2).Info("Could not look up a claim that is held", "claim", c.NamespacedName, "claimUID", c.UID, "err", err)
			if known {
				since[c.UID] = first
			}
			continue
		case why == "":
			continue
		case !known:
			first = time.Now()
			logger.Info("A claim that is held on this node is gone; its devices are given back after a while, unless the kubelet does it", "claim", c.NamespacedName, "claimUID", c.UID, "reason", why, "after", a.grace)
		}
		since[c.UID] = first
		if time.Since(first) >= a.grace && a.giveBack(ctx, c, why) {
			delete(since, c.UID)
		}
	}
	a.since = since
	for uid := range a.told {
		if _, still := since[uid]; !still {
			delete(a.told, uid)
		}
	}
	return len(since) > 0
}

// why is empty for a claim that is as it should be.
func (a *abandonment) why(ctx context.Context, c kubeletplugin.NamespacedObject) (string, error) {
	r, found, err := a.claims.Holding(c.UID)
	if err != nil || !found {
		return "", err
	}
	for _, latest := range []bool{false, true} {
		now, err := a.lookup(ctx, c.NamespacedName, latest)
		if err != nil {
			return "", err
		}
		why := a.claims.Abandoned(r, now)
		if why == "" || latest {
			return why, nil
		}
	}
	return "", nil
}

// errKept says that a claim is not given back now, and that there is nothing to be told.
var errKept = errors.New("the claim is as it should be again")

// inUseError says who still uses the devices of a claim that is gone.
type inUseError struct{ reason string }

func (e *inUseError) Error() string { return e.reason }

func (a *abandonment) giveBack(ctx context.Context, c kubeletplugin.NamespacedObject, why string) bool {
	logger := klog.FromContext(ctx).WithValues("claim", c.NamespacedName, "claimUID", c.UID)
	finished, ok := a.use()
	defer finished()
	if !ok {
		return false
	}
	done, err := a.claims.GiveBack(ctx, c.UID, func(ctx context.Context, r checkpoint.Record) error {
		now, err := a.lookup(ctx, c.NamespacedName, true)
		if err != nil {
			return err
		}
		switch {
		case a.claims.Abandoned(r, now) == "":
			return errKept
		case r.BootID != a.bootID:
			return nil // no container outlives the boot that its claim was prepared in
		default:
			return a.unused(ctx, c.UID)
		}
	})
	inUse := new(inUseError)
	switch {
	case errors.Is(err, errKept):
		return true
	case errors.As(err, &inUse):
		if a.told[c.UID] != inUse.reason {
			a.told[c.UID] = inUse.reason
			a.kept(ctx, c, why+", and "+inUse.reason)
		}
	case err != nil:
		logger.Error(err, "Could not give back what a claim holds that is gone; trying again")
	case done:
		a.gone(ctx, c, why)
		return true
	}
	return false
}

// unused makes sure that no running container has devices of the claim. Where that cannot be told,
// nothing is taken away: the next claim would get what is still in use.
func (a *abandonment) unused(ctx context.Context, uid types.UID) error {
	users, err := a.users(ctx, uid)
	switch {
	case err != nil:
		return &inUseError{fmt.Sprintf("whether there are containers with its devices cannot be told, so they stay held: delete its Pods, or restart the node: %v", err)}
	case len(users) > 0:
		return &inUseError{fmt.Sprintf("its devices stay held because there are containers with them: delete Pod %s", users[0])}
	}
	return nil
}

func (d *Driver) newAbandonment(client kubernetes.Interface) *abandonment {
	return &abandonment{
		grace: d.cfg.ClaimGrace, idle: d.superseded.Load, use: func() (func(), bool) { return d.release.Use() }, claims: d.preparer,
		bootID: d.preparer.BootID, told: map[types.UID]string{},
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
			return usersOfClaim(ctx, d.cfg.CRISocket, uid)
		},
		gone: func(ctx context.Context, c kubeletplugin.NamespacedObject, why string) {
			wake(d.toReconcile)
			klog.FromContext(ctx).Info("Gave back what a claim held that is gone", "claim", c.NamespacedName, "claimUID", c.UID, "reason", why)
			d.repaired(prepare.Repair{Kind: "abandoned-claim", What: "Gave back what a claim held (" + why + ")", Object: c.String() + " (UID " + string(c.UID) + ")"})
		},
		kept: func(ctx context.Context, c kubeletplugin.NamespacedObject, why string) {
			klog.FromContext(ctx).Info("A claim is gone, and its devices stay held", "claim", c.NamespacedName, "claimUID", c.UID, "reason", why)
			d.events.warn("ClaimGone", fmt.Sprintf("Claim %s (UID %s): %s", c.NamespacedName, c.UID, why))
		},
	}
}

// repaired counts what was put in order, and says it where administrators look.
func (d *Driver) repaired(r prepare.Repair) {
	d.metrics.Repaired(r.Kind)
	d.events.normal("Repaired", r.What+": "+r.Object)
}

package claimgc_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claimgc"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

// gcFixture fakes a node with one prepared claim, the API server and the container runtime for the
// Collector. A test sets how each of them answers.
type gcFixture struct {
	held             bool
	busy             bool // another call holds the claim's lock
	stored           *resourceapi.ResourceClaim
	cached           *resourceapi.ResourceClaim // the claim in the API server's cache
	lookupErr        error
	backAt           time.Time // when the API server answers again; zero means never
	users            []string
	usersErr         error // error of the query for Pods that use the claim
	lookups          int
	beforeLastLookup func() // called before the lookup that precedes the release
	boot             string // ID of the boot in which the claim was prepared
	releasedReason   string
	keptReasons      []string
	woken            bool
}

var gcClaimUID = types.UID("uid-1")

func storedClaim(uid types.UID) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{}
	c.UID = uid
	return c
}

func (l *gcFixture) PreparedClaims() ([]checkpoint.Record, error) {
	if !l.held {
		return nil, nil
	}
	return []checkpoint.Record{l.record()}, nil
}

func (l *gcFixture) record() checkpoint.Record {
	return checkpoint.Record{ClaimUID: gcClaimUID, Namespace: "team", Name: "c", BootID: l.boot}
}

func (l *gcFixture) OrphanReason(r checkpoint.Record, now *resourceapi.ResourceClaim) string {
	if now == nil || now.UID != r.ClaimUID {
		return "it is gone"
	}
	return ""
}

func (l *gcFixture) UnprepareOrphan(
	ctx context.Context, _ types.UID, confirm func(context.Context, checkpoint.Record) error,
) (bool, error) {
	if l.busy {
		return false, nil
	}
	if l.beforeLastLookup != nil {
		l.beforeLastLookup()
	}
	if err := confirm(ctx, l.record()); err != nil {
		return false, err
	}
	l.held = false
	return true, nil
}

func (l *gcFixture) UsersOf(context.Context, types.UID) ([]string, error) { return l.users, l.usersErr }

func (l *gcFixture) Use() (done func(), ok bool) { return func() {}, true }

func (l *gcFixture) Wake() { l.woken = true }

func (l *gcFixture) Repaired(r prepare.Repair) { l.releasedReason = r.What }

func (l *gcFixture) Event(_ events.Reason, message string) {
	l.keptReasons = append(l.keptReasons, message)
}

// apiServer returns a fake API server that answers reads of claims as the fixture says.
func (l *gcFixture) apiServer() *fake.Clientset {
	client := fake.NewClientset()
	client.PrependReactor("get", "resourceclaims", func(a clienttesting.Action) (bool, runtime.Object, error) {
		l.lookups++
		get := a.(clienttesting.GetActionImpl)
		latest := get.GetOptions.ResourceVersion == ""
		claim := l.stored
		if !latest && l.cached != nil {
			claim = l.cached
		}
		switch {
		case l.lookupErr != nil && (l.backAt.IsZero() || time.Now().Before(l.backAt)):
			return true, nil, l.lookupErr
		case claim == nil:
			return true, nil, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), get.Name)
		}
		return true, claim, nil
	})
	return client
}

// run runs the Collector for the duration how. If idle is true, a newer plugin instance leads, so
// the Collector must release nothing.
func (l *gcFixture) run(t *testing.T, idle bool, how time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), how)
	defer cancel()
	claimgc.New(claimgc.Options{
		Grace: 5 * time.Minute, NewerLeads: func() bool { return idle }, Client: l.apiServer(),
		Claims: l, UsersOf: l.UsersOf, Use: l.Use, Wake: l.Wake, Reports: l,
	}).Run(ctx)
}

func TestOrphanedClaimIsReleasedAfterGrace(t *testing.T) {
	for name, fixture := range map[string]*gcFixture{
		"deleted":                  {held: true},
		"replaced":                 {held: true, stored: storedClaim("another")},
		"deleted but still cached": {held: true, cached: storedClaim("older")},
		"deleted, prepared before a reboot and no runtime to ask": {held: true, boot: "an earlier one", usersErr: errors.New("no socket")},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fixture.run(t, false, 4*time.Minute)
				if !fixture.held {
					t.Error("released before the grace period ended")
				}
				fixture.run(t, false, 15*time.Minute)
				if fixture.held || fixture.releasedReason == "" || !fixture.woken {
					t.Errorf("held %v, reported %q, reconciliation woken %v", fixture.held, fixture.releasedReason, fixture.woken)
				}
			})
		})
	}
}

func TestClaimIsKept(t *testing.T) {
	for name, c := range map[string]struct {
		fixture gcFixture
		idle    bool
		kept    string
	}{
		"exists":                     {fixture: gcFixture{stored: storedClaim(gcClaimUID)}},
		"exists in the cache":        {fixture: gcFixture{cached: storedClaim(gcClaimUID)}},
		"cache has an older claim":   {fixture: gcFixture{cached: storedClaim("before"), stored: storedClaim(gcClaimUID)}},
		"API server is down":         {fixture: gcFixture{lookupErr: errors.New("connection refused")}},
		"another call works on it":   {fixture: gcFixture{busy: true}},
		"a newer instance leads":     {idle: true},
		"containers use its devices": {fixture: gcFixture{users: []string{"team/pod"}}, kept: "team/pod"},
		"use of devices is unknown":  {fixture: gcFixture{usersErr: errors.New("no socket")}, kept: "no socket"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fixture := c.fixture
				fixture.held = true
				fixture.run(t, c.idle, time.Hour)
				if !fixture.held || fixture.releasedReason != "" {
					t.Errorf("it was released: %q", fixture.releasedReason)
				}
				if c.kept == "" && len(fixture.keptReasons) > 0 ||
					c.kept != "" && (len(fixture.keptReasons) != 1 || !strings.Contains(fixture.keptReasons[0], c.kept)) {
					t.Errorf("reported %q, want once %q", fixture.keptReasons, c.kept)
				}
			})
		})
	}
}

// The claim must stay prepared when the API server is back after an outage of a day: the claim's
// grace period must not have started during the outage.
func TestAPIServerOutageStartsNoGracePeriod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &gcFixture{held: true, lookupErr: errors.New("timeout"), backAt: time.Now().Add(24 * time.Hour)}
		l.run(t, false, 24*time.Hour+4*time.Minute)
		if !l.held {
			t.Error("released although the API server was down most of the time")
		}
	})
}

func TestFinalLookupKeepsExistingClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &gcFixture{held: true}
		l.beforeLastLookup = func() { l.stored = storedClaim(gcClaimUID) }
		l.run(t, false, time.Hour)
		if !l.held {
			t.Error("released although the last lookup found the claim")
		}
	})
}

func TestGCSendsFewRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &gcFixture{held: true, stored: storedClaim(gcClaimUID)}
		l.run(t, false, 10*time.Hour)
		if perHour := float64(l.lookups) / 10; perHour < 8 || perHour > 20 {
			t.Errorf("%v requests an hour for one claim", perHour)
		}
		none := &gcFixture{}
		none.run(t, false, 10*time.Hour)
		if none.lookups != 0 {
			t.Errorf("%d requests without claims", none.lookups)
		}
	})
}

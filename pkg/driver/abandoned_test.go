package driver

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
)

// leftClaim is a node that holds one claim, and an API server that knows it or not.
type leftClaim struct {
	held    bool
	busy    bool // a call works on the claim
	stored  *resourceapi.ResourceClaim
	cached  *resourceapi.ResourceClaim // by the API server
	away    error
	back    time.Time // when the API server is no longer away; never, if it is zero
	users   []string
	unasked error // why users cannot be told
	asked   int
	before  func() // the last question is asked
	boot    string // when the claim was prepared
	gone    string
	kept    []string
}

var leftUID = types.UID("uid-1")

func storedClaim(uid types.UID) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{}
	c.UID = uid
	return c
}

func (l *leftClaim) Prepared() ([]kubeletplugin.NamespacedObject, error) {
	if !l.held {
		return nil, nil
	}
	return []kubeletplugin.NamespacedObject{{NamespacedName: types.NamespacedName{Namespace: "team", Name: "c"}, UID: leftUID}}, nil
}

func (l *leftClaim) record() checkpoint.Record {
	return checkpoint.Record{ClaimUID: leftUID, BootID: l.boot}
}

func (l *leftClaim) Holding(types.UID) (checkpoint.Record, bool, error) {
	return l.record(), l.held, nil
}

func (l *leftClaim) Abandoned(r checkpoint.Record, now *resourceapi.ResourceClaim) string {
	if now == nil || now.UID != r.ClaimUID {
		return "it is gone"
	}
	return ""
}

func (l *leftClaim) GiveBack(ctx context.Context, _ types.UID, confirm func(context.Context, checkpoint.Record) error) (bool, error) {
	if l.busy {
		return false, nil
	}
	if l.before != nil {
		l.before()
	}
	if err := confirm(ctx, l.record()); err != nil {
		return false, err
	}
	l.held = false
	return true, nil
}

// run looks after the node for a time, as the plugin does.
func (l *leftClaim) run(t *testing.T, idle bool, how time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), how)
	defer cancel()
	a := &abandonment{
		grace: 5 * time.Minute, idle: func() bool { return idle }, claims: l, told: map[types.UID]string{},
		use: func() (func(), bool) { return func() {}, true },
		lookup: func(_ context.Context, _ types.NamespacedName, latest bool) (*resourceapi.ResourceClaim, error) {
			l.asked++
			away := l.away
			if !l.back.IsZero() && !time.Now().Before(l.back) {
				away = nil
			}
			if latest || l.cached == nil {
				return l.stored, away
			}
			return l.cached, away
		},
		users: func(context.Context, types.UID) ([]string, error) { return l.users, l.unasked },
		gone:  func(_ context.Context, _ kubeletplugin.NamespacedObject, why string) { l.gone = why },
		kept:  func(_ context.Context, _ kubeletplugin.NamespacedObject, why string) { l.kept = append(l.kept, why) },
	}
	a.Run(ctx)
}

func TestAClaimThatIsGoneIsGivenBackAfterAWhile(t *testing.T) {
	for name, l := range map[string]*leftClaim{
		"deleted":                            {held: true},
		"replaced":                           {held: true, stored: storedClaim("another")},
		"deleted, as only the store can say": {held: true, cached: storedClaim("older")},
		"deleted, and prepared before a reboot, where the runtime cannot be asked": {held: true, boot: "an earlier one", unasked: errors.New("no socket")},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l.run(t, false, 4*time.Minute)
				if !l.held {
					t.Error("given back too soon")
				}
				l.run(t, false, 15*time.Minute)
				if l.held || l.gone == "" {
					t.Errorf("held %v, said %q", l.held, l.gone)
				}
			})
		})
	}
}

func TestAClaimIsKept(t *testing.T) {
	for name, c := range map[string]struct {
		l    leftClaim
		idle bool
		kept string
	}{
		"that is there": {l: leftClaim{stored: storedClaim(leftUID)}},
		"of which the API server knows only from memory that it is there": {l: leftClaim{cached: storedClaim(leftUID)}},
		"of which the API server remembers the claim before":              {l: leftClaim{cached: storedClaim("before"), stored: storedClaim(leftUID)}},
		"while the API server is away":                                    {l: leftClaim{away: errors.New("connection refused")}},
		"that a call works on":                                            {l: leftClaim{busy: true}},
		"by an instance that does not look after the node":                {idle: true},
		"while containers use its devices":                                {l: leftClaim{users: []string{"team/pod"}}, kept: "team/pod"},
		"while it cannot be told whether containers use its devices":      {l: leftClaim{unasked: errors.New("no socket")}, kept: "no socket"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := c.l
				l.held = true
				l.run(t, c.idle, time.Hour)
				if !l.held || l.gone != "" {
					t.Errorf("it was given back: %q", l.gone)
				}
				if c.kept == "" && len(l.kept) > 0 || c.kept != "" && (len(l.kept) != 1 || !strings.Contains(l.kept[0], c.kept)) {
					t.Errorf("said %q, want once %q", l.kept, c.kept)
				}
			})
		})
	}
}

// A kubelet that comes back after a day finds its claim as it was.
func TestAnAPIServerThatWasAwayHasNotSaidThatAClaimIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &leftClaim{held: true, away: errors.New("timeout"), back: time.Now().Add(24 * time.Hour)}
		l.run(t, false, 24*time.Hour+4*time.Minute)
		if !l.held {
			t.Error("given back although the API server was away most of the time")
		}
	})
}

func TestAClaimThatComesBackIsAskedForUnderItsLockLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &leftClaim{held: true}
		l.before = func() { l.stored = storedClaim(leftUID) }
		l.run(t, false, time.Hour)
		if !l.held {
			t.Error("given back although it was there when it was asked for last")
		}
	})
}

func TestWhatIsHeldCostsTheAPIServerLittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &leftClaim{held: true, stored: storedClaim(leftUID)}
		l.run(t, false, 10*time.Hour)
		if perHour := float64(l.asked) / 10; perHour < 8 || perHour > 20 {
			t.Errorf("%v questions an hour for one claim", perHour)
		}
		none := &leftClaim{}
		none.run(t, false, 10*time.Hour)
		if none.asked != 0 {
			t.Errorf("%d questions about no claim", none.asked)
		}
	})
}

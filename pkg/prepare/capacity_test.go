package prepare

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const gib = 1 << 30

// withCapacity is a node whose GPUs have 40 GiB for claims, and partitions of 1g.10gb 9.75 GiB.
func withCapacity(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	withMPS(w)
	for i := range w.snapshot.Node.GPUs {
		g := &w.snapshot.Node.GPUs[i]
		g.MemoryBytes = 41 * gib
		mig := *g.MIG
		mig.Profiles = slices.Clone(mig.Profiles)
		for j := range mig.Profiles {
			if mig.Profiles[j].ID == 19 {
				mig.Profiles[j].MemoryBytes = 10 * gib
			}
		}
		g.MIG = &mig
	}
	w.shares = sharesBy(t, "shares:2,*/1g.10gb=shares:2")
	return w
}

func sharesBy(t *testing.T, rules string) device.ShareRules {
	t.Helper()
	r, err := device.ParseShares(rules)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func refusedFor(t *testing.T, err error, capacity, asked, held, there string, holders ...string) {
	t.Helper()
	full := new(FullError)
	if !errors.As(err, &full) || CauseOf(err) != CauseHeld {
		t.Errorf("cause %s: %v", CauseOf(err), err)
		return
	}
	var names []string
	for _, h := range full.Holders {
		names = append(names, h.Name)
		if !strings.Contains(err.Error(), h.String()) {
			t.Errorf("%v does not name %s", err, h)
		}
	}
	if full.Capacity != capacity || full.Asked.String() != asked || full.Held.String() != held || full.Total.String() != there || !slices.Equal(names, holders) {
		t.Errorf("%v", err)
	}
	for _, said := range []string{capacity, asked, held, there} {
		if !strings.Contains(err.Error(), said) {
			t.Errorf("%v does not say %s", err, said)
		}
	}
}

// The scheduler gives on what a Pod holds that was deleted by force and still runs.
func TestOfFiveClaimsForAlmostAllOfAGPUOneIsPrepared(t *testing.T) {
	w := withCapacity(t)
	claims := make([]*resourceapi.ResourceClaim, 5)
	for i := range claims {
		claims[i] = newClaim(fmt.Sprintf("c%d", i), fraction("r", share0, "38Gi", "100"))
	}
	mustPrepare(t, w.plugin(t), claims[0])
	for _, c := range claims[1:] {
		// Each in a process of its own: nothing is kept in memory.
		p := w.plugin(t)
		if err := p.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		_, err := p.Prepare(t.Context(), c)
		refusedFor(t, err, "cores", "100", "100", "100", "c0")
		mustPrepare(t, p, claims[0])
	}
	p := w.plugin(t)
	mustUnprepare(t, p, claims[0].UID)
	mustPrepare(t, p, claims[3])
	_, err := p.Prepare(t.Context(), claims[0])
	refusedFor(t, err, "cores", "100", "100", "100", "c3")
	mustUnprepare(t, p, claims[3].UID)
	clean(t, w)
}

func TestSharesThatDoNotFitAreRefusedAndSharesThatDoAreNot(t *testing.T) {
	withoutCores := fraction("r", share0, "1Gi", "0")
	delete(withoutCores.ConsumedCapacity, "cores")
	for name, c := range map[string]struct {
		held                   []result
		asked                  []result
		capacity, a, h, totals string
	}{
		"memory":                                {[]result{fraction("r", share0, "38Gi", "0")}, []result{fraction("r", share0, "38Gi", "0")}, "memory", "38Gi", "38Gi", "40Gi"},
		"cores":                                 {[]result{fraction("r", share0, "1Gi", "60")}, []result{fraction("r", share0, "1Gi", "60")}, "cores", "60", "60", "100"},
		"an exact fit":                          {[]result{fraction("r", share0, "20Gi", "50")}, []result{fraction("r", share0, "20Gi", "50")}, "", "", "", ""},
		"cores that nobody asked for":           {[]result{fraction("r", share0, "1Gi", "100")}, []result{fraction("r", share0, "1Gi", "0")}, "", "", "", ""},
		"cores of which the allocation is mute": {[]result{fraction("r", share0, "1Gi", "100")}, []result{withoutCores}, "", "", "", ""},
		"another GPU":                           {[]result{fraction("r", share0, "38Gi", "100")}, []result{fraction("r", share1, "38Gi", "100")}, "", "", "", ""},
		"several shares that are held":          {[]result{fraction("a", share0, "15Gi", "0"), fraction("b", share0, "15Gi", "0")}, []result{fraction("r", share0, "11Gi", "0")}, "memory", "11Gi", "30Gi", "40Gi"},
		"several shares that are asked for":     {[]result{fraction("r", share0, "15Gi", "0")}, []result{fraction("a", share0, "13Gi", "0"), fraction("b", share0, "13Gi", "0")}, "memory", "26Gi", "15Gi", "40Gi"},
		"a partition's memory":                  {[]result{fraction("r", migShare0, "5Gi", "0")}, []result{fraction("r", migShare0, "5Gi", "0")}, "memory", "5Gi", "5Gi", "9984Mi"},
		"a partition's memory that suffices":    {[]result{fraction("r", migShare0, "4Gi", "0")}, []result{fraction("r", migShare0, "4Gi", "0")}, "", "", "", ""},
		"plain shares":                          {[]result{plain("a", share0), plain("b", share0)}, []result{plain("r", share0)}, "shares", "1", "2", "2"},
		"plain shares that are more than one":   {[]result{plain("a", share0)}, []result{plains("r", share0, "2")}, "shares", "2", "1", "2"},
		"plain shares of a partition":           {[]result{plain("a", migShare0), plain("b", migShare0)}, []result{plain("r", migShare0)}, "shares", "1", "2", "2"},
		"the last plain share":                  {[]result{plain("a", share0)}, []result{plain("r", share0)}, "", "", "", ""},
		"admin access to what is held in whole": {[]result{fraction("r", share0, "40Gi", "100")}, []result{admin("r", share0)}, "", "", "", ""},
		"all of what is looked at by admins":    {[]result{admin("r", share0)}, []result{fraction("r", share0, "40Gi", "100")}, "", "", "", ""},
		"admin access with a number of its own": {[]result{numbered(admin("r", share0))}, []result{fraction("r", share0, "40Gi", "100")}, "", "", "", ""},
		"admin access, and shares of the same":  {[]result{fraction("r", share0, "40Gi", "100")}, []result{numbered(admin("r", share0))}, "", "", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := withCapacity(t)
			p := w.plugin(t)
			held, asked := newClaim("held", c.held...), newClaim("asked", c.asked...)
			mustPrepare(t, p, held)
			_, err := w.plugin(t).Prepare(t.Context(), asked)
			if c.capacity == "" {
				if err != nil {
					t.Error(err)
				}
			} else {
				refusedFor(t, err, c.capacity, c.a, c.h, c.totals, "held")
			}
			mustUnprepare(t, p, held.UID)
			mustPrepare(t, p, asked)
			mustUnprepare(t, p, asked.UID)
			clean(t, w)
		})
	}
}

// plains is a share that counts as several.
func plains(request, name, shares string) result {
	r := shareOf(request, name)
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"shares": resource.MustParse(shares)}
	return r
}

// numbered is admin access for which the allocation says an amount.
func numbered(r result) result {
	r.ConsumedCapacity = fraction("r", share0, "38Gi", "100").ConsumedCapacity
	return r
}

func TestAClaimIsNotCountedAgainstItself(t *testing.T) {
	w := withCapacity(t)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("other", fraction("r", share0, "10Gi", "0")))
	for _, memory := range []string{"30Gi", "30Gi", "20Gi", "25Gi"} {
		mustPrepare(t, p, newClaim("c", fraction("r", share0, memory, "0")))
	}
	_, err := p.Prepare(t.Context(), newClaim("c", fraction("r", share0, "31Gi", "0")))
	refusedFor(t, err, "memory", "31Gi", "10Gi", "40Gi", "other")
	mustPrepare(t, p, newClaim("c", fraction("r", share0, "30Gi", "0")))
}

// An allocation of which only an amount has changed that no limit is made of.
func TestAnotherAmountIsAnotherAllocation(t *testing.T) {
	w := withCapacity(t)
	w.shares = sharesBy(t, "shares:4")
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", plain("r", share0)))
	mustPrepare(t, p, newClaim("c", plains("r", share0, "4")))
	_, err := p.Prepare(t.Context(), newClaim("other", plain("r", share0)))
	refusedFor(t, err, "shares", "1", "4", "4", "c")
}

func TestTwoInstancesAtOnceGiveOutNoMoreThanThereIs(t *testing.T) {
	w := withCapacity(t)
	claims := map[string]*resourceapi.ResourceClaim{}
	for i := range 6 {
		c := newClaim(fmt.Sprintf("c%d", i), fraction("r", share0, "15Gi", "0"))
		claims[c.Name] = c
	}
	var mu sync.Mutex
	prepared := map[string]bool{}
	var wg sync.WaitGroup
	for range 2 {
		p := w.plugin(t)
		p.Reread = func(_ context.Context, _, name string) (*resourceapi.ResourceClaim, error) { return claims[name], nil }
		for _, c := range claims {
			wg.Go(func() {
				_, err := p.Prepare(t.Context(), c)
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					prepared[c.Name] = true
				} else if full := new(FullError); !errors.As(err, &full) || len(full.Holders) != 2 {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	if len(prepared) != 2 {
		t.Errorf("prepared are %v", prepared)
	}
}

// The claim is had as soon as one of those is given back that hold the device.
func TestAShareThatDoesNotFitIsWaitedForALittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := withCapacity(t)
		w.patience, w.stopping = 5*time.Second, make(chan struct{})
		next := newClaim("next", fraction("r", share0, "15Gi", "0"))
		w.reread = func() (*resourceapi.ResourceClaim, error) { return next, nil }
		p := w.plugin(t)
		first, second := newClaim("first", fraction("r", share0, "15Gi", "0")), newClaim("second", fraction("r", share0, "15Gi", "0"))
		mustPrepare(t, p, first)
		mustPrepare(t, p, second)
		began, ended := time.Now(), make(chan error)
		go func() {
			_, err := p.Prepare(t.Context(), next)
			ended <- err
		}()
		synctest.Wait()
		mustUnprepare(t, p, second.UID)
		if err := <-ended; err != nil || time.Since(began) > 2*heldPoll {
			t.Error(err, time.Since(began))
		}
	})
}

// Nobody knows how much the claim has whose record cannot be read.
func TestNoShareIsGivenOutWhileARecordOfOneCannotBeRead(t *testing.T) {
	w := withCapacity(t)
	p := w.plugin(t)
	first, second := newClaim("first", fraction("r", share0, "10Gi", "0")), newClaim("second", fraction("r", share0, "10Gi", "0"))
	mustPrepare(t, p, first)
	mustPrepare(t, p, second)
	w.disk.Put(recordFile(t, w, "uid-first"), []byte("{"))
	_, err := p.Prepare(t.Context(), newClaim("third", fraction("r", share0, "1Gi", "0")))
	if CauseOf(err) != CauseHeld || !strings.Contains(err.Error(), "uid-first") || !strings.Contains(err.Error(), "cannot be read") || strings.Contains(err.Error(), "another way") {
		t.Errorf("cause %s: %v", CauseOf(err), err)
	}
	// Who has a share keeps it, also when it is prepared anew.
	w.reboot()
	mustPrepare(t, w.plugin(t), second)
}

// A claim that has its share is prepared again after a reboot, whatever the rules say by then.
func TestSharesThatAreHeldAreNotMeasuredAnew(t *testing.T) {
	w := withCapacity(t)
	w.shares = sharesBy(t, "*/1g.10gb=shares:3")
	claims := []*resourceapi.ResourceClaim{newClaim("a", plain("r", migShare0)), newClaim("b", plain("r", migShare0)), newClaim("c", plain("r", migShare0))}
	for _, c := range claims {
		mustPrepare(t, w.plugin(t), c)
	}
	w.shares = sharesBy(t, "*/1g.10gb=shares:2")
	w.reboot()
	for _, c := range claims {
		mustPrepare(t, w.plugin(t), c)
	}
	_, err := w.plugin(t).Prepare(t.Context(), newClaim("d", plain("r", migShare0)))
	refusedFor(t, err, "shares", "1", "3", "2", "a", "b", "c")
}

// No rule offers the shares any more: their number is not known.
func TestPlainSharesThatAreNotOfferedAreNotCounted(t *testing.T) {
	w := withCapacity(t)
	w.shares = device.ShareRules{}
	for i := range 3 {
		mustPrepare(t, w.plugin(t), newClaim(fmt.Sprint("c", i), plain("r", share0)))
	}
}

func TestWhatAShareConsumesIsOnTheDiskWithTheAnswer(t *testing.T) {
	w := withCapacity(t)
	c := newClaim("c", fraction("a", share0, "10Gi", "25"), fraction("b", share0, "1Gi", "0"))
	mustPrepare(t, w.plugin(t), c)
	w.disk.PowerCut()
	r, found, err := w.plugin(t).Records.Load(c.UID)
	if err != nil || !found || len(r.Devices) != 2 {
		t.Fatal(r, found, err)
	}
	for i, want := range []map[string]string{{"memory": "10Gi", "cores": "25"}, {"memory": "1Gi", "cores": "0"}} {
		for name, amount := range want {
			if q := r.Devices[i].ConsumedCapacity[name]; q.String() != amount {
				t.Errorf("share %d has %s of %s, want %s", i, q.String(), name, amount)
			}
		}
	}
}

func TestRecordWithoutConsumedCapacityIsKept(t *testing.T) {
	w := withCapacity(t)
	p := w.plugin(t)
	old := newClaim("old", fraction("a", share0, "20Gi", "30"))
	mustPrepare(t, p, old)
	without(t, w, recordFile(t, w, "uid-old"), "consumedCapacity")
	// It is the same allocation: what runs is not disturbed.
	w.hardware.asked()
	mustPrepare(t, p, old)
	if calls := w.hardware.asked(); slices.Contains(calls, "stop "+share0) {
		t.Errorf("asked %q", calls)
	}
}

// without removes a field from all devices of a record.
func without(t *testing.T, w *world, file, field string) {
	t.Helper()
	var e struct{ Payload map[string]any }
	raw, err := w.disk.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(raw, &e)
	}
	devices, _ := e.Payload["devices"].([]any)
	for _, d := range devices {
		d, _ := d.(map[string]any)
		if _, is := d[field]; !is {
			t.Errorf("there is no %s in %v", field, d)
		}
		delete(d, field)
	}
	payload, merr := json.Marshal(e.Payload)
	if err = errors.Join(err, merr); err != nil {
		t.Fatal(err)
	}
	w.disk.Put(file, sealed(payload))
}

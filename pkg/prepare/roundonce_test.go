package prepare

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// However many claims share a thing, a comparison asks once for it.
func TestAComparisonLooksOnceAtWhatIsShared(t *testing.T) {
	const many = 12
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	for i := range many {
		mustPrepare(t, p, newClaim(fmt.Sprint("fraction-", i), fraction("r", share0, "1Gi", "0")))
		mustPrepare(t, p, shareBy(newClaim(fmt.Sprint("turn-", i), plain("r", share1)), "GpuConfig", slicing("Long")))
	}
	h.asked()
	count := func(what string) int {
		n := 0
		for _, call := range h.asked() {
			if strings.HasPrefix(call, what) {
				n++
			}
		}
		return n
	}
	for range 2 { // each comparison looks again
		if err := p.Reconcile(t.Context()); err != nil {
			t.Fatal(err)
		}
		calls := h.asked()
		slices.Sort(calls)
		if want := []string{"look", "start " + share0, "time slice"}; !slices.Equal(calls, want) {
			t.Errorf("a comparison of %d claims asked %q", 2*many, calls)
		}
	}
	h.of(t, gpu1).forget()
	clear(w.daemons.running)
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := count("set time slice"); n != 1 {
		t.Errorf("what was forgotten was set %d times", n)
	}
	shares(t, w, h, p, device.TimeSliceDefault)
}

// Who comes to a claim's GPU has not to wait for each of those who share a daemon that does not answer.
func TestADaemonThatDoesNotAnswerCostsAComparisonItsTimeOnce(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	for i := range 12 {
		mustPrepare(t, p, newClaim(fmt.Sprint(i), fraction("r", share0, "1Gi", "0")))
	}
	mustPrepare(t, p, newClaim("other", fraction("r", share1, "1Gi", "0")))
	delete(w.daemons.running, share1)
	synctest.Test(t, func(t *testing.T) {
		p := w.plugin(t)
		w.daemons.hang["GPU-0"] = true
		start := time.Now()
		err := p.Reconcile(t.Context())
		if err == nil || strings.Contains(err.Error(), "being prepared or unprepared") {
			t.Errorf("%v", err)
		}
		if took := time.Since(start); took > keepTime {
			t.Errorf("it took %s", took)
		}
		if w.daemons.running[share1].ID == "" {
			t.Error("the other GPU's daemon was not started again")
		}
		clear(w.daemons.hang)
		if err := p.Reconcile(t.Context()); err != nil {
			t.Error(err)
		}
		shares(t, w, h, p, device.TimeSliceDefault)
	})
}

// A comparison may have looked at a daemon before it makes the daemon's partition again.
func TestWhatIsMadeAgainWithinAComparisonIsLookedAtAgain(t *testing.T) {
	r := &round{done: map[string]error{}}
	n := 0
	ask := func() error { n++; return nil }
	for range 2 {
		if err := r.once("key", ask); err != nil {
			t.Error(err)
		}
	}
	r.forget()
	if err := r.once("key", ask); err != nil || n != 2 {
		t.Errorf("%v, asked %d times", err, n)
	}
}

package prepare_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// However many claims share a GPU setting or MPS daemon, one Reconcile must read or restart it only
// once.
func TestReconcileChecksSharedStepsOnce(t *testing.T) {
	const many = 12
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	for i := range many {
		mustPrepare(t, p, newClaim(fmt.Sprint("fraction-", i), fraction("r", share0, "1Gi", "0")))
		mustPrepare(t, p, shareBy(newClaim(fmt.Sprint("slice-", i), plain("r", share1)), "GpuConfig", slicing("Long")))
	}
	h.takeCalls()
	count := func(what string) int {
		n := 0
		for _, call := range h.takeCalls() {
			if strings.HasPrefix(call, what) {
				n++
			}
		}
		return n
	}
	for range 2 { // each pass checks again
		if err := p.Reconcile(t.Context()); err != nil {
			t.Fatal(err)
		}
		calls := h.takeCalls()
		slices.Sort(calls)
		if want := []string{"look", "start " + share0, "time slice"}; !slices.Equal(calls, want) {
			t.Errorf("Reconcile of %d claims made calls %q", 2*many, calls)
		}
	}
	h.of(t, gpu1).forget()
	clear(w.daemons.running)
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := count("set time slice"); n != 1 {
		t.Errorf("the lost setting was set %d times", n)
	}
	checkSharedState(t, w, h, p, device.TimeSliceDefault)
}

// Twelve claims share an MPS daemon that hangs. Reconcile must wait for the daemon once and not
// twelve times, because a new call for the GPU waits meanwhile.
func TestReconcileWaitsOnceForHungDaemon(t *testing.T) {
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
		if took := time.Since(start); took > sharedCheckTime {
			t.Errorf("took %s", took)
		}
		if w.daemons.running[share1].ID == "" {
			t.Error("the other GPU's daemon was not started again")
		}
		clear(w.daemons.hang)
		if err := p.Reconcile(t.Context()); err != nil {
			t.Error(err)
		}
		checkSharedState(t, w, h, p, device.TimeSliceDefault)
	})
}

// Reconcile checks each claim and each shared step once, and holds no lock for long.

package prepare_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
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
		if want := []string{"query", "read time slice", "start " + share0}; !slices.Equal(calls, want) {
			t.Errorf("Reconcile of %d claims made calls %q", 2*many, calls)
		}
	}
	h.of(t, gpu1).ForgetSettings()
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

func TestReconcileReportsUncheckedClaims(t *testing.T) {
	for name, c := range map[string]struct {
		change func(t *testing.T, w *world, p *plugin)
		want   []types.UID
	}{
		"nothing is wrong": {func(*testing.T, *world, *plugin) {}, nil},
		"a call is in flight": {func(t *testing.T, _ *world, p *plugin) {
			t.Helper()
			held, err := p.Locks.Acquire(t.Context(), "uid-c")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(held.Release)
		}, []types.UID{"uid-c"}},
		"unreadable record": {func(t *testing.T, w *world, _ *plugin) { w.disk.Put(recordFile(t, w, "uid-c"), []byte("{")) },
			[]types.UID{"uid-c"}},
		"the node is not ready": {func(_ *testing.T, w *world, _ *plugin) { w.snapshot.Ready = false }, []types.UID{"uid-c"}},
		"after a reboot": {func(_ *testing.T, _ *world, p *plugin) {
			p.with(func(n *steps.Node) { n.BootID = "another" })
		}, []types.UID{"uid-c"}},
		"the inventory lacks the GPU": {func(_ *testing.T, w *world, _ *plugin) { w.snapshot.Node.GPUs = w.snapshot.Node.GPUs[1:] },
			[]types.UID{"uid-c"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				p := w.plugin(t)
				mustPrepare(t, p, newClaim("c", allocated("r", gpu0)))
				var got []types.UID
				p.OnCompared = func(_ []*prepare.LostError, unclear map[types.UID]bool) { got = claimsIn(unclear) }
				c.change(t, w, p)
				if err := p.Reconcile(t.Context()); (err != nil) != (name == "unreadable record") || !slices.Equal(got, c.want) {
					t.Errorf("%v, unchecked %q", err, got)
				}
			})
		})
	}
}

// claimsIn returns the claims that are unclear.
func claimsIn(unclear map[types.UID]bool) (claims []types.UID) {
	for uid, is := range unclear {
		if is {
			claims = append(claims, uid)
		}
	}
	return claims
}

func TestReconcileReportsLostAndUnclearClaims(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	mustPrepare(t, w.plugin(t), newClaim("lost", allocated("r", small0)))
	mustPrepare(t, w.plugin(t), newClaim("well", allocated("r", gpu1)))
	h.of(t, gpu0).RemoveInstances()
	w.scan()
	h.fault = func(_ int, after bool) error {
		if !after && strings.HasPrefix(h.calls[len(h.calls)-1], "create GPU instance") {
			return &nvidia.Error{Op: "a call", Code: device.FailureNotSupported, Message: "not supported"}
		}
		return nil
	}
	p := w.plugin(t)
	for _, c := range []struct {
		what          string
		change        func()
		lost, unclear []types.UID
	}{
		{"one claim lost its device", func() {}, []types.UID{"uid-lost"}, []types.UID{"uid-lost"}},
		{"garbage collection fails", func() {
			h.fault = nil
			w.specs.unlisted = errors.New("input/output error")
		}, nil, nil},
	} {
		c.change()
		var lost, unclear []types.UID
		p.OnCompared = func(found []*prepare.LostError, of map[types.UID]bool) {
			for _, l := range found {
				lost = append(lost, l.UID)
			}
			unclear = claimsIn(of)
		}
		if err := p.Reconcile(t.Context()); err == nil || !slices.Equal(lost, c.lost) || !slices.Equal(unclear, c.unclear) {
			t.Errorf("%s: %v, lost %q, unclear %q", c.what, err, lost, unclear)
		}
	}
	w.disk.StopAt(1)
	if err := p.Records.SaveHolder(checkpoint.Holder{Key: "any"}); err == nil {
		t.Fatal("the disk works")
	}
	p.OnCompared = func([]*prepare.LostError, map[types.UID]bool) { t.Error("a comparison without a list of the records") }
	if err := p.Reconcile(t.Context()); err == nil {
		t.Error("the records were listed")
	}
}

// lockedOperations are operations that wait for a lock.
var lockedOperations = map[string]struct {
	call func(*testing.T, *world, *plugin) error
	said string // part of the error while another call has the lock
}{
	"reconcile a claim": {func(t *testing.T, _ *world, p *plugin) error {
		return p.Reconcile(t.Context())
	}, ""},
	"unprepare an orphan": {func(t *testing.T, _ *world, p *plugin) error {
		_, err := p.UnprepareOrphan(t.Context(), "uid-c", confirmAlways)
		return err
	}, ""},
	"remove the spec of a recordless claim": {func(t *testing.T, w *world, p *plugin) error {
		if err := w.specs.WriteClaim("uid-dead", nil); err != nil {
			t.Fatal(err)
		}
		return p.Reconcile(t.Context())
	}, ""},
	"restore shared state without holders": {func(t *testing.T, _ *world, p *plugin) error {
		if err := p.Records.SaveHolder(checkpoint.Holder{Key: steps.SharedKey(gpu0, steps.TimeSliceKind), GPUs: []string{gpu0}}); err != nil {
			t.Fatal(err)
		}
		return p.Reconcile(t.Context())
	}, "a claim is being prepared or unprepared"},
	"stop a leftover daemon": {func(t *testing.T, w *world, p *plugin) error {
		w.daemons.running[gpu0] = mps.Daemon{ID: gpu0}
		return p.Reconcile(t.Context())
	}, "a claim is being prepared or unprepared"},
}

func TestReconcileReportsLockErrors(t *testing.T) {
	for name, c := range lockedOperations {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			withMPS(w)
			p := w.plugin(t)
			mustPrepare(t, p, newClaim("c", allocated("r", gpu0)))
			w.breakLocks(t)
			if err := c.call(t, w, p); err == nil || !strings.Contains(err.Error(), w.locks) || !strings.Contains(err.Error(), "no such file") {
				t.Errorf("want an error that names %s and the cause, got %v", w.locks, err)
			}
		})
	}
}

// If another call has the lock, the operations on one claim must return nil, because that call
// takes care of the claim. The operations on a GPU must return an error that says what they waited
// for, since the call may be for any claim.
func TestReconcileSkipsClaimWithCallInFlight(t *testing.T) {
	for name, c := range lockedOperations {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			withMPS(w)
			mustPrepare(t, w.plugin(t), newClaim("c", allocated("r", gpu0)))
			synctest.Test(t, func(t *testing.T) {
				p := w.plugin(t)
				held, err := p.Locks.Acquire(t.Context(), gpu0, "uid-c", "uid-dead")
				if err != nil {
					t.Fatal(err)
				}
				defer held.Release()
				if err := c.call(t, w, p); (err != nil) != (c.said != "") || err != nil && !strings.Contains(err.Error(), c.said) {
					t.Errorf("want %q, got %v", c.said, err)
				}
			})
		})
	}
}

func TestPeriodicWorkReleasesGPUSoon(t *testing.T) {
	for name, c := range map[string]struct {
		slow slowDestroy
		busy bool // another call holds the GPU's lock
		call func(*testing.T, *world, *plugin) error
	}{
		"adopt, a call holds the GPU":    {slowDestroy{}, true, adoptInstances},
		"adopt, the GPU does not answer": {slowDestroy{look: true}, false, adoptInstances},
		"adopt, the instance is in use":  {slowDestroy{destroy: true}, false, adoptInstances},
		"reconcile, the instance is in use": {slowDestroy{destroy: true}, false, func(t *testing.T, _ *world, p *plugin) error {
			return p.Reconcile(t.Context())
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			h := withMIG(w)
			mustPrepare(t, w.plugin(t), newClaim("c", allocated("r", small0)))
			h.createForeign(t, gpu0, 9, 4)
			w.scan()
			synctest.Test(t, func(t *testing.T) {
				p := w.plugin(t)
				r, _, err := p.Records.Load("uid-c")
				if err != nil {
					t.Fatal(err)
				}
				r.State = checkpoint.Reverting
				if err := p.Records.Save(r); err != nil {
					t.Fatal(err)
				}
				c.slow.hardware = h
				p.with(func(n *steps.Node) { n.Partitions = &c.slow })
				if c.busy {
					held, err := p.Locks.Acquire(t.Context(), gpu0)
					if err != nil {
						t.Fatal(err)
					}
					defer held.Release()
				}
				start := time.Now()
				if err := c.call(t, w, p); err == nil {
					t.Error("no error was reported")
				}
				if took := time.Since(start); took > steps.PeriodicTime {
					t.Errorf("took %s", took)
				}
			})
		})
	}
}

func adoptInstances(t *testing.T, w *world, p *plugin) error { t.Helper(); return adopt(t, w, p) }

func TestOneFailedRepairBlocksNoOther(t *testing.T) {
	for _, broken := range []string{"GPU-0", "GPU-1"} {
		w := newWorld(t)
		h := withMPS(w)
		p := w.plugin(t)
		mustPrepare(t, p, shareBy(newClaim("a", allocated("r", gpu0)), "GpuConfig", slicing("Long")))
		mustPrepare(t, p, shareBy(newClaim("b", allocated("r", gpu1)), "GpuConfig", slicing("Long")))
		for _, uid := range []types.UID{"uid-a", "uid-b"} {
			if err := p.Records.Remove(uid); err != nil {
				t.Fatal(err)
			}
		}
		for _, file := range w.holders() {
			w.disk.Put(filepath.Join(state, "holders", file), nil)
		}
		p.with(func(n *steps.Node) { n.Partitions = &muteTimeSlice{h, broken} })
		if err := p.Reconcile(t.Context()); err == nil {
			t.Error("no error was reported")
		}
		if left := w.holders(); len(left) != 1 {
			t.Errorf("%s is broken: left: %q", broken, left)
		}
		for _, gpu := range []string{gpu0, gpu1} {
			if s := h.of(t, gpu); s.UUID != broken && s.TimeSlice != device.TimeSliceDefault {
				t.Errorf("%s has time slice %d", gpu, s.TimeSlice)
			}
		}
		p.with(func(n *steps.Node) { n.Partitions = h })
		if err := p.Reconcile(t.Context()); err != nil || len(w.holders()) != 0 {
			t.Errorf("%v, left: %q", err, w.holders())
		}
		checkSharedState(t, w, h, p, device.TimeSliceDefault)
	}
}

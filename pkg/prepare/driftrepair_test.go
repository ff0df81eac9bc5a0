// A CDI spec that was removed, or that names old device nodes, is repaired without disturbing other
// claims.

package prepare_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// The repair of a missing CDI spec must work whether or not the inventory has the claim's
// partition. If the inventory does not have it, the repair reads the hardware.
func TestMissingSpecOfPartitionIsRestored(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, several)
	spec := w.specs.of("uid-c")
	for _, seen := range []bool{false, true} {
		if seen {
			w.scan()
		}
		w.specs.clear()
		h.takeCalls()
		if err := p.Reconcile(t.Context()); err != nil {
			t.Error(err)
		}
		if w.specs.of("uid-c") != spec || seen == (len(h.takeCalls()) > 0) {
			t.Errorf("%v; the spec is %s", seen, w.specs.of("uid-c"))
		}
	}
	// Now the partition called "neighbor" is lost, so the repair must recreate it.
	h.of(t, gpu1).RemoveInstances()
	w.scan()
	if err := p.Reconcile(t.Context()); err != nil || w.specs.of("uid-c") == "" {
		t.Errorf("%v, %s", err, w.specs.of("uid-c"))
	}
	w.scan()
	checkRecordsMatchHardware(t, w, h, p, nil)
}

func TestBrokenClaimHindersNoOtherSpecRepair(t *testing.T) {
	bad := newClaim("bad", allocated("r", gpu0))
	whole := func(t *testing.T, w *world) { t.Helper(); mustPrepare(t, w.plugin(t), bad) }
	takes := func(list func(before []checkpoint.Step) []checkpoint.Step) func(t *testing.T, w *world) {
		return func(t *testing.T, w *world) {
			t.Helper()
			whole(t, w)
			p := w.plugin(t)
			r, _, err := p.Records.Load(bad.UID)
			if err != nil {
				t.Fatal(err)
			}
			r.Steps = list(r.Steps)
			if err := p.Records.Save(r); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, befall := range map[string]func(t *testing.T, w *world){
		"an unreadable record": func(t *testing.T, w *world) {
			t.Helper()
			whole(t, w)
			w.disk.Put(recordFile(t, w, "uid-bad"), []byte("{"))
		},
		"a record of a later version": func(t *testing.T, w *world) {
			t.Helper()
			whole(t, w)
			w.disk.Put(recordFile(t, w, "uid-bad"), []byte(`{"minReader":8}`))
		},
		"a step of a later version": takes(func(before []checkpoint.Step) []checkpoint.Step {
			return append(before, checkpoint.Step{Kind: "of-tomorrow", Params: []byte(`{}`)})
		}),
		"other steps": takes(func(before []checkpoint.Step) []checkpoint.Step { return append(before, before...) }),
		"another card": func(t *testing.T, w *world) {
			t.Helper()
			whole(t, w)
			w.snapshot.Node.GPUs[0].UUID = "GPU-new"
		},
		"a lost partition": func(t *testing.T, w *world) {
			t.Helper()
			h := withMIG(w)
			theirs := h.createForeign(t, gpu0, 9, 4)
			w.scan()
			mustPrepare(t, w.plugin(t), newClaim("bad", allocated("r", large4)))
			delete(h.of(t, gpu0).Instances, theirs.ID)
			w.scan()
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			befall(t, w)
			p := w.plugin(t)
			mustPrepare(t, p, newClaim("good", allocated("r", gpu1)))
			w.specs.clear()
			_ = p.Reconcile(t.Context()) // other tests expect its error
			if w.specs.of("uid-good") == "" {
				t.Error("the other claim has no spec")
			}
		})
	}
}

// Four claims are busy in another call. The test expects that they do not delay the repair of a
// fifth claim's CDI spec, because restarting containers need their specs.
func TestBusyClaimsDelayNoOtherSpecRepair(t *testing.T) {
	withBusyClaims(t, func(t *testing.T, w *world, p *plugin) {
		start := time.Now()
		go func() {
			<-time.After(busyWait / 2)
			if w.specs.of("uid-z") == nothing {
				t.Error("an idle claim has no spec yet")
			}
		}()
		if err := p.Reconcile(t.Context()); err != nil {
			t.Error(err)
		}
		if took := time.Since(start); took > busyWait+time.Second {
			t.Errorf("took %s", took)
		}
	})
}

func TestSlowReadOutlivesClaimLockWait(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	mustPrepare(t, w.plugin(t), newClaim("c", allocated("r", small0)))
	w.specs.clear() // without w.scan the inventory lacks the new partitions
	synctest.Test(t, func(t *testing.T) {
		p := w.plugin(t)
		p.with(func(n *steps.Node) { n.Partitions = &slowRead{h, 3 * busyWait} })
		if err := p.Reconcile(t.Context()); err != nil || w.specs.of("uid-c") == nothing {
			t.Errorf("the spec is %q: %v", w.specs.of("uid-c"), err)
		}
	})
}

// While a GPU hangs, the repair of a claim on it waits for the deadline. The test expects that the
// claim of another GPU has its spec at once.
func TestHungGPUDelaysNoOtherSpecRepair(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	mustPrepare(t, w.plugin(t), newClaim("hung", allocated("r", small0)))
	mustPrepare(t, w.plugin(t), newClaim("other", allocated("r", gpu1)))
	w.specs.clear() // without w.scan the inventory lacks the new partition, so the repair reads gpu0
	synctest.Test(t, func(t *testing.T) {
		p := w.plugin(t)
		p.with(func(n *steps.Node) { n.Partitions = &slowRead{h, time.Hour} })
		ended := make(chan error, 1)
		go func() { ended <- p.Reconcile(t.Context()) }()
		synctest.Wait()
		if w.specs.of("uid-other") == nothing || w.specs.of("uid-hung") != nothing {
			t.Errorf("the specs are %q and %q", w.specs.of("uid-other"), w.specs.of("uid-hung"))
		}
		if len(ended) > 0 {
			t.Error("the repair did not wait for the hung GPU")
		}
		if err := <-ended; err == nil {
			t.Error("no error was reported")
		}
	})
}

package prepare_test

import (
	"syscall"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/reconcile"
)

func TestPermanentErrorsAreNotRetryable(t *testing.T) {
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
			w.disk.Put(recordFile(t, w, "uid-bad"), []byte(`{"minReader":2}`))
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
			delete(h.of(t, gpu0).instances, theirs.ID)
			w.scan()
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			befall(t, w)
			p := w.plugin(t)
			mustPrepare(t, p, newClaim("good", allocated("r", gpu1)))
			w.specs.clear()
			if err := p.RepairAllSpecs(t.Context()); err == nil || reconcile.Retryable(err) != nil || w.specs.of("uid-good") == "" {
				t.Errorf("the other claim's spec is %q; %v", w.specs.of("uid-good"), err)
			}
			w.disk.FailAt(1, syscall.ENOSPC)
			if err := p.RepairAllSpecs(t.Context()); reconcile.Retryable(err) == nil {
				t.Errorf("a full disk is not retryable: %v", err)
			}
		})
	}
}

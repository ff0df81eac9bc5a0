// Reconcile restores CDI specs and removes leftovers at the start, and no record is lost that it
// cannot read.

package prepare_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

func TestRemovedSpecsAreRestored(t *testing.T) {
	w := newWorld(t)
	mustPrepare(t, w.plugin(t), newClaim("a", allocated("r", gpu0)))
	mustPrepare(t, w.plugin(t), newClaim("b", allocated("r", gpu1)))
	spec := w.specs.of("uid-b")
	w.specs.clear()
	// At a restart the driver may not be loaded yet, so the device nodes of the cards are unknown.
	w.snapshot.Ready = false
	if err := w.plugin(t).Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(w.specs.claims) != 0 {
		t.Errorf("written before the node was scanned: %v", w.specs.claims)
	}
	w.snapshot.Ready = true
	if err := w.plugin(t).Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if w.specs.of("uid-b") != spec || w.specs.of("uid-a") == "" {
		t.Errorf("the specs are %v", w.specs.claims)
	}
}

func TestRecoveryRemovesFilesWithoutRecord(t *testing.T) {
	w := newWorld(t)
	w.specs.claims["uid-leftover"] = "a spec"
	if err := w.plugin(t).Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	checkClean(t, w)
}

// withBusyClaims runs a test with a new plugin process on a node that has lost all CDI specs.
// Another call has the locks of the four claims for partitions of gpu0, but not that of claim z.
func withBusyClaims(t *testing.T, test func(t *testing.T, w *world, p *plugin)) {
	t.Helper()
	w := newWorld(t)
	withMIG(w)
	var busy []string
	for start := range 4 {
		c := newClaim(fmt.Sprint(start), allocated("r", fmt.Sprintf("%s-mig-19-%d", gpu0, start)))
		mustPrepare(t, w.plugin(t), c)
		busy = append(busy, string(c.UID))
	}
	mustPrepare(t, w.plugin(t), newClaim("z", allocated("r", gpu1)))
	w.scan()
	w.specs.clear()
	synctest.Test(t, func(t *testing.T) {
		p := w.plugin(t)
		held, err := p.Locks.Acquire(t.Context(), busy...)
		if err != nil {
			t.Fatal(err)
		}
		defer held.Release()
		test(t, w, p)
	})
}

func TestUnreadableStateDirectoryFailsRecovery(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	w.disk.StopAt(1)
	_ = w.disk.Write()
	_, heldErr := p.Usage()
	for i, err := range []error{p.Reconcile(t.Context()), heldErr} {
		if cause.Of(err) != cause.Record {
			t.Errorf("call %d: %v", i, err)
		}
	}
}

func TestUnreadableRecordBlocksItsGPUUntilUnprepare(t *testing.T) {
	for name, resolve := range map[string]func(*testing.T, *plugin){
		"by unprepare": func(t *testing.T, p *plugin) {
			t.Helper()
			mustUnprepare(t, p, "uid-bad")
		},
		"by prepare, on another GPU": func(t *testing.T, p *plugin) {
			t.Helper()
			mustUnprepare(t, p, "uid-good")
			mustPrepare(t, p, newClaim("bad", allocated("r", gpu1)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			mustPrepare(t, w.plugin(t), newClaim("bad", allocated("r", gpu0)))
			mustPrepare(t, w.plugin(t), newClaim("good", allocated("r", gpu1)))
			w.disk.Put(recordFile(t, w, "uid-bad"), []byte("{"))
			p := w.plugin(t)
			reconcileUnreadable(t, p)
			_, err := p.Prepare(t.Context(), newClaim("next", allocated("r", gpu0)))
			if cause.Of(err) != cause.Held || !strings.Contains(err.Error(), "uid-bad") || !strings.Contains(err.Error(), "is unreadable") {
				t.Fatal(err)
			}
			mustPrepare(t, p, newClaim("good", allocated("r", gpu1)))
			resolve(t, p)
			mustPrepare(t, p, newClaim("next", allocated("r", gpu0)))
			if kept := w.disk.Names(filepath.Join(state, "quarantine")); len(kept) != 1 {
				t.Errorf("the quarantine has %q", kept)
			}
		})
	}
}

// A disk that does not answer for a moment, such as one on the network, gives the same error as a
// bad sector. A quarantine would leave the claim's MIG instance behind, and forget a GPU's original
// time slice.
func TestOneFailedReadQuarantinesNothing(t *testing.T) {
	record := func(t *testing.T, w *world) string { t.Helper(); return recordFile(t, w, "uid-c") }
	holder := func(_ *testing.T, w *world) string { return filepath.Join(state, "holders", w.holders()[0]) }
	part := newClaim("c", allocated("r", small0))
	unprepare := func(t *testing.T, p *plugin) error { t.Helper(); return p.Unprepare(t.Context(), "uid-c") }
	for name, c := range map[string]struct {
		claim *resourceapi.ResourceClaim
		file  func(*testing.T, *world) string
		call  func(*testing.T, *plugin) error
	}{
		"of the record in Unprepare": {part, record, unprepare},
		"of the record in Prepare": {part, record, func(t *testing.T, p *plugin) error {
			t.Helper()
			_, err := p.Prepare(t.Context(), part)
			return err
		}},
		"of a shared setting's file in Unprepare": {sliced, holder, unprepare},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			h := withMPS(w)
			p := w.plugin(t)
			mustPrepare(t, p, c.claim)
			file := c.file(t, w)
			w.disk.FailReads(file, syscall.EIO)
			if err := c.call(t, p); cause.Of(err) != cause.Record || !errors.Is(err, syscall.EIO) || !strings.Contains(err.Error(), file) {
				t.Errorf("the error does not tell of the failed read: %v", err)
			}
			w.disk.FailReads(file, nil)
			mustUnprepare(t, p, "uid-c")
			checkClean(t, w)
			kept := append(w.disk.Names(filepath.Join(state, "quarantine")), w.holders()...)
			if len(kept) != 0 || len(h.of(t, gpu0).Instances) != 0 {
				t.Errorf("files left: %q, the GPU has %d instances", kept, len(h.of(t, gpu0).Instances))
			}
		})
	}
}

// A bad sector stays bad, and must not keep the claim's Pod for ever.
func TestReadErrorThatLastsEndsInQuarantine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		p := w.plugin(t)
		for range 2 { // an error of the second record is not the one of the first
			mustPrepare(t, p, newClaim("c", allocated("r", gpu0)))
			file := recordFile(t, w, "uid-c")
			w.disk.FailReads(file, syscall.EIO)
			for _, after := range []time.Duration{0, 10 * time.Second} {
				<-time.After(after)
				if err := p.Unprepare(t.Context(), "uid-c"); err == nil || len(w.records()) != 1 {
					t.Errorf("unprepared at once, with records %q: %v", w.records(), err)
				}
			}
			<-time.After(time.Minute)
			mustUnprepare(t, p, "uid-c")
			checkClean(t, w)
			w.disk.FailReads(file, nil)
		}
		if kept := w.disk.Names(filepath.Join(state, "quarantine")); len(kept) != 2 {
			t.Errorf("the quarantine has %q", kept)
		}
	})
}

// The claim of an unreadable record was deleted, so no call unprepares it. The error of a
// conflicting claim must name the record's file, so that an admin can remove it.
func TestUnreadableRecordCanBeRemovedByHand(t *testing.T) {
	w := newWorld(t)
	withMPS(w)
	mustPrepare(t, w.plugin(t), newClaim("bad", fraction("r", share0, "1Gi", "0")))
	file := recordFile(t, w, "uid-bad")
	w.disk.Put(file, []byte("{"))
	p := w.plugin(t)
	next := newClaim("next", allocated("r", gpu0))
	reconcileUnreadable(t, p)
	if _, err := p.Prepare(t.Context(), next); cause.Of(err) != cause.Held || !strings.Contains(err.Error(), file) {
		t.Errorf("the error does not name the file: %v", err)
	}
	if err := w.disk.Remove(file); err != nil {
		t.Fatal(err)
	}
	w.daemons.ending = 10 * tryWait // other work on the claim must wait longer than tryWait
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(w.daemons.running) != 0 || len(w.holders()) != 0 || w.specs.of("uid-bad") != "" {
		t.Errorf("left: %v, %q, %q", w.daemons.running, w.holders(), w.specs.of("uid-bad"))
	}
	mustPrepare(t, p, next)
}

func TestRecordOfLaterVersionIsLeftAlone(t *testing.T) {
	w := newWorld(t)
	c := newClaim("c", allocated("r", gpu0))
	mustPrepare(t, w.plugin(t), c)
	w.disk.Put(recordFile(t, w, "uid-c"), []byte(`{"minReader":8}`))
	p := w.plugin(t)
	if err := p.Reconcile(t.Context()); cause.Of(err) != cause.Record || !strings.Contains(err.Error(), "version 8") {
		t.Error(err)
	}
	if err := p.Unprepare(t.Context(), "uid-c"); cause.Of(err) != cause.Record || !strings.Contains(err.Error(), "version 8") {
		t.Error(err)
	}
	if _, err := p.Prepare(t.Context(), c); cause.Of(err) != cause.Record {
		t.Error(err)
	}
	if _, err := p.Prepare(t.Context(), newClaim("next", allocated("r", gpu0))); cause.Of(err) != cause.Held {
		t.Error(err)
	}
	if len(w.records()) != 1 {
		t.Errorf("records: %q", w.records())
	}
}

func TestUnknownStepOfLaterVersionIsKept(t *testing.T) {
	for _, step := range []checkpoint.Step{
		{Kind: "mps-daemon", Params: []byte(`{}`)},
		{Kind: steps.ClaimSpecKind, Params: []byte(`[]`)},
	} {
		w := newWorld(t)
		p := w.plugin(t)
		mustPrepare(t, p, newClaim("c", allocated("r", gpu0)))
		r, _, err := p.Records.Load("uid-c")
		if err != nil {
			t.Fatal(err)
		}
		r.Steps = append(r.Steps, step)
		if err := p.Records.Save(r); err != nil {
			t.Fatal(err)
		}
		if err := p.Unprepare(t.Context(), "uid-c"); cause.Of(err) != cause.Record || !strings.Contains(err.Error(), step.Kind) {
			t.Error(err)
		}
		if err := p.Reconcile(t.Context()); err == nil {
			t.Error("no error was reported")
		}
		if len(w.records()) != 1 {
			t.Error(w.records())
		}
	}
}

func TestStepsOfOtherVersionsAreKept(t *testing.T) {
	w := newWorld(t)
	mustPrepare(t, w.plugin(t), newClaim("a", allocated("r", gpu0)))
	p := w.plugin(t)
	r, _, err := p.Records.Load("uid-a")
	if err != nil {
		t.Fatal(err)
	}
	r.Steps = append(r.Steps, r.Steps[0])
	r.Steps[1].Kind = "of-a-later-version"
	if err := p.Records.Save(r); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Prepare(t.Context(), newClaim("a", allocated("r", gpu0))); err == nil ||
		!strings.Contains(err.Error(), "of-a-later-version") {
		t.Errorf("prepared over a step that would never be reverted: %v", err)
	}
	if r, _, err := p.Records.Load("uid-a"); err != nil || len(r.Steps) != 2 {
		t.Errorf("the record lost the step: %+v, %v", r.Steps, err)
	}
}

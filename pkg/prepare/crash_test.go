package prepare_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/claimlock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// deaths has the ways in which a plugin process can die, by name: killed, or with a power cut. Each
// function does to the fake node what that death does.
var deaths = map[string]func(*world){
	"kill -9":   func(w *world) { w.disk.Restart() },
	"power cut": func(w *world) { w.reboot() },
}

// checkConsistent fails the test unless the claim uid is either fully prepared or not prepared at
// all. It returns which of the two is the case.
func checkConsistent(t *testing.T, w *world, p *plugin, uid types.UID) (prepared bool) {
	t.Helper()
	r, found, err := p.Records.Load(uid)
	if err != nil {
		t.Fatalf("the record cannot be read: %v", err)
	}
	spec := w.specs.of(uid)
	switch {
	case !found && spec != "":
		t.Errorf("a spec without a record: %s", spec)
	case found && r.State != checkpoint.Prepared:
		t.Errorf("the record says %s", r.State)
	case found && r.BootID == w.bootID && spec == "":
		t.Error("a prepared claim without a spec")
	}
	for _, name := range w.records() {
		if !strings.HasSuffix(name, ".json") || strings.HasPrefix(name, ".") {
			t.Errorf("%s is left over", name)
		}
	}
	return found
}

func TestInterruptedPrepareIsRecovered(t *testing.T) {
	for name, end := range deaths {
		for n := 1; ; n++ {
			w := newWorld(t)
			mustPrepare(t, w.plugin(t), newClaim("bystander", allocated("r", gpu1)))
			dying := w.plugin(t)
			w.disk.StopAt(n)
			c := newClaim("c", allocated("r", gpu0))
			_, err := dying.Prepare(t.Context(), c)
			if !w.disk.Stopped() {
				if err != nil || n < 6 {
					t.Fatalf("%d writes: %v", n, err)
				}
				break
			}
			t.Run(fmt.Sprintf("%s at write %d", name, n), func(t *testing.T) {
				end(w)
				leaveLockFile(t, w, "c")
				p := w.plugin(t)
				if err := p.Recover(t.Context()); err != nil {
					t.Fatal(err)
				}
				if checkConsistent(t, w, p, "uid-c") {
					mustUnprepare(t, p, "uid-c")
				}
				mustPrepare(t, p, newClaim("next", allocated("r", gpu0)))
				mustUnprepare(t, p, "uid-next")
				mustPrepare(t, p, c)
				if !checkConsistent(t, w, p, "uid-bystander") {
					t.Error("another claim was lost")
				}
				mustUnprepare(t, p, "uid-c")
				mustUnprepare(t, p, "uid-bystander")
				checkClean(t, w)
			})
		}
	}
}

// After a crash the kubelet may call Prepare before Recover ran. Prepare must succeed without
// Recover, whichever disk write of the earlier Prepare was the last.
func TestPrepareAfterInterruptedPrepareNeedsNoRecovery(t *testing.T) {
	for name, end := range deaths {
		for n := 1; ; n++ {
			w := newWorld(t)
			dying := w.plugin(t)
			w.disk.StopAt(n)
			c := newClaim("c", allocated("r", gpu0))
			_, _ = dying.Prepare(t.Context(), c)
			if !w.disk.Stopped() {
				break
			}
			t.Run(fmt.Sprintf("%s at write %d", name, n), func(t *testing.T) {
				end(w)
				p := w.plugin(t)
				mustPrepare(t, p, c)
				if !checkConsistent(t, w, p, "uid-c") {
					t.Error("not prepared")
				}
			})
		}
	}
}

func TestInterruptedUnprepareIsRecovered(t *testing.T) {
	for name, end := range deaths {
		for n := 1; ; n++ {
			w := newWorld(t)
			c := newClaim("c", allocated("r", gpu0))
			mustPrepare(t, w.plugin(t), c)
			dying := w.plugin(t)
			w.disk.StopAt(n)
			_ = dying.Unprepare(t.Context(), "uid-c")
			if !w.disk.Stopped() {
				break
			}
			t.Run(fmt.Sprintf("%s at write %d", name, n), func(t *testing.T) {
				end(w)
				p := w.plugin(t)
				if err := p.Recover(t.Context()); err != nil {
					t.Fatal(err)
				}
				checkConsistent(t, w, p, "uid-c")
				mustUnprepare(t, p, "uid-c")
				checkClean(t, w)
				mustPrepare(t, p, newClaim("next", allocated("r", gpu0)))
			})
		}
	}
}

func TestInterruptedRecoveryIsFinishedByTheNext(t *testing.T) {
	for n := 1; ; n++ {
		w := newWorld(t)
		dying := w.plugin(t)
		w.disk.StopAt(4) // the spec is written, the record is not
		_, _ = dying.Prepare(t.Context(), newClaim("c", allocated("r", gpu0)))
		w.disk.Restart()
		p := w.plugin(t)
		w.disk.StopAt(n)
		_ = p.Recover(t.Context())
		if !w.disk.Stopped() {
			checkClean(t, w)
			return
		}
		w.disk.Restart()
		p = w.plugin(t)
		if err := p.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		checkClean(t, w)
	}
}

// leaveLockFile creates the lock file that a killed process would leave.
func leaveLockFile(t *testing.T, w *world, claim string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(w.locks, claimlock.ClaimName(types.UID("uid-"+claim)).File), nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestRecoveryRemovesFilesWithoutRecord(t *testing.T) {
	w := newWorld(t)
	w.specs.claims["uid-leftover"] = "a spec"
	leaveLockFile(t, w, "killed")
	if err := w.plugin(t).Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	checkClean(t, w)
}

func TestRemovedSpecsAreRestored(t *testing.T) {
	for name, repair := range map[string]func(*plugin, context.Context) error{
		"at the start": (*plugin).Recover,
		"when noticed": (*plugin).RepairAllSpecs,
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			mustPrepare(t, w.plugin(t), newClaim("a", allocated("r", gpu0)))
			mustPrepare(t, w.plugin(t), newClaim("b", allocated("r", gpu1)))
			spec := w.specs.of("uid-b")
			w.specs.clear()
			// At a restart the driver may not be loaded yet, so the device nodes of the cards are unknown.
			w.snapshot.Ready = false
			if err := repair(w.plugin(t), t.Context()); err != nil {
				t.Fatal(err)
			}
			if len(w.specs.claims) != 0 {
				t.Errorf("written before the node was scanned: %v", w.specs.claims)
			}
			w.snapshot.Ready = true
			if err := repair(w.plugin(t), t.Context()); err != nil {
				t.Fatal(err)
			}
			if w.specs.of("uid-b") != spec || w.specs.of("uid-a") == "" {
				t.Errorf("the specs are %v", w.specs.claims)
			}
		})
	}
}

func recordFile(t *testing.T, w *world, uid string) string {
	t.Helper()
	for _, name := range w.records() {
		if strings.HasPrefix(name, uid) {
			return filepath.Join(state, "claims", name)
		}
	}
	t.Fatalf("%s has no record", uid)
	return ""
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
			if err := p.Recover(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := p.RepairAllSpecs(t.Context()); err == nil {
				t.Error("no error was reported")
			}
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

// If the CDI specs cannot be listed, Reconcile must still stop the leftover MPS daemon.
func TestLeftoverDaemonStopsThoughSpecsCannotBeListed(t *testing.T) {
	w := newWorld(t)
	withMPS(w)
	mustPrepare(t, w.plugin(t), newClaim("bad", fraction("r", share0, "1Gi", "0")))
	if err := w.disk.Remove(recordFile(t, w, "uid-bad")); err != nil {
		t.Fatal(err)
	}
	w.specs.unlisted = errors.New("input/output error")
	if err := w.plugin(t).Reconcile(t.Context()); !errors.Is(err, w.specs.unlisted) {
		t.Errorf("the failure is not reported: %v", err)
	}
	if len(w.daemons.running) != 0 || len(w.holders()) != 0 {
		t.Errorf("left: %v, %q", w.daemons.running, w.holders())
	}
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
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
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
	w.disk.Put(recordFile(t, w, "uid-c"), []byte(`{"minReader":2}`))
	p := w.plugin(t)
	if err := p.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := p.Unprepare(t.Context(), "uid-c"); cause.Of(err) != cause.Record || !strings.Contains(err.Error(), "version 2") {
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
		if err := p.RepairAllSpecs(t.Context()); err == nil {
			t.Error("no error was reported")
		}
		if err := p.Recover(t.Context()); err != nil || len(w.records()) != 1 {
			t.Error(err, w.records())
		}
	}
}

func TestReadOnlyDiskIsReportedInPrepareError(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", allocated("r", gpu0)))
	for n := 1; n <= 3; n++ {
		w.disk.FailAt(n, syscall.EROFS)
		if err := p.Unprepare(t.Context(), "uid-c"); !errors.Is(err, syscall.EROFS) || !strings.Contains(err.Error(), "uid-c") {
			t.Errorf("write %d: %v", n, err)
		}
	}
	w.disk.Restart()
	mustUnprepare(t, p, "uid-c")
	checkClean(t, w)
}

func TestUnreadableStateDirectoryFailsRecovery(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	w.disk.StopAt(1)
	_ = w.disk.Write()
	_, heldErr := p.Usage()
	for i, err := range []error{p.Recover(t.Context()), p.RepairAllSpecs(t.Context()), heldErr} {
		if cause.Of(err) != cause.Record {
			t.Errorf("call %d: %v", i, err)
		}
	}
}

// This test uses the real store of CDI specs, because the CDI library must accept the specs. The
// fake store does not check that.
func TestPrepareWithRealCDISpecs(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	store := cdi.NewStore(dir)
	p := w.plugin(t)
	p.with(func(n *steps.Node) { n.Specs = store })
	p.OnVerify = func(edits specs.ContainerEdits) error { return w.verify(edits) }
	mustPrepare(t, p, newClaim("c", allocated("a", gpu0), admin("b", gpu0), allocated("c", gpu1)))
	file := filepath.Join(dir, "k8s.gpu.nvidia.com-claim_uid-c.json")
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := p.RepairAllSpecs(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after, err := os.ReadFile(file); err != nil || string(after) != string(before) {
		t.Errorf("%s, %v", after, err)
	}
	mustUnprepare(t, p, "uid-c")
	if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

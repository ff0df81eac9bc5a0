package prepare

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
)

// ends are the two ways in which a process ends without being asked.
var ends = map[string]func(*world){
	"kill -9":   func(w *world) { w.disk.Restart() },
	"power cut": func(w *world) { w.reboot() },
}

// consistent is what must hold after every start: each claim is prepared in whole or not at all.
func consistent(t *testing.T, w *world, p *Preparer, uid types.UID) (prepared bool) {
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

func TestAPrepareThatIsInterruptedAnywhere(t *testing.T) {
	for name, end := range ends {
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
				leaveALock(t, w, "c")
				p := w.plugin(t)
				if err := p.Recover(t.Context()); err != nil {
					t.Fatal(err)
				}
				if consistent(t, w, p, "uid-c") {
					mustUnprepare(t, p, "uid-c")
				}
				mustPrepare(t, p, newClaim("next", allocated("r", gpu0)))
				mustUnprepare(t, p, "uid-next")
				mustPrepare(t, p, c)
				if !consistent(t, w, p, "uid-bystander") {
					t.Error("another claim was lost")
				}
				mustUnprepare(t, p, "uid-c")
				mustUnprepare(t, p, "uid-bystander")
				clean(t, w)
			})
		}
	}
}

// The kubelet's next call may come to an instance that has not recovered, or to another one.
func TestThePrepareAfterAnInterruptedOneNeedsNoRecovery(t *testing.T) {
	for name, end := range ends {
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
				if !consistent(t, w, p, "uid-c") {
					t.Error("not prepared")
				}
			})
		}
	}
}

func TestAnUnprepareThatIsInterruptedAnywhere(t *testing.T) {
	for name, end := range ends {
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
				consistent(t, w, p, "uid-c")
				mustUnprepare(t, p, "uid-c")
				clean(t, w)
				mustPrepare(t, p, newClaim("next", allocated("r", gpu0)))
			})
		}
	}
}

func TestARecoveryThatIsInterruptedAnywhereIsFinishedByTheNext(t *testing.T) {
	for n := 1; ; n++ {
		w := newWorld(t)
		dying := w.plugin(t)
		w.disk.StopAt(4) // the spec is written, the record has no name yet
		_, _ = dying.Prepare(t.Context(), newClaim("c", allocated("r", gpu0)))
		w.disk.Restart()
		p := w.plugin(t)
		w.disk.StopAt(n)
		_ = p.Recover(t.Context())
		if !w.disk.Stopped() {
			clean(t, w)
			return
		}
		w.disk.Restart()
		p = w.plugin(t)
		if err := p.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		clean(t, w)
	}
}

// leaveALock is what a killed process leaves of a lock: its file.
func leaveALock(t *testing.T, w *world, claim string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(w.locks, claimLock(types.UID("uid-"+claim)).File), nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestRecoveryRemovesWhatHasNoRecord(t *testing.T) {
	w := newWorld(t)
	w.specs.claims["uid-stray"] = "a spec"
	leaveALock(t, w, "killed")
	if err := w.plugin(t).Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	clean(t, w)
}

func TestSpecsThatSomeoneRemovedComeBack(t *testing.T) {
	for name, mend := range map[string]func(*Preparer, context.Context) error{
		"at the start": (*Preparer).Recover,
		"when noticed": (*Preparer).Mend,
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			mustPrepare(t, w.plugin(t), newClaim("a", allocated("r", gpu0)))
			mustPrepare(t, w.plugin(t), newClaim("b", allocated("r", gpu1)))
			spec := w.specs.of("uid-b")
			w.specs.clear()
			w.snapshot.Ready = false // the driver is not there yet after a restart: which card has which device node is not known
			if err := mend(w.plugin(t), t.Context()); err != nil {
				t.Fatal(err)
			}
			if len(w.specs.claims) != 0 {
				t.Errorf("written without a look at the node: %v", w.specs.claims)
			}
			w.snapshot.Ready = true
			if err := mend(w.plugin(t), t.Context()); err != nil {
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

func TestAnUnreadableRecordHoldsItsGPUUntilItsClaimIsGivenBack(t *testing.T) {
	for name, resolve := range map[string]func(*testing.T, *Preparer){
		"by unprepare": func(t *testing.T, p *Preparer) {
			t.Helper()
			mustUnprepare(t, p, "uid-bad")
		},
		"by prepare, on another GPU": func(t *testing.T, p *Preparer) {
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
			if err := p.Mend(t.Context()); err == nil {
				t.Error("nobody was told")
			}
			_, err := p.Prepare(t.Context(), newClaim("next", allocated("r", gpu0)))
			if CauseOf(err) != CauseHeld || !strings.Contains(err.Error(), "uid-bad") || !strings.Contains(err.Error(), "is unreadable") {
				t.Fatal(err)
			}
			mustPrepare(t, p, newClaim("good", allocated("r", gpu1)))
			resolve(t, p)
			mustPrepare(t, p, newClaim("next", allocated("r", gpu0)))
			if kept := w.disk.Names(filepath.Join(state, "quarantine")); len(kept) != 1 {
				t.Errorf("the quarantine holds %q", kept)
			}
		})
	}
}

// What cannot be looked at keeps nothing else from being put in order.
func TestADaemonThatNobodyHoldsIsEndedThoughTheSpecsCannotBeListed(t *testing.T) {
	w := newWorld(t)
	withMPS(w)
	mustPrepare(t, w.plugin(t), newClaim("bad", fraction("r", share0, "1Gi", "0")))
	if err := w.disk.Remove(recordFile(t, w, "uid-bad")); err != nil {
		t.Fatal(err)
	}
	w.specs.unlisted = errors.New("input/output error")
	if err := w.plugin(t).Reconcile(t.Context()); !errors.Is(err, w.specs.unlisted) {
		t.Errorf("it is not said: %v", err)
	}
	if len(w.daemons.running) != 0 || len(w.holders()) != 0 {
		t.Errorf("left: %v, %q", w.daemons.running, w.holders())
	}
}

// Of a claim that was deleted behind the kubelet's back nobody asks for what it holds, and its record does not tell its name.
func TestAnUnreadableRecordCanBeRemovedByHand(t *testing.T) {
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
	if _, err := p.Prepare(t.Context(), next); CauseOf(err) != CauseHeld || !strings.Contains(err.Error(), file) {
		t.Errorf("the file is not named: %v", err)
	}
	if err := w.disk.Remove(file); err != nil {
		t.Fatal(err)
	}
	w.daemons.ending = 10 * tryWait // what else is done for the claim does not give up on it meanwhile
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(w.daemons.running) != 0 || len(w.holders()) != 0 || w.specs.of("uid-bad") != "" {
		t.Errorf("left: %v, %q, %q", w.daemons.running, w.holders(), w.specs.of("uid-bad"))
	}
	mustPrepare(t, p, next)
}

func TestTheRecordOfALaterVersionIsLeftToIt(t *testing.T) {
	w := newWorld(t)
	c := newClaim("c", allocated("r", gpu0))
	mustPrepare(t, w.plugin(t), c)
	w.disk.Put(recordFile(t, w, "uid-c"), []byte(`{"formatVersion":2}`))
	p := w.plugin(t)
	if err := p.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := p.Unprepare(t.Context(), "uid-c"); CauseOf(err) != CauseRecord || !strings.Contains(err.Error(), "version 2") {
		t.Error(err)
	}
	if _, err := p.Prepare(t.Context(), c); CauseOf(err) != CauseRecord {
		t.Error(err)
	}
	if _, err := p.Prepare(t.Context(), newClaim("next", allocated("r", gpu0))); CauseOf(err) != CauseHeld {
		t.Error(err)
	}
	if len(w.records()) != 1 {
		t.Errorf("records: %q", w.records())
	}
}

func TestAStepOfALaterVersionIsNotLost(t *testing.T) {
	for _, step := range []checkpoint.Step{
		{Kind: "mps-daemon", Params: []byte(`{}`)},
		{Kind: claimSpecKind, Params: []byte(`[]`)},
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
		if err := p.Unprepare(t.Context(), "uid-c"); CauseOf(err) != CauseRecord || !strings.Contains(err.Error(), step.Kind) {
			t.Error(err)
		}
		if err := p.Mend(t.Context()); err == nil {
			t.Error("nobody was told")
		}
		if err := p.Recover(t.Context()); err != nil || len(w.records()) != 1 {
			t.Error(err, w.records())
		}
	}
}

func TestAReadOnlyDiskIsSaidWhereTheUserLooks(t *testing.T) {
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
	clean(t, w)
}

func TestUnreadableStateStopsTheStartWithAnError(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	w.disk.StopAt(1)
	_ = w.disk.Write()
	_, heldErr := p.Held()
	for i, err := range []error{p.Recover(t.Context()), p.Mend(t.Context()), heldErr} {
		if CauseOf(err) != CauseRecord {
			t.Errorf("call %d: %v", i, err)
		}
	}
}

// The spec that the real store writes is one that the CDI library accepts; the fake does not know.
func TestWithTheRealSpecs(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	store := cdi.NewStore(dir)
	p := w.plugin(t)
	p.Specs = store
	p.Verify = func(edits specs.ContainerEdits) error { return w.verify(edits) }
	mustPrepare(t, p, newClaim("c", allocated("a", gpu0), admin("b", gpu0), allocated("c", gpu1)))
	file := filepath.Join(dir, "k8s.gpu.nvidia.com-claim_uid-c.json")
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := p.Mend(t.Context()); err != nil {
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

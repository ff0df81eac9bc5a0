package prepare

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// "Lost" tells a user to delete their Pods: it is said only where trying again cannot help.
func TestAPartitionThatCannotBeMadeAgainIsLostOnlyIfTryingAgainCannotHelp(t *testing.T) {
	for code, lost := range map[nvidia.CutCode]bool{
		nvidia.CodeInUse: false, nvidia.CodeTimeout: false, nvidia.CodeDied: false, nvidia.CodeOther: false,
		nvidia.CodeNotSupported: true, nvidia.CodeReset: true, nvidia.CodeInsufficient: true,
	} {
		t.Run(string(code), func(t *testing.T) {
			w := newWorld(t)
			h := withMIG(w)
			p := w.plugin(t)
			mustPrepare(t, p, several)
			h.of(t, gpu0).reset()
			w.scan()
			h.asked()
			h.fault = func(_ int, after bool) error {
				if !after && strings.HasPrefix(h.calls[len(h.calls)-1], "create GPU instance") {
					return &nvidia.CutError{Op: "a call", Code: code, Message: string(code)}
				}
				return nil
			}
			err := p.Reconcile(t.Context())
			if err == nil || (len(Lost(err)) == 1) != lost || !strings.Contains(err.Error(), small0) {
				t.Errorf("lost: %v; %v", Lost(err), err)
			}
			if spec := w.specs.of("uid-c"); spec != nothing {
				t.Errorf("a container that restarts gets %s", spec)
			}
			h.fault = nil
			if err := p.Reconcile(t.Context()); err != nil {
				t.Error(err)
			}
			w.scan()
			agree(t, w, h, p, nil)
		})
	}
}

func TestAComparisonSaysWhichClaimsItCouldNotLookAt(t *testing.T) {
	for name, c := range map[string]struct {
		change func(t *testing.T, w *world, p *Preparer)
		want   []types.UID
	}{
		"all is as it should be": {func(*testing.T, *world, *Preparer) {}, nil},
		"a call works on it": {func(t *testing.T, _ *world, p *Preparer) {
			t.Helper()
			held, err := p.Locks.Acquire(t.Context(), claimLock("uid-c"))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(held.Release)
		}, []types.UID{"uid-c"}},
		"its record cannot be read":  {func(t *testing.T, w *world, _ *Preparer) { w.disk.Put(recordFile(t, w, "uid-c"), []byte("{")) }, []types.UID{"uid-c"}},
		"the node is not ready":      {func(_ *testing.T, w *world, _ *Preparer) { w.snapshot.Ready = false }, []types.UID{"uid-c"}},
		"the node was started again": {func(_ *testing.T, _ *world, p *Preparer) { p.BootID = "another" }, []types.UID{"uid-c"}},
		"the GPU is not shown":       {func(_ *testing.T, w *world, _ *Preparer) { w.snapshot.Node.GPUs = w.snapshot.Node.GPUs[1:] }, []types.UID{"uid-c"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			p := w.plugin(t)
			mustPrepare(t, p, newClaim("c", allocated("r", gpu0)))
			var got []types.UID
			p.NotLooked = func(uid types.UID) { got = append(got, uid) }
			c.change(t, w, p)
			if err := p.Reconcile(t.Context()); err != nil || !slices.Equal(got, c.want) {
				t.Errorf("%v, not looked at %q", err, got)
			}
		})
	}
}

func TestAComparisonSaysOfWhichClaimsItCannotTell(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	mustPrepare(t, w.plugin(t), newClaim("lost", allocated("r", small0)))
	mustPrepare(t, w.plugin(t), newClaim("well", allocated("r", gpu1)))
	h.of(t, gpu0).reset()
	w.scan()
	h.fault = func(_ int, after bool) error {
		if !after && strings.HasPrefix(h.calls[len(h.calls)-1], "create GPU instance") {
			return &nvidia.CutError{Op: "a call", Code: nvidia.CodeNotSupported, Message: "not supported"}
		}
		return nil
	}
	p := w.plugin(t)
	for _, c := range []struct {
		what           string
		change         func()
		ofLost, ofWell bool
	}{
		{"one has lost its device", func() {}, true, false},
		{"what no record tells cannot be put in order", func() {
			h.fault = nil
			w.specs.unlisted = errors.New("input/output error")
		}, false, false},
		{"the records cannot be listed", func() { w.disk.StopAt(1) }, true, true},
	} {
		c.change()
		err := p.Reconcile(t.Context())
		if err == nil || LeavesOpen(err, "uid-lost") != c.ofLost || LeavesOpen(err, "uid-well") != c.ofWell {
			t.Errorf("%s: %v leaves open the lost one %v, the other %v", c.what, err, LeavesOpen(err, "uid-lost"), LeavesOpen(err, "uid-well"))
		}
	}
}

package prepare_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/claimlock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/reconcile"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// Reconcile must report a device lost only if a retry cannot help, because users then delete the
// claim's Pods.
func TestPartitionIsLostOnlyOnPermanentErrors(t *testing.T) {
	for code, lost := range map[device.FailureCode]bool{
		device.FailureInUse: false, device.FailureTimeout: false, device.FailureDied: false, device.FailureOther: false,
		device.FailureNotSupported: true, device.FailureReset: true, device.FailureInsufficient: true,
	} {
		t.Run(string(code), func(t *testing.T) {
			w := newWorld(t)
			h := withMIG(w)
			p := w.plugin(t)
			mustPrepare(t, p, several)
			h.of(t, gpu0).reset()
			w.scan()
			h.takeCalls()
			h.fault = func(_ int, after bool) error {
				if !after && strings.HasPrefix(h.calls[len(h.calls)-1], "create GPU instance") {
					return &cut.Error{Op: "a call", Code: code, Message: string(code)}
				}
				return nil
			}
			err := p.Reconcile(t.Context())
			if err == nil || (len(reconcile.LostDevices(err)) == 1) != lost || !strings.Contains(err.Error(), small0) {
				t.Errorf("lost: %v; %v", reconcile.LostDevices(err), err)
			}
			if spec := w.specs.of("uid-c"); spec != nothing {
				t.Errorf("a restarted container gets %s", spec)
			}
			h.fault = nil
			if err := p.Reconcile(t.Context()); err != nil {
				t.Error(err)
			}
			w.scan()
			checkRecordsMatchHardware(t, w, h, p, nil)
		})
	}
}

func TestReconcileReportsSkippedClaims(t *testing.T) {
	for name, c := range map[string]struct {
		change func(t *testing.T, w *world, p *plugin)
		want   []types.UID
	}{
		"nothing is wrong": {func(*testing.T, *world, *plugin) {}, nil},
		"a call is in flight": {func(t *testing.T, _ *world, p *plugin) {
			t.Helper()
			held, err := p.Locks.Acquire(t.Context(), claimlock.ClaimName("uid-c"))
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
			w := newWorld(t)
			p := w.plugin(t)
			mustPrepare(t, p, newClaim("c", allocated("r", gpu0)))
			var got []types.UID
			p.OnSkipped = func(uid types.UID) { got = append(got, uid) }
			c.change(t, w, p)
			if err := p.Reconcile(t.Context()); err != nil || !slices.Equal(got, c.want) {
				t.Errorf("%v, skipped %q", err, got)
			}
		})
	}
}

func TestReconcileErrorNamesUndeterminedClaims(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	mustPrepare(t, w.plugin(t), newClaim("lost", allocated("r", small0)))
	mustPrepare(t, w.plugin(t), newClaim("well", allocated("r", gpu1)))
	h.of(t, gpu0).reset()
	w.scan()
	h.fault = func(_ int, after bool) error {
		if !after && strings.HasPrefix(h.calls[len(h.calls)-1], "create GPU instance") {
			return &cut.Error{Op: "a call", Code: device.FailureNotSupported, Message: "not supported"}
		}
		return nil
	}
	p := w.plugin(t)
	for _, c := range []struct {
		what           string
		change         func()
		ofLost, ofWell bool
	}{
		{"one claim lost its device", func() {}, true, false},
		{"garbage collection fails", func() {
			h.fault = nil
			w.specs.unlisted = errors.New("input/output error")
		}, false, false},
		{"the records cannot be listed", func() { w.disk.StopAt(1) }, true, true},
	} {
		c.change()
		err := p.Reconcile(t.Context())
		if err == nil || reconcile.Undetermined(err, "uid-lost") != c.ofLost || reconcile.Undetermined(err, "uid-well") != c.ofWell {
			t.Errorf("%s: %v leaves open the lost one %v, the other %v", c.what, err,
				reconcile.Undetermined(err, "uid-lost"), reconcile.Undetermined(err, "uid-well"))
		}
	}
}

package reconciler_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/reconciler"
)

// node fakes a node with two GPUs that an admin handed over. It collects the Reconciler's calls.
type node struct {
	mu         sync.Mutex
	released   bool // the GPUs are released for a driver upgrade
	newerLeads bool
	calls      []string
}

func (n *node) note(call string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.calls = append(n.calls, call)
}

// taken returns the calls since the last call of taken.
func (n *node) taken() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	calls := n.calls
	n.calls = nil
	return calls
}

func (n *node) set(released, newerLeads bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.released, n.newerLeads = released, newerLeads
}

func (n *node) leads() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.newerLeads }

func (n *node) Use() (done func(), ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return func() {}, !n.released
}

func (n *node) Reconcile(context.Context) error { n.note("reconcile"); return nil }

func (n *node) Adopt(_ context.Context, _ device.GPU, allocated func() (device.Allocations, error)) error {
	_, err := allocated()
	n.note("adopt")
	return err
}

func (n *node) Allocations(context.Context) (device.Allocations, error) {
	n.note("list claims")
	return device.Allocations{}, nil
}

func (n *node) DisableUnusedMIGMode(context.Context, device.GPU) (bool, error) {
	n.note("switch off")
	return true, nil
}

func (n *node) WithdrawSpecs(context.Context, []checkpoint.Record) error { return nil }

func (n *node) PreparedClaims() ([]checkpoint.Record, error) { return nil, nil }

func (n *node) Missing([]types.UID) []string { return nil }

func (n *node) Snapshot() inventory.Snapshot {
	return inventory.Snapshot{Ready: true, Node: nvidia.Node{Common: specs.ContainerEdits{Env: []string{"DRIVER=any"}}}}
}

func (n *node) RequestScan() { n.note("scan") }

func (n *node) HandedOver() []device.GPU {
	return []device.GPU{{PCIAddress: "0000:1b:00.0"}, {PCIAddress: "0000:1c:00.0"}}
}

func (n *node) MIGModeUnneeded() []device.GPU { return n.HandedOver()[:1] }

func (n *node) Report(context.Context) { n.note("report daemons") }

func (n *node) WriteBase(specs.ContainerEdits) error { n.note("write base"); return nil }

func (n *node) Repaired(prepare.Repair) {}

func newReconciler(n *node) *reconciler.Reconciler {
	return reconciler.New(reconciler.Options{
		NewerLeads: n.leads, Claims: n, Specs: n, Use: n.Use, Inventory: n, Layouts: n,
		Allocations: n.Allocations, ReportDaemons: n.Report, Repaired: n.Repaired,
	})
}

var oneRound = []string{"write base", "reconcile", "list claims", "adopt", "adopt", "switch off", "scan", "report daemons"}

func TestReconciliationRunsRegularlyAndWhenWoken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &node{}
		r := newReconciler(n)
		ctx, stop := context.WithCancel(t.Context())
		go r.Run(ctx)
		expect := func(when string, want []string) {
			t.Helper()
			synctest.Wait()
			if got := n.taken(); !slices.Equal(got, want) {
				t.Errorf("%s: %q, want %q", when, got, want)
			}
		}
		expect("at the start", oneRound)
		<-time.After(29 * time.Second)
		expect("before the interval has passed", nil)
		r.Wake()
		expect("woken", oneRound)
		<-time.After(30 * time.Second)
		expect("after the interval", oneRound)
		n.set(false, true)
		r.Wake()
		expect("a newer instance leads", nil)
		n.set(true, false)
		r.Wake()
		expect("the GPUs are released", nil)
		n.set(false, false)
		r.Wake()
		expect("afterwards", oneRound)
		stop()
		synctest.Wait()
	})
}

// A plugin that starts while the GPUs are released must open none of them until the release ends.
func TestWorkDuringReleaseIsPostponed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &node{released: true}
		r := newReconciler(n)
		ctx, stop := context.WithCancel(t.Context())
		go r.Run(ctx)
		synctest.Wait()
		if got := n.taken(); len(got) > 0 {
			t.Errorf("during the release: %q", got)
		}
		n.set(false, false)
		r.Wake()
		synctest.Wait()
		if got := n.taken(); !slices.Equal(got, oneRound) {
			t.Errorf("after the release: %q", got)
		}
		stop()
		synctest.Wait()
	})
}

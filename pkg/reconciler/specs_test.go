package reconciler_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/reconciler"
)

// specifiedNode fakes a node with CDI specs in the directory root. Reconcile writes the specs of
// the claims. The tests run in bubbles of package synctest, where only the clock is fake.
type specifiedNode struct {
	node
	*cdi.Store
	root string

	mu       sync.Mutex // guards the rest
	claims   []checkpoint.Record
	away     types.UID     // the GPU of this claim is away, so its spec cannot be written
	pass     time.Duration // how long Reconcile then works on
	passes   int
	repaired []string
}

func newSpecifiedNode(t *testing.T, claims int) *specifiedNode {
	t.Helper()
	root := filepath.Join(t.TempDir(), "cdi")
	n := &specifiedNode{Store: cdi.NewStore(root), root: root}
	for i := range claims {
		n.claims = append(n.claims, checkpoint.Record{ClaimUID: types.UID(fmt.Sprint("uid-", i)), BootID: "boot"})
	}
	return n
}

func (n *specifiedNode) PreparedClaims() ([]checkpoint.Record, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.claims, nil
}

// change changes the node while the Reconciler waits.
func (n *specifiedNode) change(by func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	by()
}

// seen returns how often Reconcile was called, and what was reported since the last call.
func (n *specifiedNode) seen() (passes int, repaired []string) {
	synctest.Wait()
	n.mu.Lock()
	defer n.mu.Unlock()
	passes, repaired, n.repaired = n.passes, n.repaired, nil
	return passes, repaired
}

func (n *specifiedNode) Reconcile(context.Context) error {
	pass, err := n.reconcile()
	<-time.After(pass)
	return err
}

func (n *specifiedNode) reconcile() (pass time.Duration, _ error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.passes++
	var errs []error
	for _, c := range n.claims {
		if c.ClaimUID != n.away && c.BootID == "boot" {
			errs = append(errs, n.WriteClaim(c.ClaimUID, []specs.Device{{
				Name:           cdi.ClaimDeviceName(c.ClaimUID, "gpu", nil),
				ContainerEdits: specs.ContainerEdits{Env: []string{"A=b"}},
			}}))
		}
	}
	return n.pass, errors.Join(errs...)
}

// WriteBase and Missing are those of the Store, and not of the fake node.
func (n *specifiedNode) WriteBase(common specs.ContainerEdits) error {
	return n.Store.WriteBase(common)
}

func (n *specifiedNode) Missing(claims []types.UID) []string { return n.Store.Missing(claims) }

// start runs a Reconciler until the test ends, and waits for its first comparison.
func (n *specifiedNode) start(t *testing.T) {
	t.Helper()
	r := reconciler.New(reconciler.Options{
		BootID: "boot", NewerLeads: n.leads, Claims: n, Specs: n, Use: n.Use, Inventory: n, Layouts: n,
		Allocations: n.Allocations, ReportDaemons: n.Report, Repaired: func(r prepare.Repair) {
			n.change(func() { n.repaired = append(n.repaired, r.Object) })
		},
	})
	ended := make(chan struct{})
	ctx, stop := context.WithCancel(t.Context())
	go func() { r.Run(ctx); close(ended) }()
	t.Cleanup(func() { stop(); <-ended })
	synctest.Wait()
}

// content returns the names and the content of all specs.
func (n *specifiedNode) content() (all string) {
	files, _ := filepath.Glob(filepath.Join(n.root, "*.json"))
	for _, f := range files {
		data, _ := os.ReadFile(f)
		all += filepath.Base(f) + string(data)
	}
	return all
}

const (
	base  = "k8s.gpu.nvidia.com-base.json"
	claim = "k8s.gpu.nvidia.com-claim_uid-0.json"
)

func TestDamagedSpecsAreRepairedInTime(t *testing.T) {
	alter := func(name string) func(root string) error {
		return func(root string) error { return os.WriteFile(filepath.Join(root, name), []byte("{}"), 0o600) }
	}
	remove := func(name string) func(root string) error {
		return func(root string) error { return os.Remove(filepath.Join(root, name)) }
	}
	for name, c := range map[string]struct {
		damage func(root string) error
		within time.Duration
		report string
	}{
		"base removed":      {remove(base), 2 * time.Second, base},
		"claim removed":     {remove(claim), 2 * time.Second, claim},
		"directory removed": {os.RemoveAll, 2 * time.Second, base + ", " + claim},
		"base altered":      {alter(base), 30 * time.Second, ""},
		"claim altered":     {alter(claim), 30 * time.Second, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newSpecifiedNode(t, 1)
				n.start(t)
				before := n.content()
				n.seen()
				for range 3 { // also after a repair
					if err := c.damage(n.root); err != nil {
						t.Fatal(err)
					}
					<-time.After(c.within)
					_, repaired := n.seen()
					if now := n.content(); now != before {
						t.Errorf("the specs are %s\nwant %s", now, before)
					}
					if reported := strings.Join(repaired, "; "); reported != c.report {
						t.Errorf("reported %q, want %q", reported, c.report)
					}
				}
			})
		})
	}
}

func TestIntactSpecsAreNotReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newSpecifiedNode(t, 0)
		n.start(t) // writes the first base spec
		n.change(func() { n.claims = []checkpoint.Record{{ClaimUID: "uid-rebooted", BootID: "earlier"}} })
		<-time.After(time.Hour)
		if passes, repaired := n.seen(); len(repaired) > 0 || passes != 121 {
			t.Errorf("reported %q in %d comparisons", repaired, passes)
		}
	})
}

// A claim whose GPU is away has no spec for long. The test expects that this causes no comparisons
// but those that run anyway, and hides no other claim's lost spec.
func TestUnrepairableSpecCausesNoComparisons(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newSpecifiedNode(t, 2)
		n.away = "uid-1"
		n.start(t)
		<-time.After(time.Hour)
		if passes, _ := n.seen(); passes != 121 {
			t.Errorf("%d comparisons in an hour", passes)
		}
		if err := os.Remove(filepath.Join(n.root, claim)); err != nil {
			t.Fatal(err)
		}
		<-time.After(2 * time.Second)
		if passes, repaired := n.seen(); passes != 122 || !slices.Equal(repaired, []string{claim}) {
			t.Errorf("%d comparisons, reported %q", passes, repaired)
		}
	})
}

// A comparison takes long while a GPU hangs. The test expects that a spec that is removed meanwhile
// is repaired soon after it.
func TestSpecRemovedDuringComparisonIsRepairedAfterIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newSpecifiedNode(t, 1)
		n.start(t)
		const pass = 20 * time.Second
		n.change(func() { n.pass = pass })
		<-time.After(31 * time.Second) // a second into the next comparison
		if err := os.Remove(filepath.Join(n.root, claim)); err != nil {
			t.Fatal(err)
		}
		<-time.After(pass + time.Second)
		synctest.Wait()
		if !strings.Contains(n.content(), claim) {
			t.Error("the spec is still missing")
		}
	})
}

func TestManyRepairedSpecsAreOneReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newSpecifiedNode(t, 64)
		n.start(t)
		n.seen()
		if err := os.RemoveAll(n.root); err != nil {
			t.Fatal(err)
		}
		<-time.After(2 * time.Second)
		if _, repaired := n.seen(); len(repaired) != 1 || !strings.HasSuffix(repaired[0], " and 60 more") {
			t.Errorf("reported %q", repaired)
		}
	})
}

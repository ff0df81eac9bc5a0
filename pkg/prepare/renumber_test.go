// The NVIDIA driver numbers the device nodes of a card when it takes the card. The numbers in CDI
// specs must not outlive that.

package prepare_test

import (
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

const address1 device.PCIAddress = "0000:1c:00.0"

func withdraw(t *testing.T, p *plugin) error {
	t.Helper()
	claims, err := p.PreparedClaims()
	if err != nil {
		return err
	}
	return p.WithdrawSpecs(t.Context(), claims)
}

// passes does what the plugin does every few seconds.
func passes(t *testing.T, p *plugin) {
	t.Helper()
	if err := withdraw(t, p); err != nil {
		t.Fatal(err)
	}
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// loseFirst lets the first GPU fall off the bus, and the driver load again. The second GPU then has
// the number of the first. The inventory has not noticed it yet.
func loseFirst(w *world) {
	w.bindings = map[device.PCIAddress]string{address1: "2"}
	if w.hardware != nil {
		w.hardware.cards[address1].Minor = 0
	}
}

// scanAfterLoss is the scan after loseFirst.
func scanAfterLoss(w *world) {
	g := newGPU(address1, "GPU-1", "/dev/nvidia0")
	g.Binding = "2"
	w.snapshot.Node.GPUs = []nvidia.GPU{g}
	if w.hardware != nil {
		w.scan()
	}
}

func newBoundWorld(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	w.bindings = map[device.PCIAddress]string{}
	for i := range w.snapshot.Node.GPUs {
		g := &w.snapshot.Node.GPUs[i]
		g.Binding, w.bindings[g.PCIAddress] = "1", "1"
	}
	return w
}

func TestSpecsAreWithdrawnWhenTheDriverIsLoadedAgain(t *testing.T) {
	for name, ready := range map[string]bool{"before the inventory notices": true, "while the driver is away": false} {
		t.Run(name, func(t *testing.T) {
			w := newBoundWorld(t)
			p := w.plugin(t)
			mustPrepare(t, p, newClaim("a", allocated("r", gpu0)))
			mustPrepare(t, p, newClaim("b", allocated("r", gpu1)))
			passes(t, p)
			if !strings.Contains(w.specs.of("uid-a"), "/dev/nvidia0") || !strings.Contains(w.specs.of("uid-b"), "/dev/nvidia1") {
				t.Fatalf("before: %v", w.specs.claims)
			}
			loseFirst(w)
			w.snapshot.Ready = ready
			passes(t, p)
			if len(w.specs.claims) > 0 {
				t.Errorf("before the scan: %v", w.specs.claims)
			}
			w.snapshot.Ready = true
			scanAfterLoss(w)
			for range 2 {
				passes(t, p)
				if spec := w.specs.of("uid-b"); !strings.Contains(spec, "/dev/nvidia0") || strings.Contains(spec, "/dev/nvidia1") {
					t.Errorf("the GPU that is left: %s", spec)
				}
				if spec := w.specs.of("uid-a"); spec != "" {
					t.Errorf("the lost GPU: %s", spec)
				}
			}
		})
	}
}

func TestSpecOfLostPartitionIsWithdrawn(t *testing.T) {
	w := newBoundWorld(t)
	withMIG(w)
	w.scan()
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("a", allocated("r", gpu0+"-mig-19-0")))
	mustPrepare(t, p, newClaim("b", allocated("r", gpu1)))
	loseFirst(w)
	scanAfterLoss(w)
	passes(t, p)
	if spec := w.specs.of("uid-a"); spec != "" {
		t.Errorf("the lost partition: %s", spec)
	}
	if spec := w.specs.of("uid-b"); !strings.Contains(spec, "/dev/nvidia0") {
		t.Errorf("the GPU that is left: %s", spec)
	}
}

func TestPrepareRefusesNumbersOfAnEarlierLoad(t *testing.T) {
	w := newBoundWorld(t)
	p := w.plugin(t)
	old := newClaim("b", allocated("r", gpu1))
	mustPrepare(t, p, old)
	loseFirst(w)
	for _, c := range []struct {
		name    string
		request result
	}{{"a", allocated("r", gpu0)}, {"b", allocated("r", gpu1)}, {"monitor", admin("r", gpu1)}} {
		if _, err := p.Prepare(t.Context(), newClaim(c.name, c.request)); cause.Of(err) != cause.NotReady ||
			!strings.Contains(err.Error(), "the inventory notices within seconds") {
			t.Errorf("claim %s: %v", c.name, err)
		}
	}
	scanAfterLoss(w)
	mustPrepare(t, p, old)
	if spec := w.specs.of("uid-b"); !strings.Contains(spec, "/dev/nvidia0") {
		t.Errorf("after the scan: %s", spec)
	}
}

// A GPU that hangs, or whose scan fails, is still bound. Its claims' containers may restart.
func TestGPUThatIsStillBoundKeepsItsSpec(t *testing.T) {
	w := newBoundWorld(t)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("a", allocated("r", gpu0)))
	spec := w.specs.of("uid-a")
	w.snapshot.Node.GPUs = w.snapshot.Node.GPUs[1:]
	for _, ready := range []bool{true, false} {
		w.snapshot.Ready = ready
		passes(t, p)
		if w.specs.of("uid-a") != spec {
			t.Errorf("ready %v: the spec is %q", ready, w.specs.of("uid-a"))
		}
	}
}

// A driver load gives capability device nodes another number, too. The old number in a claim with
// admin access could be that of another driver's device.
func TestSpecWithNumbersOfMonitoringIsWithdrawn(t *testing.T) {
	w := newBoundWorld(t)
	p := w.plugin(t)
	p.OnMonitor = func() specs.ContainerEdits {
		return specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/monitor", Type: "c", Major: 511, Minor: 2}}}
	}
	mustPrepare(t, p, newClaim("a", admin("r", gpu1)))
	if spec := w.specs.of("uid-a"); !strings.Contains(spec, "511") {
		t.Fatal(spec)
	}
	loseFirst(w)
	w.snapshot.Node.GPUs = nil
	passes(t, p)
	if spec := w.specs.of("uid-a"); spec != "" {
		t.Errorf("the spec is %s", spec)
	}
}

// Another instance of the plugin may work on the claim.
func TestWithdrawalLeavesABusyClaimAlone(t *testing.T) {
	w := newBoundWorld(t)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("a", allocated("r", gpu0)))
	busy, err := p.Locks.Acquire(t.Context(), "uid-a")
	if err != nil {
		t.Fatal(err)
	}
	loseFirst(w)
	if err := withdraw(t, p); err != nil || w.specs.of("uid-a") == "" {
		t.Errorf("busy: %v, %q", err, w.specs.of("uid-a"))
	}
	busy.Release()
	if err := withdraw(t, p); err != nil || w.specs.of("uid-a") != "" {
		t.Errorf("not busy: %v, %q", err, w.specs.of("uid-a"))
	}
}

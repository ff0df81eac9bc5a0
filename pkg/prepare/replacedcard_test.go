// After a reboot another card may be at a GPU's PCI address, as when a cloud starts a virtual
// machine on another host.

package prepare_test

import (
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

// newWorldOfModel returns a fake node whose GPUs report their model.
func newWorldOfModel(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	withMPS(w)
	for i := range w.snapshot.Node.GPUs {
		g := &w.snapshot.Node.GPUs[i]
		g.ProductName, g.MemoryBytes = "NVIDIA H100 80GB HBM3", 80*gib
	}
	return w
}

// replaceCard puts another card at the first GPU's PCI address. It is of the same model unless
// change makes it another.
func (w *world) replaceCard(change func(*nvidia.GPU)) {
	w.snapshot.Node.GPUs = slices.Clone(w.snapshot.Node.GPUs)
	g := &w.snapshot.Node.GPUs[0]
	g.UUID = "GPU-new"
	w.hardware.cards[g.PCIAddress].UUID = g.UUID
	if change != nil {
		change(g)
	}
}

var replacedClaims = map[string][]*resourceapi.ResourceClaim{
	"whole GPU":                  {newClaim("c", allocated("r", gpu0))},
	"whole GPUs":                 {newClaim("c", allocated("a", gpu0), allocated("b", gpu1))},
	"admin access":               {newClaim("c", admin("r", gpu0))},
	"partitions":                 {several},
	"time slices":                {sliced},
	"shares with time slices":    {long1, long2},
	"MPS":                        {grouped},
	"MPS of partitions":          {parted},
	"fractions":                  {part1, part2},
	"fractions of a partition":   {migPart1, migPart2},
	"plain shares of partitions": {newClaim("c", plain("r", migShare0)), newClaim("d", plain("r", migShare0))},
}

func TestCardOfSameModelIsPreparedAnewAfterReboot(t *testing.T) {
	for name, claims := range replacedClaims {
		t.Run(name, func(t *testing.T) {
			w := newWorldOfModel(t)
			h := w.hardware
			for _, c := range claims {
				mustPrepare(t, w.plugin(t), c)
			}
			w.reboot()
			w.replaceCard(nil)
			p := w.plugin(t)
			if err := p.Reconcile(t.Context()); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				for _, c := range claims {
					mustPrepare(t, p, c)
				}
				w.scan()
				if err := p.Reconcile(t.Context()); err != nil {
					t.Error(err)
				}
			}
			for _, c := range claims {
				r, _, err := p.Records.Load(c.UID)
				if err != nil || r.BootID != w.bootID {
					t.Errorf("%+v, %v", r, err)
				}
				for _, d := range r.Devices {
					if want := map[string]string{gpu0: "GPU-new", gpu1: "GPU-1"}[d.GPU]; d.GPUUUID != want {
						t.Errorf("the record has GPU %s, want %s", d.GPUUUID, want)
					}
				}
				if w.specs.of(c.UID) == "" {
					t.Errorf("%s has no spec", c.Name)
				}
			}
			for _, d := range w.daemons.running {
				if slices.Contains(d.Devices, "GPU-0") {
					t.Errorf("a daemon serves the card that is gone: %+v", d)
				}
			}
			for _, c := range claims {
				mustUnprepare(t, p, c.UID)
			}
			checkClean(t, w)
			g := h.of(t, gpu0)
			if left := w.holders(); len(left) != 0 || len(w.daemons.running) != 0 || len(g.Instances) != 0 ||
				g.ComputeMode != device.ComputeDefault || g.TimeSlice != device.TimeSliceDefault {
				t.Errorf("left: %q, %v, %+v", left, w.daemons.running, g)
			}
		})
	}
}

// An instance that an admin created is not this driver's to create again, on whatever card.
func TestForeignPartitionOfReplacedCardIsUsedOnceItExists(t *testing.T) {
	w := newWorldOfModel(t)
	w.hardware.createForeign(t, gpu0, 19, 0)
	w.scan()
	c := newClaim("c", allocated("r", small0))
	mustPrepare(t, w.plugin(t), c)
	w.reboot()
	w.replaceCard(nil)
	p := w.plugin(t)
	if _, err := p.Prepare(t.Context(), c); cause.Of(err) != cause.NotReady || !strings.Contains(err.Error(), "create it again") {
		t.Error(err)
	}
	theirs := w.hardware.createForeign(t, gpu0, 19, 0)
	w.scan()
	mustPrepare(t, p, c)
	if r, _, err := p.Records.Load(c.UID); err != nil || r.Devices[0].MIGUUID != theirs.Compute[0].UUID || r.Devices[0].GPUUUID != "GPU-new" {
		t.Errorf("%+v, %v", r, err)
	}
	mustUnprepare(t, p, c.UID)
	if len(w.hardware.of(t, gpu0).Instances) != 1 {
		t.Error("the admin's instance was removed")
	}
}

func TestPassthroughOfReplacedCardIsBoundAnew(t *testing.T) {
	w := newWorld(t)
	w.snapshot.Node.GPUs[0].ProductName = "NVIDIA H100 80GB HBM3"
	bus := withBus(w)
	c := newClaim("c", allocated("r", vfio0))
	mustPrepare(t, w.plugin(t), c)
	w.reboot()
	for _, f := range bus.Functions {
		f.Driver, f.Override = f.Native, ""
	}
	w.snapshot.Node.GPUs[0].UUID = "GPU-new"
	p := w.plugin(t)
	mustPrepare(t, p, c)
	if r, _, err := p.Records.Load(c.UID); err != nil || r.Devices[0].GPUUUID != "GPU-new" || !slices.Equal(drivers(bus), away) {
		t.Errorf("%+v, bound to %q, %v", r, drivers(bus), err)
	}
	mustUnprepare(t, p, c.UID)
	checkClean(t, w)
}

func TestReplacedCardIsRefused(t *testing.T) {
	reboot := (*world).reboot
	for name, c := range map[string]struct {
		before func(*world)
		reboot func(*world)
		change func(*nvidia.GPU)
	}{
		"in the same boot": {nil, func(*world) {}, nil},
		"another product":  {nil, reboot, func(g *nvidia.GPU) { g.ProductName = "NVIDIA H200" }},
		"other memory":     {nil, reboot, func(g *nvidia.GPU) { g.MemoryBytes += gib }},
		"no MIG":           {nil, reboot, func(g *nvidia.GPU) { g.MIG = nil }},
		"other profiles": {nil, reboot, func(g *nvidia.GPU) {
			mig := *g.MIG
			mig.Profiles = slices.Clone(mig.Profiles)
			mig.Profiles[0].Slices++
			g.MIG = &mig
		}},
		"a record without the model": {func(w *world) { w.snapshot.Node.GPUs[0].ProductName = "" }, reboot, nil},
		"a record without the model, and the card tells it": {func(w *world) { w.snapshot.Node.GPUs[0].ProductName = "" }, reboot,
			func(g *nvidia.GPU) { g.ProductName = "NVIDIA H100 80GB HBM3" }},
	} {
		for kind, claims := range replacedClaims {
			t.Run(name+"/"+kind, func(t *testing.T) {
				w := newWorldOfModel(t)
				if c.before != nil {
					c.before(w)
				}
				for _, claim := range claims {
					mustPrepare(t, w.plugin(t), claim)
				}
				c.reboot(w)
				w.replaceCard(c.change)
				p := w.plugin(t)
				for _, claim := range claims {
					_, err := p.Prepare(t.Context(), claim)
					if cause.Of(err) != cause.Device {
						t.Fatalf("%s: %v", claim.Name, err)
					}
					for _, want := range []string{"GPU-0", "GPU-new", "delete the claim's Pods"} {
						if !strings.Contains(err.Error(), want) {
							t.Errorf("%q does not say %q", err, want)
						}
					}
				}
				w.daemons.apart = true
				for _, claim := range claims {
					mustUnprepare(t, p, claim.UID)
				}
				checkClean(t, w)
			})
		}
	}
}

// The card stays the same at the first reboot. Then the claim is prepared in this boot.
func TestCardReplacedAfterRePrepareIsRefused(t *testing.T) {
	w := newWorldOfModel(t)
	c := newClaim("c", allocated("r", gpu0))
	mustPrepare(t, w.plugin(t), c)
	w.reboot()
	mustPrepare(t, w.plugin(t), c)
	w.replaceCard(nil)
	if _, err := w.plugin(t).Prepare(t.Context(), c); cause.Of(err) != cause.Device || !strings.Contains(err.Error(), "was replaced") {
		t.Error(err)
	}
	w.reboot()
	mustPrepare(t, w.plugin(t), c)
}

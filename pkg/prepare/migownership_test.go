// The driver owns a MIG instance only if a record of this boot proves it, and never changes a
// foreign one.

package prepare_test

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/reconcile"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

func TestInstanceOwnershipProof(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, several)
	ours := h.of(t, gpu0).State().MIG.Instances[0]
	for name, change := range map[string]func(*device.Instance){
		"another ID":      func(in *device.Instance) { in.ID = 7 },
		"another place":   func(in *device.Instance) { in.Placement.Start = 1 },
		"another profile": func(in *device.Instance) { in.ProfileID = 20 },
		"another UUID":    func(in *device.Instance) { in.Compute[0].UUID = "MIG-another" },
	} {
		other := ours
		other.Compute = slices.Clone(ours.Compute)
		change(&other)
		if got, err := p.OwnedInstances(gpu0, []device.Instance{ours, other}); err != nil || len(got) != 1 {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	emptied := ours
	emptied.Compute = nil
	if got, err := p.OwnedInstances(gpu0, []device.Instance{emptied}); err != nil || len(got) != 1 {
		t.Errorf("half removed: %v, %v", got, err)
	}
}

func TestForeignInstanceIsUsedAndStays(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	theirs := h.createForeign(t, gpu0, 19, 0)
	w.scan()
	p := w.plugin(t)
	h.takeCalls()
	mustPrepare(t, p, newClaim("c", allocated("r", small0)))
	mustPrepare(t, p, newClaim("c", allocated("r", small0)))
	if r, _, err := p.Records.Load("uid-c"); err != nil || r.Devices[0].MIGUUID != theirs.Compute[0].UUID || len(r.Steps) != 1 {
		t.Errorf("%+v, %v", r, err)
	}
	if ours, err := p.OwnedInstances(gpu0, []device.Instance{theirs}); err != nil || len(ours) != 0 {
		t.Errorf("foreign instances taken for ours: %+v, %v", ours, err)
	}
	if err := adopt(t, w, p); err != nil {
		t.Error(err)
	}
	mustUnprepare(t, p, "uid-c")
	checkClean(t, w)
	if len(h.of(t, gpu0).Instances) != 1 {
		t.Fatal("the foreign instance was removed")
	}
	for _, call := range h.takeCalls() {
		if call != "query" {
			t.Errorf("hardware call %q", call)
		}
	}
	if err := adopt(t, w, p); err != nil || len(h.of(t, gpu0).Instances) != 0 {
		t.Errorf("after adoption: %v, %+v", err, h.of(t, gpu0).Instances)
	}
}

func TestForeignComputeInstanceIsUsed(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	h.createForeign(t, gpu0, 9, 4)
	in := h.of(t, gpu0).Instances[1]
	in.Compute = []device.ComputeInstance{{ID: 0, Name: "1c.3g.40gb", UUID: "MIG-a", Minor: 41},
		{ID: 1, Name: "2c.3g.40gb", UUID: "MIG-b", Minor: 42}}
	h.of(t, gpu0).Instances[1] = in
	w.scan()
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", allocated("r", large4+"-ci-1")))
	if spec := w.specs.of("uid-c"); !strings.Contains(spec, "nvidia-cap42") || strings.Contains(spec, "nvidia-cap41") {
		t.Errorf("the spec is %s", spec)
	}
	mustPrepare(t, p, newClaim("d", allocated("r", large4+"-ci-0")))
	if _, err := p.Prepare(t.Context(), newClaim("e", allocated("r", large4))); cause.Of(err) != cause.Held {
		t.Error(err)
	}
	mustUnprepare(t, p, "uid-c")
	mustUnprepare(t, p, "uid-d")
	if _, err := p.Prepare(t.Context(), newClaim("e", allocated("r", large4))); cause.Of(err) != cause.Device ||
		!strings.Contains(err.Error(), "MIG-b") {
		t.Error(err)
	}
}

// After a reboot an admin's tool creates MIG instances with the IDs that the driver's instances had
// before. The driver must not treat these as its own.
func TestInstancesAfterRebootAreForeign(t *testing.T) {
	for _, unfinished := range []bool{false, true} {
		w := newWorld(t)
		h := withMIG(w)
		if unfinished {
			killAfter.arm(w, 4)
			_, _ = w.plugin(t).Prepare(t.Context(), newClaim("c", allocated("a", small0)))
			h.fault = nil
		} else {
			mustPrepare(t, w.plugin(t), newClaim("c", allocated("a", small0)))
		}
		w.reboot()
		h.serial = 0
		theirs := h.createForeign(t, gpu0, 19, 0)
		p := w.plugin(t)
		if err := p.Reconcile(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.scan()
		if ours, err := p.OwnedInstances(gpu0, []device.Instance{theirs}); err != nil || len(ours) != 0 {
			t.Errorf("foreign instances taken for ours: %v, %v", ours, err)
		}
		if err := p.Reconcile(t.Context()); err != nil {
			t.Error(err)
		}
		mustPrepare(t, p, newClaim("c", allocated("a", small0)))
		mustUnprepare(t, p, "uid-c")
		if len(h.of(t, gpu0).Instances) != 1 {
			t.Error("the foreign instance was removed")
		}
	}
}

// After a reboot an admin's tool may create its MIG instances only after the Pods start. Until then
// Prepare must return an error that the kubelet retries.
func TestPrepareWaitsForForeignInstanceAfterReboot(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	h.createForeign(t, gpu0, 19, 0)
	w.scan()
	c := newClaim("c", allocated("a", small0), allocated("b", neighbor))
	mustPrepare(t, w.plugin(t), c)
	w.reboot()
	p := w.plugin(t)
	for range 2 {
		if _, err := p.Prepare(t.Context(), c); cause.Of(err) != cause.NotReady || !strings.Contains(err.Error(), small0) ||
			!strings.Contains(err.Error(), "create it again") {
			t.Fatal(err)
		}
	}
	if n := len(h.of(t, gpu0).Instances); n != 0 {
		t.Errorf("%d instances", n)
	}
	theirs := h.createForeign(t, gpu0, 19, 0)
	w.scan()
	mustPrepare(t, p, c)
	if ours, err := p.OwnedInstances(gpu0, []device.Instance{theirs}); err != nil || len(ours) != 0 {
		t.Errorf("foreign instances taken for ours: %v, %v", ours, err)
	}
	mustUnprepare(t, p, "uid-c")
	if len(h.of(t, gpu0).Instances) != 1 || len(h.of(t, gpu1).Instances) != 0 {
		t.Error("the foreign instance is gone, or ours is left")
	}
}

// The plugin is killed before it creates its MIG instance, and then an admin creates one at the
// same placement. Reconcile must not remove the admin's instance.
func TestForeignInstanceAtUnfinishedPlaceStays(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	killBefore.arm(w, 3)
	_, _ = w.plugin(t).Prepare(t.Context(), newClaim("c", allocated("a", small0)))
	killBefore.end(w)
	theirs := h.createForeign(t, gpu0, 19, 0)
	w.scan()
	p := w.plugin(t)
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	checkClean(t, w)
	if in := h.of(t, gpu0).State().MIG.Instances; len(in) != 1 || !steps.SameInstance(in[0], theirs) {
		t.Errorf("want %s, got %s", steps.DescribeInstances(theirs), steps.DescribeInstances(in...))
	}
}

// While Prepare runs, after its read of the GPU, an admin creates an instance at the same
// placement. The driver must not treat it as its own.
func TestPlaceTakenDuringPrepareStaysForeign(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	h.of(t, gpu0).Enabled = true
	w.scan()
	p := w.plugin(t)
	h.fault = func(call int, after bool) error {
		if s := h.of(t, gpu0); call == 1 && after {
			s.Instances[1] = device.Instance{ID: 1, ProfileID: 19, Placement: device.Placement{Start: 0, Size: 1}}
		}
		return nil
	}
	_, err := p.Prepare(t.Context(), newClaim("c", allocated("r", small0)))
	if cause.Of(err) != cause.Device || !strings.Contains(err.Error(), "GPU instance 1") {
		t.Error(err)
	}
	checkClean(t, w)
	if len(h.of(t, gpu0).Instances) != 1 {
		t.Error("the foreign instance was removed")
	}
}

func TestReplacedInstanceIsNeverGivenToAClaim(t *testing.T) {
	for name, call := range map[string]func(*testing.T, *plugin) error{
		"prepare":   func(t *testing.T, p *plugin) error { _, err := p.Prepare(t.Context(), several); return err },
		"reconcile": func(t *testing.T, p *plugin) error { return p.Reconcile(t.Context()) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			h := withMIG(w)
			p := w.plugin(t)
			mustPrepare(t, p, several)
			h.of(t, gpu0).RemoveInstances()
			theirs := h.createForeign(t, gpu0, 19, 0)
			w.scan()
			h.takeCalls()
			err := call(t, p)
			if calls := h.takeCalls(); slices.ContainsFunc(calls, func(c string) bool { return strings.HasPrefix(c, "create") }) {
				t.Errorf("impossible hardware calls: %q", calls)
			}
			lost := reconcile.LostDevices(err)
			if len(lost) != 1 || lost[0].Device != small0 || lost[0].Claim != "default/c" || !strings.Contains(err.Error(), theirs.Compute[0].UUID) {
				t.Errorf("%v", err)
			}
			if spec := w.specs.of("uid-c"); spec != "" {
				t.Errorf("a restarted container gets %s", spec)
			}
			if err := p.Reconcile(t.Context()); err == nil || w.specs.of("uid-c") != "" {
				t.Errorf("the spec was restored: %v", err)
			}
			mustUnprepare(t, p, "uid-c")
			checkClean(t, w)
			if in := h.of(t, gpu0).Instances; len(in) != 1 || in[theirs.ID].Compute[0].UUID != theirs.Compute[0].UUID {
				t.Errorf("a foreign instance was changed: %+v", in)
			}
			if in := h.of(t, gpu1).Instances; len(in) != 0 {
				t.Errorf("left: %+v", in)
			}
		})
	}
}

// A MIG UUID is computed from the card and the instances' IDs, which the GPU reuses. So a MIG
// device with the same UUID but another profile or placement must count as another device.
func TestSameUUIDWithOtherProfileIsAnotherDevice(t *testing.T) {
	for name, now := range map[string]struct {
		profile uint32
		at      device.Placement
	}{
		"another profile": {14, device.Placement{Start: 4, Size: 2}},
		"another place":   {9, device.Placement{Start: 0, Size: 4}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			h := withMIG(w)
			theirs := h.createForeign(t, gpu0, 9, 4)
			w.scan()
			p := w.plugin(t)
			c := newClaim("c", allocated("r", large4))
			mustPrepare(t, p, c)
			theirs.ProfileID, theirs.Placement = now.profile, now.at
			h.of(t, gpu0).Instances[theirs.ID] = theirs
			w.scan()
			if given, err := p.PreparedDevices("uid-c"); err != nil || given[0].Instance != nil {
				t.Errorf("the claim's devices are %+v: %v", given, err)
			}
			if lost := reconcile.LostDevices(p.Reconcile(t.Context())); len(lost) != 1 {
				t.Errorf("%+v", lost)
			}
			_, err := p.Prepare(t.Context(), c)
			if lost := reconcile.LostDevices(err); len(lost) != 1 || lost[0].Device != large4 || w.specs.of("uid-c") != nothing {
				t.Errorf("%v; containers are given %s", err, w.specs.of("uid-c"))
			}
		})
	}
}

func TestInstanceWithoutRecordIsForeign(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", allocated("r", small0)))
	in := h.of(t, gpu0).State().MIG.Instances
	w.disk.Put(recordFile(t, w, "uid-c"), []byte("{"))
	w.scan()
	reconcileUnreadable(t, p)
	if ours, err := p.OwnedInstances(gpu0, in); err != nil || len(ours) != 1 {
		t.Errorf("the instance of a prepared claim is foreign: %v, %v", ours, err)
	}
	if _, err := p.Prepare(t.Context(), newClaim("next", allocated("r", gpu0))); cause.Of(err) != cause.Held {
		t.Error(err)
	}
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	if err := p.Unprepare(klog.NewContext(t.Context(), logger), "uid-c"); err != nil {
		t.Fatal(err)
	}
	said := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	for _, want := range []string{"Kept the MIG instances", small0, "-dgi", "adopt"} {
		if !strings.Contains(said, want) {
			t.Errorf("the log does not name %q: %s", want, said)
		}
	}
	all, theirs, err := p.ForeignInstances(t.Context(), h.card(t, gpu0), gpu0)
	if err != nil || len(all) != 1 || len(theirs) != 1 {
		t.Errorf("%v, %v, %v", all, theirs, err)
	}
	if kept := w.disk.Names(filepath.Join(state, "quarantine")); len(kept) != 1 {
		t.Errorf("the quarantine has %q", kept)
	}
}

// If a record is unreadable and its file name does not list the devices, the driver must treat
// every MIG instance as that claim's.
func TestUnreadableRecordWithoutDevicesOwnsAll(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepareLarge(t, w, p)
	w.disk.Put(recordFile(t, w, "uid-large"), []byte("{"))
	all, theirs, err := p.ForeignInstances(t.Context(), h.card(t, gpu0), gpu0)
	if err != nil || len(all) != 6 || len(theirs) != 0 {
		t.Errorf("%d instances, called an admin's: %s: %v", len(all), steps.DescribeInstances(theirs...), err)
	}
	if ours, err := p.OwnedInstances(gpu0, all); err != nil || len(ours) != 6 {
		t.Errorf("owned: %s: %v", steps.DescribeInstances(ours...), err)
	}
	if err := adopt(t, w, p); err != nil || len(h.of(t, gpu0).Instances) != 6 {
		t.Errorf("a claim's instances were removed, there are %d: %v", len(h.of(t, gpu0).Instances), err)
	}
}

// withComputeInstances returns a world in which an admin partitioned the first GPU: an instance
// with two compute instances, and an idle one.
func withComputeInstances(t *testing.T) (*world, *hardware) {
	t.Helper()
	w := newWorld(t)
	h := withMIG(w)
	createComputeInstances(t, w, h, "MIG-a", "MIG-b")
	return w, h
}

// adopt calls Adopt for the first GPU while these devices are allocated to claims.
func adopt(t *testing.T, w *world, p *plugin, devices ...string) error {
	t.Helper()
	w.scan()
	return p.Adopt(t.Context(), w.gpuOf(t, gpu0), func() (device.Allocations, error) {
		exclusive := map[string]string{}
		for _, d := range devices {
			exclusive[d] = "default/another"
		}
		return device.Allocations{Exclusive: exclusive}, nil
	})
}

func createComputeInstances(t *testing.T, w *world, h *hardware, first, second string) {
	t.Helper()
	in := h.createForeign(t, gpu0, 9, 4)
	in.Compute = []device.ComputeInstance{{ID: 0, Name: "1c.3g.40gb", UUID: first, Minor: 41},
		{ID: 1, Name: "2c.3g.40gb", UUID: second, Minor: 42}}
	h.of(t, gpu0).Instances[in.ID] = in
	h.createForeign(t, gpu0, 19, 0)
	w.scan()
}

// The policy adopt removes idle instances only. A claim may have a compute instance though its
// record does not say so now, and the driver cannot create a compute instance again.
func TestAdoptKeepsInstanceOfComputeInstanceThatAClaimMayHave(t *testing.T) {
	const part = large4 + "-ci-1"
	damage := func(t *testing.T, w *world) { t.Helper(); w.disk.Put(recordFile(t, w, "uid-c"), []byte("{")) }
	for name, c := range map[string]struct {
		devices   []string // what the claim was prepared with
		allocated string   // what the API server says is allocated
		change    func(t *testing.T, w *world, h *hardware)
		left      int
	}{
		"its record is readable":   {devices: []string{part}, left: 1},
		"its record is unreadable": {devices: []string{part}, change: func(t *testing.T, w *world, _ *hardware) { damage(t, w) }, left: 1},
		"a later version named it": {change: func(_ *testing.T, w *world, _ *hardware) {
			w.disk.Put(filepath.Join(state, "claims", "uid-c_"+large4+"-later.json"), []byte("{"))
		}, left: 2},
		"after a reboot": {devices: []string{part}, change: func(t *testing.T, w *world, h *hardware) {
			w.reboot()
			createComputeInstances(t, w, h, "MIG-c", "MIG-d")
		}, left: 1},
		"it is not prepared yet":                      {allocated: part, left: 1},
		"it has a share and is not prepared":          {allocated: part + "-share", left: 1},
		"it has the whole one and is not prepared":    {allocated: large4, left: 1},
		"it has another instance and is not prepared": {allocated: small0, left: 1},
		"another GPU's is allocated":                  {allocated: gpu1 + "-mig-9-4-ci-1", left: 0},
		"no claim has it":                             {left: 0},
	} {
		t.Run(name, func(t *testing.T) {
			w, h := withComputeInstances(t)
			for _, d := range c.devices {
				mustPrepare(t, w.plugin(t), newClaim("c", allocated("r", d)))
			}
			if c.change != nil {
				c.change(t, w, h)
			}
			p := w.plugin(t)
			if err := adopt(t, w, p, c.allocated); err != nil {
				t.Error(err)
			}
			if in := h.of(t, gpu0).State().MIG.Instances; len(in) != c.left {
				t.Errorf("left: %s", steps.DescribeInstances(in...))
			}
		})
	}
}

// Without the list of claims it is unknown which instances are idle.
func TestAdoptRemovesNothingWhileClaimsAreUnknown(t *testing.T) {
	w, h := withComputeInstances(t)
	p := w.plugin(t)
	err := p.Adopt(t.Context(), w.gpuOf(t, gpu0), func() (device.Allocations, error) { return device.Allocations{}, errors.New("no answer") })
	if err == nil || !strings.Contains(err.Error(), "no answer") || len(h.of(t, gpu0).Instances) != 2 {
		t.Errorf("%v, %+v", err, h.of(t, gpu0).Instances)
	}
}

// Listing all claims of a cluster costs the API server, so Adopt does it only for an instance that
// looks idle.
func TestAdoptListsNoClaimsIfRecordsExplainAllInstances(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	h.createForeign(t, gpu0, 9, 4)
	w.scan()
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", allocated("r", large4)))
	err := p.Adopt(t.Context(), w.gpuOf(t, gpu0), func() (device.Allocations, error) { return device.Allocations{}, errors.New("listed") })
	if err != nil || len(h.of(t, gpu0).Instances) != 1 {
		t.Errorf("%v, %+v", err, h.of(t, gpu0).Instances)
	}
}

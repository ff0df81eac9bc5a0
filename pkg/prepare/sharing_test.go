// The first claim applies a shared step, further claims join it, and the last one restores the
// original state.

package prepare_test

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/reconcile"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// Each sharing configuration must either work for each kind of device, or be refused with a reason.
func TestSharingModesForEachKindOfDevice(t *testing.T) {
	const (
		works    = ""
		nothing  = "works, and nothing is done for it"
		none     = `null`
		someMPS  = `{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50}}`
		unsliced = `{"strategy":"TimeSlicing"}`
	)
	admins := func(t *testing.T, h *hardware) { h.createForeign(t, gpu0, 19, 0) }
	for _, c := range []struct {
		device  string
		kind    string
		before  func(*testing.T, *hardware)
		got     result
		sharing string
		want    string // or part of the refusal
		has     []string
	}{
		{"whole", "GpuConfig", nil, allocated("r", gpu0), none, nothing, nil},
		{"whole", "GpuConfig", nil, allocated("r", gpu0), unsliced, works, []string{"read time slice", "set time slice 0"}},
		{"whole", "GpuConfig", nil, allocated("r", gpu0), slicing("Short"), works, []string{"set time slice 1"}},
		{"whole", "GpuConfig", nil, allocated("r", gpu0), slicing("Medium"), works, []string{"set time slice 2"}},
		{"whole", "GpuConfig", nil, allocated("r", gpu0), slicing("Long"), works, []string{"set time slice 3"}},
		{"whole", "GpuConfig", nil, allocated("r", gpu0), byMPS, works, []string{"set compute mode exclusive-process", "start uid-c-0"}},
		{"whole", "GpuConfig", nil, allocated("r", gpu0), someMPS, works, []string{"set compute mode exclusive-process", "start uid-c-0"}},

		{"static MIG", "MigDeviceConfig", admins, allocated("r", small0), none, nothing, nil},
		{"static MIG", "MigDeviceConfig", admins, allocated("r", small0), unsliced, nothing, nil},
		{"static MIG", "MigDeviceConfig", admins, allocated("r", small0), slicing("Long"), "timeSlicingConfig", nil},
		{"static MIG", "MigDeviceConfig", admins, allocated("r", small0), byMPS, works, []string{"start uid-c-0"}},

		{"dynamic MIG", "MigDeviceConfig", nil, allocated("r", small0), none, works, []string{"create compute instance"}},
		{"dynamic MIG", "MigDeviceConfig", nil, allocated("r", small0), unsliced, works, []string{"create compute instance"}},
		{"dynamic MIG", "MigDeviceConfig", nil, allocated("r", small0), slicing("Long"), "timeSlicingConfig", nil},
		{"dynamic MIG", "MigDeviceConfig", nil, allocated("r", small0), byMPS, works, []string{"create compute instance", "start uid-c-0"}},

		{"fraction of a GPU", "GpuConfig", nil, fraction("r", share0, "1Gi", "0"), none, works,
			[]string{"set compute mode exclusive-process", "start " + share0}},
		{"fraction of a GPU", "GpuConfig", nil, fraction("r", share0, "1Gi", "0"), byMPS, works,
			[]string{"set compute mode exclusive-process", "start " + share0}},
		{"fraction of a GPU", "GpuConfig", nil, fraction("r", share0, "1Gi", "0"), unsliced, "MPS enforces the limits of a fraction", nil},
		{"fraction of a GPU", "GpuConfig", nil, fraction("r", share0, "1Gi", "0"), someMPS, "remove mpsConfig", nil},
		{"fraction of static MIG", "MigDeviceConfig", admins, fraction("r", migShare0, "1Gi", "0"), none, works, []string{"start " + migShare0}},
		{"fraction of static MIG", "MigDeviceConfig", admins, fraction("r", migShare0, "1Gi", "0"), byMPS, works, []string{"start " + migShare0}},
		{"fraction of static MIG", "MigDeviceConfig", admins, fraction("r", migShare0, "1Gi", "0"), unsliced,
			"MPS enforces the limits of a fraction", nil},
		{"fraction of dynamic MIG", "MigDeviceConfig", nil, fraction("r", migShare0, "1Gi", "0"), none, works,
			[]string{"create compute instance", "start " + migShare0}},
		{"fraction of dynamic MIG", "MigDeviceConfig", nil, fraction("r", migShare0, "1Gi", "0"), byMPS, works,
			[]string{"create compute instance", "start " + migShare0}},
		{"fraction of dynamic MIG", "MigDeviceConfig", nil, fraction("r", migShare0, "1Gi", "0"), unsliced,
			"MPS enforces the limits of a fraction", nil},

		{"plain share of a GPU", "GpuConfig", nil, plain("r", share0), none, nothing, nil},
		{"plain share of a GPU", "GpuConfig", nil, plain("r", share0), unsliced, works, []string{"set time slice 0"}},
		{"plain share of a GPU", "GpuConfig", nil, plain("r", share0), slicing("Long"), works, []string{"set time slice 3"}},
		{"plain share of a GPU", "GpuConfig", nil, plain("r", share0), byMPS, "ask the administrator for fractions", nil},
		{"plain share of static MIG", "MigDeviceConfig", admins, plain("r", migShare0), none, nothing, nil},
		{"plain share of static MIG", "MigDeviceConfig", admins, plain("r", migShare0), unsliced, nothing, nil},
		{"plain share of static MIG", "MigDeviceConfig", admins, plain("r", migShare0), byMPS, "ask the administrator for fractions", nil},
		{"plain share of dynamic MIG", "MigDeviceConfig", nil, plain("r", migShare0), none, works, []string{"create compute instance"}},
		{"plain share of dynamic MIG", "MigDeviceConfig", nil, plain("r", migShare0), unsliced, works, []string{"create compute instance"}},
		{"plain share of dynamic MIG", "MigDeviceConfig", nil, plain("r", migShare0), slicing("Long"), "timeSlicingConfig", nil},
		{"plain share of dynamic MIG", "MigDeviceConfig", nil, plain("r", migShare0), byMPS, "ask the administrator for fractions", nil},
	} {
		t.Run(c.device+" "+c.sharing, func(t *testing.T) {
			w := newWorld(t)
			h := withMPS(w)
			if c.before != nil {
				c.before(t, h)
				w.scan()
			}
			p := w.plugin(t)
			h.takeCalls()
			claim := newClaim("c", c.got)
			if c.sharing != none {
				shareBy(claim, c.kind, c.sharing)
			}
			before := len(h.of(t, gpu0).Instances)
			_, err := p.Prepare(t.Context(), claim)
			calls := h.takeCalls()
			switch {
			case c.want == nothing:
				if err != nil || slices.ContainsFunc(calls, func(c string) bool { return c != "query" }) || len(w.holders()) > 0 {
					t.Errorf("%v, asked %q", err, calls)
				}
			case c.want == works:
				for _, call := range c.has {
					if !slices.Contains(calls, call) {
						t.Errorf("%v, asked %q and not %q", err, calls, call)
					}
				}
			case cause.Of(err) != cause.Claim || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "request r") &&
				!strings.Contains(err.Error(), "configuration"):
				t.Errorf("cause %s: %v", cause.Of(err), err)
			}
			if err != nil {
				if c.want == works {
					t.Error(err)
				}
				checkClean(t, w)
				return
			}
			// A restart of the plugin must not change settings or restart MPS daemons that claims use.
			daemons := maps.Clone(w.daemons.running)
			p = w.plugin(t)
			if err := p.Recover(t.Context()); err != nil {
				t.Fatal(err)
			}
			w.scan()
			if err := p.Reconcile(t.Context()); err != nil {
				t.Fatal(err)
			}
			mustPrepare(t, p, claim)
			for _, call := range h.takeCalls() {
				if call != "query" && call != "read time slice" && !strings.HasPrefix(call, "start ") ||
					!maps.EqualFunc(w.daemons.running, daemons, mps.Daemon.Equal) {
					t.Errorf("after a restart: %q", call)
				}
			}
			checkSharedState(t, w, h, p, device.TimeSliceDefault)
			mustUnprepare(t, p, claim.UID)
			checkSharedState(t, w, h, p, device.TimeSliceDefault)
			if left := len(h.of(t, gpu0).Instances); left != before {
				t.Errorf("%d instances are left, of %d", left, before)
			}
			checkClean(t, w)
		})
	}
}

func TestTimeSliceIsSetAndRestored(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	h.of(t, gpu0).TimeSlice = device.TimeSliceMedium
	p := w.plugin(t)
	c := shareBy(newClaim("c", allocated("r", gpu0)), "GpuConfig", slicing("Long"))
	mustPrepare(t, p, c)
	if got := h.of(t, gpu0).TimeSlice; got != device.TimeSliceLong {
		t.Errorf("the time slice is %d", got)
	}
	h.takeCalls()
	mustPrepare(t, p, c)
	if calls := h.takeCalls(); !slices.Equal(calls, []string{"read time slice"}) {
		t.Errorf("a repeated call made hardware calls: %q", calls)
	}
	h.of(t, gpu0).ForgetSettings()
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := h.of(t, gpu0).TimeSlice; got != device.TimeSliceLong {
		t.Errorf("after a reset the time slice is %d", got)
	}
	mustUnprepare(t, p, c.UID)
	if got := h.of(t, gpu0).TimeSlice; got != device.TimeSliceMedium {
		t.Errorf("restored, the time slice is %d", got)
	}
	checkClean(t, w)
}

// In whatever order the claims leave, the last one must restore the time slice that the GPU had
// before.
func TestLastHolderRestoresOriginalSettings(t *testing.T) {
	for _, order := range [][]string{{"a", "b", "c"}, {"a", "c", "b"}, {"b", "a", "c"}, {"b", "c", "a"}, {"c", "a", "b"}, {"c", "b", "a"}} {
		t.Run(fmt.Sprint(order), func(t *testing.T) {
			w := newWorld(t)
			h := withMPS(w)
			h.of(t, gpu0).TimeSlice = device.TimeSliceShort
			for _, name := range []string{"a", "b", "c"} {
				// A new plugin process serves each call, so the test fails if the original time slice is kept
				// only in memory.
				mustPrepare(t, w.plugin(t), shareBy(newClaim(name, plain("r", share0)), "GpuConfig", slicing("Long")))
			}
			for _, name := range order {
				if got := h.of(t, gpu0).TimeSlice; got != device.TimeSliceLong {
					t.Errorf("before claim %s leaves, the time slice is %d", name, got)
				}
				mustUnprepare(t, w.plugin(t), newClaim(name).UID)
			}
			if got := h.of(t, gpu0).TimeSlice; got != device.TimeSliceShort {
				t.Errorf("at the end the time slice is %d", got)
			}
			checkClean(t, w)
		})
	}
}

func TestDifferentSharedSettingIsRefusedNamingHolders(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	mustPrepare(t, p, shareBy(newClaim("a", plain("r", share0)), "GpuConfig", slicing("Long")))
	mustPrepare(t, p, newClaim("indifferent", plain("r", share0)))
	b := shareBy(newClaim("b", plain("r", share0)), "GpuConfig", slicing("Short"))
	_, err := p.Prepare(t.Context(), b)
	if cause.Of(err) != cause.Held {
		t.Errorf("cause %q", cause.Of(err))
	}
	for _, want := range []string{"default/b", "Short", "Long", "default/a", "uid-a", gpu0} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %s", err, want)
		}
	}
	if strings.Contains(err.Error(), "indifferent") || h.of(t, gpu0).TimeSlice != device.TimeSliceLong {
		t.Error(err, h.of(t, gpu0).TimeSlice)
	}
	mustUnprepare(t, p, "uid-a")
	mustPrepare(t, p, b)
	if got := h.of(t, gpu0).TimeSlice; got != device.TimeSliceShort {
		t.Errorf("the time slice is %d", got)
	}
}

func TestSharingRefusals(t *testing.T) {
	limits := func(perDevice string) string {
		return `{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{` + perDevice + `}}}`
	}
	other := `"GPU-11111111-1111-1111-1111-111111111111":"1Gi"`
	without := shareOf("r", share0)
	twice := newClaim("c", fraction("a", share0, "1Gi", "0"), fraction("a", share0, "1Gi", "0"))
	for _, c := range []struct {
		name  string
		node  func(*testing.T, *world, *hardware)
		claim *resourceapi.ResourceClaim
		cause cause.Cause
		says  []string
	}{
		{"fractions of two devices", nil, newClaim("c", fraction("a", share0, "1Gi", "0"), fraction("b", share1, "1Gi", "0")), cause.Claim,
			[]string{"requests a and b", share0, share1, "two MPS daemons"}},
		{"a fraction and MPS", nil, shareBy(newClaim("c", fraction("a", share0, "1Gi", "0"), allocated("b", gpu1)), "GpuConfig", byMPS),
			cause.Claim, []string{"requests a and b", "two MPS daemons"}},
		{"a fraction and a whole GPU", nil, newClaim("c", allocated("a", gpu1), fraction("b", share0, "1Gi", "0")), cause.Claim,
			[]string{"requests b and a", share0, gpu1, "cannot see"}},
		{"a fraction and a partition", nil, newClaim("c", fraction("a", share1, "1Gi", "0"), allocated("b", small0)), cause.Claim,
			[]string{"requests a and b", share1, small0, "cannot see"}},
		{"a fraction and a plain share", nil, newClaim("c", fraction("a", share0, "1Gi", "0"), plain("b", share1)), cause.Claim,
			[]string{"requests a and b", share0, share1, "cannot see"}},
		{"MPS over two MIG devices", nil, shareBy(newClaim("c", allocated("a", small0), allocated("b", neighbor)), "MigDeviceConfig", byMPS),
			cause.Claim, []string{"requests a and b", "sharing.strategy MPS", small0, neighbor, "config[].requests"}},
		{"MPS over two MIG devices of one request", nil, shareBy(newClaim("c", allocated("r", small0), allocated("r", neighbor)),
			"MigDeviceConfig", byMPS), cause.Claim, []string{"requests r and r", "with a count"}},
		{"a share without an amount", nil, newClaim("c", without), cause.Claim, []string{"request r", share0, "capacity memory or shares"}},
		{"a fraction below 1 MiB", nil, newClaim("c", fraction("r", share0, "1000", "0")), cause.Claim, []string{"request r", "1k", "1Mi"}},
		{"a share twice", nil, twice, cause.Claim, []string{"requests a and a", share0}},
		{"a share and its GPU", nil, newClaim("c", fraction("a", share0, "1Gi", "0"), allocated("b", gpu0)), cause.Claim,
			[]string{"requests a and b", share0, gpu0}},
		{"sharing of admin access", nil, shareBy(newClaim("c", admin("r", gpu0)), "GpuConfig", byMPS), cause.Claim,
			[]string{"request r", "admin access cannot set up sharing"}},
		{"a limit for a device too many", nil, shareBy(newClaim("c", allocated("r", gpu0)), "GpuConfig", limits(`"1":"1Gi"`)), cause.Claim,
			[]string{`defaultPerDevicePinnedMemoryLimit["1"]`, "1 devices"}},
		{"a limit for another GPU", nil, shareBy(newClaim("c", allocated("r", gpu0)), "GpuConfig", limits(other)), cause.Claim,
			[]string{"defaultPerDevicePinnedMemoryLimit", "GPU-0"}},
		{"a limit for another MIG device", nil, shareBy(newClaim("c", allocated("r", small0)), "MigDeviceConfig", limits(other)), cause.Claim,
			[]string{"defaultPerDevicePinnedMemoryLimit", "MIG-1"}},
		{"a GPU without time slices", func(t *testing.T, _ *world, h *hardware) { h.of(t, gpu0).NoTimeSlices = true },
			shareBy(newClaim("c", allocated("r", gpu0)), "GpuConfig", slicing("Long")), cause.Step, []string{gpu0, "time slices", "not-supported"}},
		{"MPS without a supervisor", func(_ *testing.T, w *world, _ *hardware) { w.daemons.absent = true },
			newClaim("c", fraction("r", share0, "1Gi", "0")), cause.NotReady, []string{"the MPS supervisor is not running on this node",
				"mps.enabled"}},
		{"MPS switched off", func(_ *testing.T, w *world, _ *hardware) { w.mpsDisabled = true },
			shareBy(newClaim("c", allocated("a", gpu1), allocated("b", gpu0)), "GpuConfig",
				byMPS), cause.Claim, []string{"claim default/c: request a: MPS is switched off in this cluster: set mps.enabled=true in the chart's " +
				"values"}},
		{"a fraction while MPS is switched off", func(_ *testing.T, w *world, _ *hardware) { w.mpsDisabled = true },
			newClaim("c", fraction("r", share0, "1Gi", "0")), cause.Claim, []string{"request r: MPS is switched off in this cluster"}},
		{"a whole GPU with shares in use", func(t *testing.T, w *world, _ *hardware) {
			mustPrepare(t, w.plugin(t), newClaim("other", fraction("r", share0, "1Gi", "0")))
		}, newClaim("c", allocated("r", gpu0)), cause.Held, []string{gpu0, share0, "default/other"}},
		{"a share of a GPU in use", func(t *testing.T, w *world, _ *hardware) {
			mustPrepare(t, w.plugin(t), newClaim("other", allocated("r", gpu0)))
		}, newClaim("c", fraction("r", share0, "1Gi", "0")), cause.Held, []string{gpu0, share0, "default/other"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			h := withMPS(w)
			if c.node != nil {
				c.node(t, w, h)
			}
			_, err := w.plugin(t).Prepare(t.Context(), c.claim)
			if cause.Of(err) != c.cause {
				t.Errorf("cause %q: %v", cause.Of(err), err)
			}
			for _, want := range c.says {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("%v does not say %q", err, want)
				}
			}
			if slices.ContainsFunc(w.records(), func(r string) bool { return strings.HasPrefix(r, "uid-c_") }) {
				t.Errorf("left: %q", w.records())
			}
		})
	}
}

func TestWholeGPUPaysNothingForSharing(t *testing.T) {
	c := newClaim("c", allocated("r", gpu0))
	unshared := writesOf(t, newWorld(t), c)
	w := newWorld(t)
	h := withMPS(w)
	mustPrepare(t, w.plugin(t), newClaim("other", fraction("r", share1, "1Gi", "0")))
	h.takeCalls()
	if writes := writesOf(t, w, c); writes != unshared {
		t.Errorf("%d writes, and %d where nothing can be shared", writes, unshared)
	}
	p := w.plugin(t)
	mustUnprepare(t, p, "uid-other")
	mustPrepare(t, p, c)
	h.takeCalls()
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if calls := h.takeCalls(); len(calls) != 0 {
		t.Errorf("Reconcile made calls %q", calls)
	}
	mustUnprepare(t, p, c.UID)
	mustPrepare(t, p, shareBy(newClaim("other", plain("r", share1)), "GpuConfig", slicing("Long")))
	h.takeCalls()
	// Files of settings that other claims share are unreadable now. That must not harm this claim,
	// which shares nothing.
	for _, file := range w.holders() {
		w.disk.Put(filepath.Join(state, "holders", file), nil)
	}
	mustPrepare(t, p, c)
	mustPrepare(t, p, c)
	mustUnprepare(t, p, c.UID)
	if calls := h.takeCalls(); len(calls) != 0 {
		t.Errorf("hardware calls: %q", calls)
	}
}

func TestSharedPartitionLivesFromFirstToLastHolder(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	a, b := newClaim("a", fraction("r", migShare0, "4Gi", "0")), newClaim("b", fraction("r", migShare0, "4Gi", "0"))
	mustPrepare(t, p, a)
	mustPrepare(t, p, b)
	if got := w.daemons.running[migShare0].Devices; !slices.Equal(got, []string{"MIG-1"}) || len(h.of(t, gpu0).Instances) != 1 {
		t.Errorf("the daemon has %q of %s", got, steps.DescribeInstances(h.of(t, gpu0).State().MIG.Instances...))
	}
	w.scan()
	if ours, err := p.OwnedInstances(gpu0, h.of(t, gpu0).State().MIG.Instances); err != nil || len(ours) != 1 {
		t.Errorf("owned: %v, %v", ours, err)
	}
	given, err := p.PreparedDevices(b.UID)
	if err != nil || len(given) != 1 || given[0].Compute == nil || given[0].Compute.UUID != "MIG-1" {
		t.Errorf("prepared devices: %+v, %v", given, err)
	}
	// After a GPU reset, Reconcile must recreate the partition once, and both claims must use the new
	// one.
	h.of(t, gpu0).RemoveInstances()
	w.scan()
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, uid := range []string{"a", "b"} {
		r, _, err := p.Records.Load(newClaim(uid).UID)
		if err != nil || r.Devices[0].MIGUUID != "MIG-2" || !strings.Contains(w.specs.of(r.ClaimUID), "nvidia-cap11") {
			t.Errorf("claim %s has %+v, %v", uid, r.Devices, err)
		}
	}
	if got := w.daemons.running[migShare0].Devices; !slices.Equal(got, []string{"MIG-2"}) {
		t.Errorf("the daemon has %q", got)
	}
	mustUnprepare(t, p, a.UID)
	if len(h.of(t, gpu0).Instances) != 1 || len(w.daemons.running) != 1 {
		t.Error("the first claim to leave removed it")
	}
	mustUnprepare(t, p, b.UID)
	if len(h.of(t, gpu0).Instances) != 0 || len(w.daemons.running) != 0 {
		t.Errorf("left: %s, %v", steps.DescribeInstances(h.of(t, gpu0).State().MIG.Instances...), w.daemons.running)
	}
	checkClean(t, w)
}

func TestLostSharedPartitionHasNoSpecUntilRestored(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	mustPrepare(t, p, migPart1)
	mustPrepare(t, p, migPart2)
	h.of(t, gpu0).RemoveInstances()
	w.scan()
	err := p.RepairAllSpecs(t.Context())
	if err == nil || len(reconcile.LostDevices(err)) > 0 || w.specs.of("uid-c") != "" || w.specs.of("uid-d") != "" {
		t.Errorf("%v, lost: %v, specs %q, %q", err, reconcile.LostDevices(err), w.specs.of("uid-c"), w.specs.of("uid-d"))
	}
	// A third claim must not recreate the partition, because the CDI specs of the other two claims
	// would still name the old one.
	third := newClaim("third", fraction("r", migShare0, "1Gi", "0"))
	if _, err := p.Prepare(t.Context(), third); cause.Of(err) != cause.NotReady || !strings.Contains(err.Error(), "recreates the device") {
		t.Errorf("cause %s: %v", cause.Of(err), err)
	}
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustPrepare(t, p, third)
	w.scan()
	checkSharedState(t, w, h, p, device.TimeSliceDefault)
	checkRecordsMatchHardware(t, w, h, p, nil)
}

func TestUnrestorableSharedPartitionIsLostForAllHolders(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	mustPrepare(t, p, migPart1)
	mustPrepare(t, p, migPart2)
	h.of(t, gpu0).RemoveInstances()
	h.createForeign(t, gpu0, 9, 0)
	w.scan()
	if lost := reconcile.LostDevices(p.Reconcile(t.Context())); len(lost) != 2 || w.specs.of("uid-c") != "" || w.specs.of("uid-d") != "" {
		t.Errorf("lost: %v", lost)
	}
	mustUnprepare(t, p, migPart1.UID)
	mustUnprepare(t, p, migPart2.UID)
	checkClean(t, w)
	if len(w.holders()) != 0 || len(w.daemons.running) != 0 || len(h.of(t, gpu0).Instances) != 1 {
		t.Errorf("left: %q, %v, %s", w.holders(), w.daemons.running, steps.DescribeInstances(h.of(t, gpu0).State().MIG.Instances...))
	}
}

// muteTimeSlice is a fake node's hardware on which setting the time slice of one GPU always times
// out.
type muteTimeSlice struct {
	*hardware
	uuid string
}

func (m *muteTimeSlice) SetTimeSlice(ctx context.Context, c device.Card, slice device.TimeSlice) error {
	if c.UUID == m.uuid {
		return failure(device.FailureTimeout, "set time slice", c)
	}
	return m.hardware.SetTimeSlice(ctx, c, slice)
}

// If a time slice cannot be restored, the last claim must still be unprepared and the GPU must stay
// usable. Reconcile must restore the time slice later.
func TestFailedTimeSliceRestoreIsRetried(t *testing.T) {
	for name, c := range map[string]struct {
		meanwhile func(*testing.T, *world, *plugin)
		found     device.TimeSlice
	}{
		"no other claim": {func(*testing.T, *world, *plugin) {}, device.TimeSliceMedium},
		"another claim uses the whole GPU": {func(t *testing.T, _ *world, p *plugin) {
			mustPrepare(t, p, newClaim("whole", allocated("r", gpu0)))
		}, device.TimeSliceMedium},
		"a reboot": {func(_ *testing.T, w *world, _ *plugin) { w.reboot() }, device.TimeSliceDefault},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			h := withMPS(w)
			h.of(t, gpu0).TimeSlice = device.TimeSliceMedium
			p := w.plugin(t)
			mustPrepare(t, p, long1)
			p.with(func(n *steps.Node) { n.Partitions = &muteTimeSlice{h, "GPU-0"} })
			mustUnprepare(t, p, long1.UID)
			checkClean(t, w)
			for range 2 {
				if err := p.Reconcile(t.Context()); err != nil || len(w.holders()) != 1 {
					t.Fatalf("%v, what is to be set back: %q", err, w.holders())
				}
			}
			if _, err := p.Prepare(t.Context(), long2); err == nil || !strings.Contains(err.Error(), "time slices of "+gpu0) {
				t.Errorf("the error does not say that time slices cannot be set: %v", err)
			}
			c.meanwhile(t, w, p)
			p = w.plugin(t)
			if err := p.Reconcile(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := h.of(t, gpu0).TimeSlice; got != c.found || len(w.holders()) != 0 {
				t.Errorf("the time slice is %d, left: %q", got, w.holders())
			}
			mustUnprepare(t, p, "uid-whole")
			mustPrepare(t, p, long2)
			mustUnprepare(t, p, long2.UID)
			checkSharedState(t, w, h, p, c.found)
			checkClean(t, w)
		})
	}
}

// The last claim's time slice could not be restored, so the original value is still in the file of
// the shared setting. A new claim must keep that value and restore it in the end.
func TestNewHolderKeepsOriginalTimeSlice(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	h.of(t, gpu0).TimeSlice = device.TimeSliceMedium
	p := w.plugin(t)
	mustPrepare(t, p, long1)
	p.with(func(n *steps.Node) { n.Partitions = &muteTimeSlice{h, "GPU-0"} })
	mustUnprepare(t, p, long1.UID)
	p.with(func(n *steps.Node) { n.Partitions = h })
	short := shareBy(newClaim("short", plain("r", share0)), "GpuConfig", slicing("Short"))
	mustPrepare(t, p, short)
	checkSharedState(t, w, h, p, device.TimeSliceMedium)
	mustUnprepare(t, p, short.UID)
	checkSharedState(t, w, h, p, device.TimeSliceMedium)
	checkClean(t, w)
}

// If the compute mode cannot be restored, Unprepare must fail: another claim could not use a GPU
// that stayed in exclusive mode.
func TestFailedComputeModeRestoreKeepsClaim(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	mustPrepare(t, p, part1)
	h.fault = func(int, bool) error {
		if h.of(t, gpu0).ComputeMode == device.ComputeExclusiveProcess && len(w.daemons.running) == 0 {
			return failure(device.FailureReset, "set compute mode", h.card(t, gpu0))
		}
		return nil
	}
	if err := p.Unprepare(t.Context(), part1.UID); err == nil || len(w.records()) != 1 {
		t.Errorf("%v, %q", err, w.records())
	}
	h.fault = nil
	mustUnprepare(t, p, part1.UID)
	checkSharedState(t, w, h, p, device.TimeSliceDefault)
	checkClean(t, w)
}

// The plugin dies in one claim's Prepare or Unprepare. Prepare of another claim that shares the
// same setting, daemon or partition must succeed, even if no Reconcile ran in between.
func TestPrepareJoinsAfterCrashWithoutReconcile(t *testing.T) {
	for _, c := range []struct {
		name        string
		first, next *resourceapi.ResourceClaim
	}{{"a fraction", part1, part2}, {"a fraction of a partition", migPart1, migPart2}, {"a plain share", long1, long2}} {
		for _, s := range []sharingScene{
			{c.name + ": first", []*resourceapi.ResourceClaim{c.next, c.first}, withPrepared(), prepares(c.first)},
			{c.name + ": last leaves", []*resourceapi.ResourceClaim{c.next, c.first}, withPrepared(c.first), unprepares(c.first)},
		} {
			for _, fault := range []string{"kill -9 before", "kill -9 after"} {
				for n := 1; ; n++ {
					w, h, p, found := interruptedScene(t, s)
					h.fault = func(call int, after bool) error {
						if call != n {
							return nil
						}
						return faults[fault](w, after)
					}
					_ = s.call(t, p)
					if !w.disk.Stopped() {
						break
					}
					h.fault = nil
					t.Run(fmt.Sprintf("%s, %s at call %d", s.name, fault, n), func(t *testing.T) {
						checkJoins(t, w, h, c.next, s.claims, found)
					})
				}
			}
			for n := 1; ; n++ {
				w, h, p, found := interruptedScene(t, s)
				w.disk.StopAt(n)
				_ = s.call(t, p)
				if !w.disk.Stopped() {
					break
				}
				t.Run(fmt.Sprintf("%s, at write %d", s.name, n), func(t *testing.T) {
					checkJoins(t, w, h, c.next, s.claims, found)
				})
			}
		}
	}
}

func checkJoins(t *testing.T, w *world, h *hardware, next *resourceapi.ResourceClaim, claims []*resourceapi.ResourceClaim,
	found device.TimeSlice) {
	t.Helper()
	w.disk.Restart()
	mustPrepare(t, w.plugin(t), next)
	w.scan()
	checkClaimsGoOn(t, w, h, claims, found)
}

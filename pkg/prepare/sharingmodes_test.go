// Each kind of device is shared in the ways that its hardware allows. A claim that asks for another
// way, or for what its neighbours do not allow, is refused with a reason.

package prepare_test

import (
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
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
			if err := p.Reconcile(t.Context()); err != nil {
				t.Fatal(err)
			}
			w.scan()
			if err := p.Reconcile(t.Context()); err != nil {
				t.Fatal(err)
			}
			mustPrepare(t, p, claim)
			for _, call := range h.takeCalls() {
				if call != "query" && call != "read time slice" && !strings.HasPrefix(call, "start ") ||
					!reflect.DeepEqual(w.daemons.running, daemons) {
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

package prepare_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
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
		{"whole", "GpuConfig", nil, allocated("r", gpu0), unsliced, works, []string{"time slice", "set time slice 0"}},
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
			before := len(h.of(t, gpu0).instances)
			_, err := p.Prepare(t.Context(), claim)
			calls := h.takeCalls()
			switch {
			case c.want == nothing:
				if err != nil || slices.ContainsFunc(calls, func(c string) bool { return c != "look" }) || len(w.holders()) > 0 {
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
				if call != "look" && call != "time slice" && !strings.HasPrefix(call, "start ") ||
					!maps.EqualFunc(w.daemons.running, daemons, mps.Daemon.Equal) {
					t.Errorf("after a restart: %q", call)
				}
			}
			checkSharedState(t, w, h, p, device.TimeSliceDefault)
			mustUnprepare(t, p, claim.UID)
			checkSharedState(t, w, h, p, device.TimeSliceDefault)
			if left := len(h.of(t, gpu0).instances); left != before {
				t.Errorf("%d instances are left, of %d", left, before)
			}
			checkClean(t, w)
		})
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
		{"a GPU without time slices", func(t *testing.T, _ *world, h *hardware) { h.of(t, gpu0).unsliced = true },
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

func TestHungDaemonDelaysOnlyItsGPU(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	synctest.Test(t, func(t *testing.T) {
		w.daemons.hang["GPU-0"] = true
		p := w.plugin(t)
		const kubelets = 45 * time.Second
		done := make(chan error)
		start := time.Now()
		go func() {
			_, err := p.Prepare(t.Context(), newClaim("hanging", fraction("r", share0, "1Gi", "0")))
			done <- err
		}()
		synctest.Wait()
		mustPrepare(t, p, newClaim("neighbor", fraction("r", share1, "1Gi", "0")))
		mustPrepare(t, p, newClaim("admin", admin("r", gpu0)))
		if took := time.Since(start); took > 0 {
			t.Errorf("another GPU's claim waited for %s", took)
		}
		err := <-done
		if took := time.Since(start); took > kubelets-10*time.Second {
			t.Errorf("the answer came after %s", took)
		}
		for _, want := range []string{"default/hanging", gpu0, "not ready within 20s"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v does not say %q", err, want)
			}
		}
		if h.of(t, gpu0).mode != device.ComputeDefault || len(w.holders()) != 2 {
			t.Errorf("left: %s, %q", h.of(t, gpu0).mode, w.holders())
		}
		clear(w.daemons.hang)
		mustPrepare(t, p, newClaim("hanging", fraction("r", share0, "1Gi", "0")))
	})
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

func TestConcurrentSharing(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	claims := map[string]*resourceapi.ResourceClaim{}
	for i := range 24 {
		name := fmt.Sprint("many-", i)
		claims[name] = newClaim(name, []result{
			fraction("r", share1, "1Gi", "0"), fraction("r", migShare0, "1Gi", "0"), plain("r", gpu0+"-mig-19-3-share"),
		}[i%3])
	}
	var plugins []*plugin
	for range 2 { // as during an upgrade
		p := w.plugin(t)
		p.OnRead = func(_ context.Context, _, name string) (*resourceapi.ResourceClaim, error) { return claims[name], nil }
		plugins = append(plugins, p)
	}
	stop := make(chan struct{})
	var compared, worked sync.WaitGroup
	for _, p := range plugins {
		compared.Go(func() {
			for {
				select {
				case <-stop:
					return
				default: // errors during a transition are transient
					_ = errors.Join(p.RepairAllSpecs(t.Context()), p.Reconcile(t.Context()))
				}
			}
		})
	}
	for i, c := range slices.Collect(maps.Values(claims)) {
		worked.Go(func() {
			for round := range 3 {
				p := plugins[(i+round)%len(plugins)]
				if _, err := p.Prepare(t.Context(), c); err != nil {
					t.Error(err)
				}
				if err := p.Unprepare(t.Context(), c.UID); err != nil {
					t.Error(err)
				}
			}
		})
	}
	worked.Wait()
	close(stop)
	compared.Wait()
	if err := plugins[0].Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	checkSharedState(t, w, h, plugins[0], device.TimeSliceDefault)
	if len(w.holders()) != 0 || len(h.of(t, gpu0).instances) != 0 {
		t.Errorf("left: %q, %s", w.holders(), steps.DescribeInstances(h.of(t, gpu0).state().MIG.Instances...))
	}
	checkClean(t, w)
}

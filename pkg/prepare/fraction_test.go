package prepare_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/reconcile"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

func TestFractionsShareOneDaemonWithOwnLimits(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	a := newClaim("a", fraction("r", share0, "18Gi", "25"))
	b := newClaim("b", fraction("x", share0, "10Gi", "0"), fraction("y", share0, "512Mi", "0"))
	got := mustPrepare(t, p, a)
	if want := "k8s.gpu.nvidia.com/claim=uid-a-" + share0 + "-share-r"; got[0].CDIDeviceIDs[1] != want || *got[0].ShareID != "share-r" {
		t.Errorf("%+v", got)
	}
	mustPrepare(t, p, b)
	daemon := mps.Daemon{ID: share0, Devices: []string{"GPU-0"}, MultiUser: true}
	if len(w.daemons.running) != 1 || !w.daemons.running[share0].Equal(daemon) || h.of(t, gpu0).mode != device.ComputeExclusiveProcess {
		t.Errorf("the daemons are %+v", w.daemons.running)
	}
	for uid, want := range map[string][]string{
		"uid-a": {"/dev/nvidia0", "/mps/" + share0, `"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=18432M"`, `"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25"`},
		"uid-b": {`"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=10752M"`},
	} {
		spec := w.specs.of(newClaim(strings.TrimPrefix(uid, "uid-")).UID)
		for _, s := range want {
			if !strings.Contains(spec, s) {
				t.Errorf("the spec of %s has no %s: %s", uid, s, spec)
			}
		}
	}
	if spec := w.specs.of("uid-b"); strings.Contains(spec, "PERCENTAGE") || strings.Count(spec, "0=10752M") != 2 {
		t.Errorf("the spec is %s", spec)
	}
	h.takeCalls()
	mustUnprepare(t, p, a.UID)
	if calls := h.takeCalls(); len(calls) != 0 {
		t.Errorf("a leaving claim made calls although others stay: %q", calls)
	}
	mustUnprepare(t, p, b.UID)
	if len(w.daemons.running) != 0 || h.of(t, gpu0).mode != device.ComputeDefault {
		t.Errorf("left: %v, %s", w.daemons.running, h.of(t, gpu0).mode)
	}
	checkClean(t, w)
}

func TestContainerLimitAppliesWhereNodeSupportsIt(t *testing.T) {
	for name, tc := range map[string]struct {
		can   bool
		share string
		want  bool
	}{
		"a GPU with container limits":    {true, share0, true},
		"a GPU without container limits": {false, share0, false},
		"a MIG device":                   {true, migShare0, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			withMPS(w)
			w.snapshot.Node.GPUs[0].ContainerLimits = tc.can
			p := w.plugin(t)
			c := newClaim("c", fraction("x", tc.share, "3Gi", "0"), fraction("y", tc.share, "1Gi", "0"))
			mustPrepare(t, p, c)
			spec := w.specs.of(c.UID)
			if got := strings.Count(spec, "/limit/GPU-0/4096"); got > 0 != tc.want || strings.Count(spec, "/limit/") != got {
				t.Errorf("the spec is %s", spec)
			}
			if !strings.Contains(spec, "0=4096M") {
				t.Errorf("each process is not limited as well: %s", spec)
			}
			// Another plugin process that rewrites the CDI spec must write the same limit.
			w.specs.clear()
			if err := w.plugin(t).Reconcile(t.Context()); err != nil {
				t.Fatal(err)
			}
			if again := w.specs.of(c.UID); again != spec {
				t.Errorf("the rewritten spec is %s", again)
			}
			mustUnprepare(t, p, c.UID)
			checkClean(t, w)
		})
	}
}

// Each scan tests again whether the driver can limit containers on the GPU, and treats a failed
// test as "cannot". A repeated Prepare must keep the limit that the claim was prepared with.
func TestRePrepareKeepsContainerLimit(t *testing.T) {
	for _, could := range []bool{true, false} {
		t.Run(fmt.Sprintf("the GPU could: %v", could), func(t *testing.T) {
			w := newWorld(t)
			h := withMPS(w)
			w.snapshot.Node.GPUs[0].ContainerLimits = could
			p := w.plugin(t)
			c := newClaim("c", fraction("r", share0, "3Gi", "0"))
			mustPrepare(t, p, c)
			spec := w.specs.of(c.UID)
			h.takeCalls()
			w.snapshot.Node.GPUs[0].ContainerLimits = !could
			mustPrepare(t, p, c)
			if err := p.Reconcile(t.Context()); err != nil {
				t.Fatal(err)
			}
			for _, call := range h.takeCalls() {
				if call != "look" && call != "start "+share0 { // must not change running daemons
					t.Errorf("%q", call)
				}
			}
			if again := w.specs.of(c.UID); again != spec {
				t.Errorf("another spec: %s", again)
			}
			mustUnprepare(t, p, c.UID)
			checkClean(t, w)
		})
	}
}

func TestSharedPartitionLivesFromFirstToLastHolder(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	a, b := newClaim("a", fraction("r", migShare0, "4Gi", "0")), newClaim("b", fraction("r", migShare0, "4Gi", "0"))
	mustPrepare(t, p, a)
	mustPrepare(t, p, b)
	if got := w.daemons.running[migShare0].Devices; !slices.Equal(got, []string{"MIG-1"}) || len(h.of(t, gpu0).instances) != 1 {
		t.Errorf("the daemon has %q of %s", got, steps.DescribeInstances(h.of(t, gpu0).state().MIG.Instances...))
	}
	w.scan()
	if ours, err := p.OwnedInstances(gpu0, h.of(t, gpu0).state().MIG.Instances); err != nil || len(ours) != 1 {
		t.Errorf("owned: %v, %v", ours, err)
	}
	given, err := p.PreparedDevices(b.UID)
	if err != nil || len(given) != 1 || given[0].Compute == nil || given[0].Compute.UUID != "MIG-1" {
		t.Errorf("prepared devices: %+v, %v", given, err)
	}
	// After a GPU reset, Reconcile must recreate the partition once, and both claims must use the new
	// one.
	h.of(t, gpu0).reset()
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
	if len(h.of(t, gpu0).instances) != 1 || len(w.daemons.running) != 1 {
		t.Error("the first claim to leave removed it")
	}
	mustUnprepare(t, p, b.UID)
	if len(h.of(t, gpu0).instances) != 0 || len(w.daemons.running) != 0 {
		t.Errorf("left: %s, %v", steps.DescribeInstances(h.of(t, gpu0).state().MIG.Instances...), w.daemons.running)
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
			h.of(t, gpu0).slice = device.TimeSliceShort
			for _, name := range []string{"a", "b", "c"} {
				// A new plugin process serves each call, so the test fails if the original time slice is kept
				// only in memory.
				mustPrepare(t, w.plugin(t), shareBy(newClaim(name, plain("r", share0)), "GpuConfig", slicing("Long")))
			}
			for _, name := range order {
				if got := h.of(t, gpu0).slice; got != device.TimeSliceLong {
					t.Errorf("before claim %s leaves, the time slice is %d", name, got)
				}
				mustUnprepare(t, w.plugin(t), newClaim(name).UID)
			}
			if got := h.of(t, gpu0).slice; got != device.TimeSliceShort {
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
	if strings.Contains(err.Error(), "indifferent") || h.of(t, gpu0).slice != device.TimeSliceLong {
		t.Error(err, h.of(t, gpu0).slice)
	}
	mustUnprepare(t, p, "uid-a")
	mustPrepare(t, p, b)
	if got := h.of(t, gpu0).slice; got != device.TimeSliceShort {
		t.Errorf("the time slice is %d", got)
	}
}

func TestFractionsAndPlainSharesExcludeEachOther(t *testing.T) {
	f, s := newClaim("f", fraction("r", share0, "1Gi", "0")), newClaim("s", plain("r", share0))
	for _, c := range []struct{ first, second string }{{"f", "s"}, {"s", "f"}} {
		claims := map[string]func(*testing.T, *plugin) error{
			"f": func(t *testing.T, p *plugin) error { _, err := p.Prepare(t.Context(), f); return err },
			"s": func(t *testing.T, p *plugin) error { _, err := p.Prepare(t.Context(), s); return err },
		}
		for _, unreadable := range []bool{false, true} {
			w := newWorld(t)
			withMPS(w)
			p := w.plugin(t)
			if err := claims[c.first](t, p); err != nil {
				t.Fatal(err)
			}
			if unreadable {
				w.disk.Put(recordFile(t, w, "uid-"+c.first), nil)
			}
			err := claims[c.second](t, p)
			if cause.Of(err) != cause.Held || !strings.Contains(err.Error(), "uid-"+c.first) ||
				!strings.Contains(err.Error(), "fractions and plain shares") {
				t.Errorf("%s after %s: %v", c.second, c.first, err)
			}
			mustUnprepare(t, p, newClaim(c.first).UID)
			if err := claims[c.second](t, p); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestLostSharedPartitionHasNoSpecUntilRestored(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	mustPrepare(t, p, migPart1)
	mustPrepare(t, p, migPart2)
	h.of(t, gpu0).reset()
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
	h.of(t, gpu0).reset()
	h.createForeign(t, gpu0, 9, 0)
	w.scan()
	if lost := reconcile.LostDevices(p.Reconcile(t.Context())); len(lost) != 2 || w.specs.of("uid-c") != "" || w.specs.of("uid-d") != "" {
		t.Errorf("lost: %v", lost)
	}
	mustUnprepare(t, p, migPart1.UID)
	mustUnprepare(t, p, migPart2.UID)
	checkClean(t, w)
	if len(w.holders()) != 0 || len(w.daemons.running) != 0 || len(h.of(t, gpu0).instances) != 1 {
		t.Errorf("left: %q, %v, %s", w.holders(), w.daemons.running, steps.DescribeInstances(h.of(t, gpu0).state().MIG.Instances...))
	}
}

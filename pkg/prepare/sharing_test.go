// The first claim applies a shared step, further claims join it, and the last one restores the
// original state.

package prepare_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/reconcile"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

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

// The kubelet keeps a Pod's volumes until its claims are unprepared. So Unprepare must succeed on a
// disk that these volumes have filled.
func TestSharingClaimsEndOnAFullDisk(t *testing.T) {
	for _, s := range sharingScenes() {
		if !strings.HasSuffix(s.name, "joined") && !strings.HasSuffix(s.name, "first") {
			continue
		}
		for _, backwards := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, backwards %v", s.name, backwards), func(t *testing.T) {
				w := newWorld(t)
				h := withMPS(w)
				h.of(t, gpu0).TimeSlice = device.TimeSliceMedium
				for _, c := range s.claims {
					mustPrepare(t, w.plugin(t), c)
					w.scan()
				}
				w.disk.Fill()
				p := w.plugin(t)
				for i := range s.claims {
					if backwards {
						i = len(s.claims) - 1 - i
					}
					mustUnprepare(t, p, s.claims[i].UID)
				}
				w.disk.Free()
				w.scan()
				if err := p.Reconcile(t.Context()); err != nil {
					t.Error(err)
				}
				checkSharedState(t, w, h, p, device.TimeSliceMedium)
				checkClean(t, w)
				if left := w.holders(); len(left) != 0 {
					t.Errorf("holders left: %q", left)
				}
			})
		}
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
	// A third claim must not recreate the partition, because the CDI specs of the other two claims
	// would still name the old one.
	third := newClaim("third", fraction("r", migShare0, "1Gi", "0"))
	if _, err := p.Prepare(t.Context(), third); cause.Of(err) != cause.NotReady || !strings.Contains(err.Error(), "recreates the device") {
		t.Errorf("cause %s: %v", cause.Of(err), err)
	}
	h.fault = func(_ int, after bool) error {
		if !after && strings.HasPrefix(h.calls[len(h.calls)-1], "create GPU instance") {
			return failure(device.FailureTimeout, "create GPU instance", h.card(t, gpu0))
		}
		return nil
	}
	err := p.Reconcile(t.Context())
	if err == nil || len(reconcile.LostDevices(err)) > 0 || w.specs.of("uid-c") != "" || w.specs.of("uid-d") != "" {
		t.Errorf("%v, lost: %v, specs %q, %q", err, reconcile.LostDevices(err), w.specs.of("uid-c"), w.specs.of("uid-d"))
	}
	h.fault = nil
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
		"a partition of the GPU": {func(t *testing.T, w *world, p *plugin) {
			mustPrepare(t, p, newClaim("part", allocated("r", small0)))
			w.scan()
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
			mustUnprepare(t, p, "uid-part")
			mustPrepare(t, p, long2)
			mustLeave(t, w, h, p, c.found, long2)
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
	mustLeave(t, w, h, p, device.TimeSliceMedium, short)
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
	mustLeave(t, w, h, p, device.TimeSliceDefault, part1)
}

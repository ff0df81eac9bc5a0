// A repeated Prepare repairs what is missing, and with another allocation it first gives the old
// devices back.

package prepare_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/reconcile"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

func TestRePrepareRestoresMissingCDISpec(t *testing.T) {
	w := newWorld(t)
	c := newClaim("c", allocated("r", gpu0))
	want := mustPrepare(t, w.plugin(t), c)
	spec := w.specs.of("uid-c")
	before, _ := w.disk.ReadFile(filepath.Join(state, "claims", w.records()[0]))

	w.specs.clear()
	got := mustPrepare(t, w.plugin(t), c)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if w.specs.of("uid-c") != spec || w.specs.base == "" {
		t.Error("the specs were not repaired")
	}
	if after, _ := w.disk.ReadFile(filepath.Join(state, "claims", w.records()[0])); string(after) != string(before) {
		t.Error("the record was written without a reason")
	}

	w.missing = map[string]error{"/dev/nvidia0": errors.New("gone")}
	if _, err := w.plugin(t).Prepare(t.Context(), c); cause.Of(err) != cause.Device {
		t.Errorf("the device node is gone: %v", err)
	}
	w.missing = nil
	w.snapshot.Ready = false
	if _, err := w.plugin(t).Prepare(t.Context(), c); cause.Of(err) != cause.NotReady {
		t.Errorf("the driver is gone: %v", err)
	}
	if err := w.plugin(t).Unprepare(t.Context(), "uid-c"); err != nil {
		t.Errorf("Unprepare needs a driver: %v", err)
	}
	checkClean(t, w)
}

func TestRePrepareOfPartitionsWritesNothing(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, several)
	w.scan()
	h.takeCalls()
	before, _ := w.disk.ReadFile(recordFile(t, w, "uid-c"))
	w.disk.FailAt(1<<30, nil)
	mustPrepare(t, p, several)
	// The repair makes three writes: the two CDI specs, which the real store would only compare, and
	// the sync of the directory.
	if n := w.disk.Writes(); n != 3 {
		t.Errorf("%d writes", n)
	}
	if after, _ := w.disk.ReadFile(recordFile(t, w, "uid-c")); string(after) != string(before) {
		t.Error("the record was written")
	}
	if calls := h.takeCalls(); !slices.Equal(calls, []string{"query", "query"}) {
		t.Errorf("hardware calls: %q", calls)
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
				if call != "query" && call != "start "+share0 { // must not change running daemons
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

func TestPrepareAfterRebootRewritesSpec(t *testing.T) {
	w := newWorld(t)
	c := newClaim("c", allocated("r", gpu0))
	mustPrepare(t, w.plugin(t), c)
	w.reboot()
	w.snapshot.Node.GPUs[0] = newGPU("0000:1b:00.0", "GPU-0", "/dev/nvidia7")
	p := w.plugin(t)
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if spec := w.specs.of("uid-c"); spec != "" {
		t.Errorf("the spec of the last boot was restored: %s", spec)
	}
	mustPrepare(t, p, c)
	if spec := w.specs.of("uid-c"); !strings.Contains(spec, "/dev/nvidia7") {
		t.Errorf("the spec is %s", spec)
	}
	r, _, err := p.Records.Load("uid-c")
	if err != nil || r.BootID != w.bootID {
		t.Errorf("the record is %+v, %v", r, err)
	}
}

func TestReplacedGPUIsRefused(t *testing.T) {
	w := newWorld(t)
	c := newClaim("c", allocated("r", gpu0))
	p := w.plugin(t)
	mustPrepare(t, p, c)
	w.snapshot.Node.GPUs[0].UUID = "GPU-new"
	_, err := p.Prepare(t.Context(), c)
	if cause.Of(err) != cause.Device || !strings.Contains(err.Error(), "GPU-0") || !strings.Contains(err.Error(), "GPU-new") {
		t.Error(err)
	}
	err = p.Reconcile(t.Context())
	if w.specs.of("uid-c") != "" {
		t.Errorf("a restarted container gets the other card: %v", err)
	}
	if lost := reconcile.LostDevices(err); len(lost) != 1 || lost[0].Device != gpu0 || !strings.Contains(lost[0].Error(), "was replaced") {
		t.Errorf("the claim's device is not reported as lost: %v", err)
	}
	mustUnprepare(t, p, "uid-c")
	mustPrepare(t, p, c)
}

func TestNewAllocationRevertsTheOldFirst(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", allocated("r", gpu0)))
	mustPrepare(t, p, newClaim("c", allocated("r", gpu1)))
	if spec := w.specs.of("uid-c"); strings.Contains(spec, "/dev/nvidia0") || !strings.Contains(spec, "/dev/nvidia1") {
		t.Errorf("the spec is %s", spec)
	}
	mustPrepare(t, p, newClaim("other", allocated("r", gpu0)))
	foreign := allocated("nic", "eth0")
	foreign.Driver = "net.example.com"
	mustPrepare(t, p, newClaim("c", foreign))
	if r := w.records(); len(r) != 1 {
		t.Errorf("records: %q", r)
	}
}

// A claim whose consumed capacity changed has another allocation, even if its containers have no
// limit that depends on it. Prepare must record the new amount.
func TestChangedCapacityIsAnotherAllocation(t *testing.T) {
	w := newWorldWithShares(t)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", plain("r", share0)))
	mustPrepare(t, p, newClaim("c", plainShares("r", share0, "4")))
	r, _, err := p.Records.Load("uid-c")
	if q := r.Devices[0].ConsumedCapacity["shares"]; err != nil || q.String() != "4" {
		t.Errorf("the record has %s shares, %v", q.String(), err)
	}
}

// The order of independent steps is no part of what a claim asks for. A version of the driver that
// orders them in another way must not restart the daemons of running containers.
func TestOrderOfRecordedStepsDoesNotMatter(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	c := shareEach(newClaim("c", allocated("a", gpu0), allocated("b", gpu1)), "GpuConfig", byMPS)
	mustPrepare(t, p, c)
	r, _, err := p.Records.Load("uid-c")
	if err != nil {
		t.Fatal(err)
	}
	list, err := steps.Decode(r.Steps)
	if err != nil {
		t.Fatal(err)
	}
	shared := list[:len(list)-1]
	slices.Reverse(shared[:2]) // the compute modes
	slices.Reverse(shared[2:]) // the daemons
	spec := steps.Of[*steps.ClaimSpec](list)[0]
	slices.Reverse(spec.Clients)
	if len(shared) != 4 || len(spec.Clients) != 2 {
		t.Fatalf("%d shared steps, %d clients", len(shared), len(spec.Clients))
	}
	if r.Steps, err = steps.Encode(list); err != nil {
		t.Fatal(err)
	}
	if err := p.Records.Save(r); err != nil {
		t.Fatal(err)
	}
	before, _ := w.disk.ReadFile(recordFile(t, w, "uid-c"))
	h.takeCalls()
	mustPrepare(t, p, c)
	for _, call := range h.takeCalls() {
		if call != "query" && !strings.HasPrefix(call, "start ") {
			t.Errorf("%q", call)
		}
	}
	if after, _ := w.disk.ReadFile(recordFile(t, w, "uid-c")); string(after) != string(before) {
		t.Error("the record was written")
	}
	mustUnprepare(t, p, "uid-c")
	checkClean(t, w)
}

// A DeviceClass may change between two allocations of a claim that are otherwise the same. If the
// sharing configuration changed, Prepare must revert the earlier preparation and prepare the claim
// again.
func TestChangedSharingIsPreparedAnew(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	for _, c := range []struct {
		sharing string
		slice   device.TimeSlice
		mode    device.ComputeMode
		threads int
	}{
		{slicing("Long"), device.TimeSliceLong, device.ComputeDefault, 0},
		{slicing("Short"), device.TimeSliceShort, device.ComputeDefault, 0},
		{byMPS, device.TimeSliceDefault, device.ComputeExclusiveProcess, 0},
		{`{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50}}`, device.TimeSliceDefault, device.ComputeExclusiveProcess, 50},
	} {
		mustPrepare(t, p, shareBy(newClaim("c", allocated("r", gpu0)), "GpuConfig", c.sharing))
		threads := w.daemons.running["uid-c-0"].ThreadPercentage
		if s := h.of(t, gpu0); s.TimeSlice != c.slice || s.ComputeMode != c.mode || (threads != nil) != (c.threads > 0) {
			t.Errorf("%s: time slice %d, compute mode %s, threads %v", c.sharing, s.TimeSlice, s.ComputeMode, threads)
		}
		checkSharedState(t, w, h, p, device.TimeSliceDefault)
	}
	mustPrepare(t, p, newClaim("c", allocated("r", gpu0)))
	if len(w.holders()) != 0 || len(w.daemons.running) != 0 {
		t.Errorf("left: %q, %v", w.holders(), w.daemons.running)
	}
}

// The kubelet may call Prepare for a claim that got a new GPU before it called Unprepare for the
// old one, and then calls Unprepare only once. No setting, daemon or record may be left of either
// GPU.
func TestReallocatedClaimLeavesSharedState(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	for _, c := range []string{part1.Name, part2.Name} {
		mustPrepare(t, p, newClaim(c, fraction("r", share0, "10Gi", "30")))
	}
	mustPrepare(t, p, moved)
	if d := w.daemons.running; len(d) != 2 || d[share0].ID == "" || d[share1].ID == "" {
		t.Errorf("the daemons are %v", d)
	}
	mustUnprepare(t, p, moved.UID)
	if d := w.daemons.running; len(d) != 1 || d[share0].ID == "" || h.of(t, gpu1).ComputeMode != device.ComputeDefault {
		t.Errorf("the daemons are %v", d)
	}
	mustLeave(t, w, h, p, device.TimeSliceDefault, part2)
}

func TestRePrepareWithUnreadableRecordJoinsAgain(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	mustPrepare(t, p, part1)
	mustPrepare(t, p, part2)
	w.disk.Put(recordFile(t, w, "uid-c"), nil)
	mustPrepare(t, p, part1)
	checkSharedState(t, w, h, p, device.TimeSliceDefault)
	mustLeave(t, w, h, p, device.TimeSliceDefault, part2, part1)
}

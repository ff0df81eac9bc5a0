// Claims share an MPS daemon, which needs the supervisor to start and to stop but not to go on.

package prepare_test

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

func TestOneMPSDaemonServesAllDevicesOfAConfiguration(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	c := shareBy(
		newClaim("c", allocated("a", gpu0), allocated("b", gpu1)),
		"GpuConfig",
		`{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":40,"defaultPinnedDeviceMemoryLimit":"10Gi",`+
			`"defaultPerDevicePinnedMemoryLimit":{"1":"5Gi"},"multiUser":true}}`,
	)
	mustPrepare(t, p, c)
	want := mps.Daemon{ID: "uid-c-0", Devices: []string{"GPU-0", "GPU-1"}, ThreadPercentage: ptr.To(40),
		MemoryLimits: map[int]uint64{0: 10240, 1: 5120}, MultiUser: true}
	if got := w.daemons.running["uid-c-0"]; !reflect.DeepEqual(got, want) {
		t.Errorf("the daemon is %+v", got)
	}
	a, b := h.of(t, gpu0).ComputeMode, h.of(t, gpu1).ComputeMode
	if a != device.ComputeExclusiveProcess || b != device.ComputeExclusiveProcess {
		t.Errorf("the compute modes are %s and %s", a, b)
	}
	if spec := w.specs.of(c.UID); strings.Count(spec, "/mps/uid-c-0") != 2 || strings.Count(spec, "CUDA_MPS_PIPE_DIRECTORY") != 2 ||
		strings.Contains(spec, "LIMIT") {
		t.Errorf("the spec is %s", spec)
	}
	mustPrepare(t, p, c)
	mustUnprepare(t, p, c.UID)
	if a, b := h.of(t, gpu0).ComputeMode, h.of(t, gpu1).ComputeMode; len(w.daemons.running) != 0 || a != device.ComputeDefault ||
		b != device.ComputeDefault {
		t.Errorf("left: %v, %s, %s", w.daemons.running, a, b)
	}
	checkClean(t, w)
}

// A process can use only one MPS daemon. So each configuration must get its own daemon, and a
// device without an MPS configuration must get none.
func TestEachConfigurationHasItsOwnMPSDaemon(t *testing.T) {
	w := newWorld(t)
	withMPS(w)
	p := w.plugin(t)
	partitions := shareEach(newClaim("p", allocated("a", small0), allocated("b", neighbor)), "MigDeviceConfig", byMPS)
	mustPrepare(t, p, partitions)
	for id, device := range map[string]string{"uid-p-0": "MIG-1", "uid-p-1": "MIG-2"} {
		if got := w.daemons.running[id].Devices; !slices.Equal(got, []string{device}) {
			t.Errorf("daemon %s has %q", id, got)
		}
	}
	if spec := w.specs.of(partitions.UID); strings.Count(spec, "/mps/uid-p-0") != 1 || strings.Count(spec, "/mps/uid-p-1") != 1 {
		t.Errorf("the spec is %s", spec)
	}
	mustUnprepare(t, p, partitions.UID)
	neighbor := shareBy(newClaim("c", allocated("a", gpu0), allocated("b", gpu1)), "GpuConfig", byMPS)
	neighbor.Status.Allocation.Devices.Config[0].Requests = []string{"a"}
	mustPrepare(t, p, neighbor)
	if spec := w.specs.of(neighbor.UID); len(w.daemons.running) != 1 || strings.Count(spec, "/mps/") != 1 {
		t.Errorf("daemons %v, the spec is %s", w.daemons.running, spec)
	}
	mustUnprepare(t, p, neighbor.UID)
	checkClean(t, w)
}

// An index in defaultPerDevicePinnedMemoryLimit must count the sorted UUIDs, as in NVIDIA's DRA
// driver:
// https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu/blob/main/cmd/gpu-kubelet-plugin/allocatable.go,
// UUIDs.
func TestMemoryLimitIndexFollowsUUIDOrder(t *testing.T) {
	for name, c := range map[string]struct {
		perDevice string
		want      map[int]uint64
	}{
		"index 0 is the second request's GPU": {`"0":"5Gi"`, map[int]uint64{1: 5120}},
		"index 1 is the first request's GPU":  {`"1":"6Gi"`, map[int]uint64{0: 6144}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			withMPS(w)
			p := w.plugin(t)
			claim := shareBy(newClaim("c", allocated("a", gpu1), allocated("b", gpu0)), "GpuConfig",
				`{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{`+c.perDevice+`}}}`)
			mustPrepare(t, p, claim)
			want := mps.Daemon{ID: "uid-c-0", Devices: []string{"GPU-1", "GPU-0"}, MemoryLimits: c.want}
			if got := w.daemons.running["uid-c-0"]; !reflect.DeepEqual(got, want) {
				t.Errorf("the daemon is %+v, want %+v", got, want)
			}
			mustUnprepare(t, p, claim.UID)
			checkClean(t, w)
		})
	}
}

// A thread percentage of 0 must mean no limit, as with NVIDIA's DRA driver. There the MPS control
// daemon refuses 0 and stays at 100 (test/nvmlsim/conformance).
func TestZeroThreadPercentageIsNoLimit(t *testing.T) {
	w := newWorld(t)
	withMPS(w)
	p := w.plugin(t)
	c := shareBy(newClaim("c", allocated("a", gpu0)), "GpuConfig", `{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":0}}`)
	mustPrepare(t, p, c)
	if got := w.daemons.running["uid-c-0"]; got.ThreadPercentage != nil {
		t.Errorf("the daemon is %+v", got)
	}
	mustUnprepare(t, p, c.UID)
	checkClean(t, w)
}

func TestHugeMemoryLimitIsStillALimit(t *testing.T) {
	w := newWorld(t)
	withMPS(w)
	p := w.plugin(t)
	c := shareBy(newClaim("c", allocated("r", gpu0)), "GpuConfig", `{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"1e30"}}`)
	if _, err := p.Prepare(t.Context(), c); err == nil && w.daemons.running["uid-c-0"].MemoryLimits[0] == 0 {
		t.Errorf("the daemon lacks the requested limit: %+v", w.daemons.running)
	}
}

func TestMPSDaemonFollowsRecreatedPartition(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	c := shareBy(newClaim("c", allocated("a", small0)), "MigDeviceConfig", byMPS)
	mustPrepare(t, p, c)
	got := w.daemons.running["uid-c-0"].Devices
	if !slices.Equal(got, []string{"MIG-1"}) || h.of(t, gpu0).ComputeMode != device.ComputeDefault {
		t.Errorf("the daemon has %q, the compute mode is %s", got, h.of(t, gpu0).ComputeMode)
	}
	h.of(t, gpu0).RemoveInstances()
	w.scan()
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := w.daemons.running["uid-c-0"].Devices; !slices.Equal(got, []string{"MIG-2"}) {
		t.Errorf("after the partition was recreated the daemon has %q", got)
	}
	mustUnprepare(t, p, c.UID)
	if len(w.daemons.running) != 0 || len(h.of(t, gpu0).Instances) != 0 {
		t.Errorf("left: %v", w.daemons.running)
	}
	checkClean(t, w)
}

func TestMPSClaimIsRefusedWithoutSupervisor(t *testing.T) {
	for _, s := range sharingScenes() {
		if !strings.HasSuffix(s.name, "first") && !strings.HasSuffix(s.name, "joined") {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			w, h, p, found := interruptedScene(t, s)
			needs := strings.HasPrefix(s.name, "MPS") || strings.HasPrefix(s.name, "a fraction")
			w.daemons.absent = true
			before := w.records()
			err := s.call(t, p)
			if !needs {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if cause.Of(err) != cause.NotReady || !strings.Contains(err.Error(), "mps.enabled") {
				t.Errorf("cause %s: %v", cause.Of(err), err)
			}
			if calls := h.takeCalls(); len(calls) > 0 || !slices.Equal(w.records(), before) {
				t.Errorf("asked %q, records %q", calls, w.records())
			}
			w.daemons.absent = false
			checkClaimsGoOn(t, w, h, s.claims, found)
		})
	}
}

// If an admin disables MPS, the MPS supervisor and its daemons are gone. Claims with MPS must then
// be unprepared without error, and not be prepared again.
func TestMPSClaimIsUnpreparedAfterMPSIsDisabled(t *testing.T) {
	for name, claim := range map[string]*resourceapi.ResourceClaim{
		"MPS":        shareBy(newClaim("c", allocated("r", gpu0)), "GpuConfig", byMPS),
		"a fraction": newClaim("c", fraction("r", share0, "1Gi", "0")),
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			h := withMPS(w)
			mustPrepare(t, w.plugin(t), claim)
			w.mpsDisabled = true
			clear(w.daemons.running)
			p := w.plugin(t)
			if _, err := p.Prepare(t.Context(), claim); cause.Of(err) != cause.Claim || !strings.Contains(err.Error(), "MPS is switched off") {
				t.Errorf("for another Pod of the claim: %v", err)
			}
			mustUnprepare(t, p, claim.UID)
			if mode := h.of(t, gpu0).ComputeMode; mode != device.ComputeDefault {
				t.Errorf("the compute mode is %s", mode)
			}
			checkClean(t, w)
		})
	}
}

// If the MPS supervisor ends, its daemons end too. The claims must work again after it restarted,
// and must be unprepared without it.
func TestMPSClaimsOutliveTheSupervisor(t *testing.T) {
	for _, s := range sharingScenes() {
		if !strings.HasSuffix(s.name, "last leaves") && !strings.HasSuffix(s.name, "first leaves") {
			continue
		}
		needs := strings.HasPrefix(s.name, "MPS") || strings.HasPrefix(s.name, "a fraction")
		for _, back := range []bool{false, true} {
			t.Run(s.name, func(t *testing.T) {
				w, h, p, found := interruptedScene(t, s)
				w.daemons.absent = true
				clear(w.daemons.running)
				if err := p.Reconcile(t.Context()); needs != (err != nil && strings.Contains(err.Error(), "mps.enabled")) {
					t.Errorf("Reconcile: %v", err)
				}
				if back {
					w.daemons.absent = false
					checkClaimsGoOn(t, w, h, s.claims, found)
					return
				}
				for _, c := range s.claims {
					mustUnprepare(t, p, c.UID)
				}
				if len(w.holders()) != 0 {
					t.Errorf("left: %q", w.holders())
				}
				checkSharedState(t, w, h, p, found)
				checkClean(t, w)
			})
		}
	}
}

func TestUnstoppableDaemonKeepsOnlyItsClaim(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	synctest.Test(t, func(t *testing.T) {
		const kubelets = 45 * time.Second
		p := w.plugin(t)
		mustPrepare(t, p, part1)
		w.daemons.stuck = true
		start := time.Now()
		done := make(chan error)
		go func() { done <- p.Unprepare(t.Context(), part1.UID) }()
		synctest.Wait()
		mustPrepare(t, p, newClaim("neighbor", fraction("r", share1, "1Gi", "0")))
		if took := time.Since(start); took > 0 {
			t.Errorf("another GPU's claim waited for %s", took)
		}
		if err := <-done; err == nil || !strings.Contains(err.Error(), "within 20s") || time.Since(start) > steps.DestroyTime {
			t.Errorf("after %s: %v", time.Since(start), err)
		}
		w.daemons.stuck = false
		mustUnprepare(t, p, part1.UID)
		// Now the daemon hangs both when it starts and when it stops.
		w.daemons.stuck, w.daemons.hang["GPU-0"] = true, true
		start = time.Now()
		if _, err := p.Prepare(t.Context(), part2); err == nil || time.Since(start) > kubelets-10*time.Second {
			t.Errorf("after %s: %v", time.Since(start), err)
		}
		if len(w.records()) != 2 {
			t.Errorf("the failed revert is forgotten: %q", w.records())
		}
		w.daemons.stuck = false
		clear(w.daemons.hang)
		if err := p.Reconcile(t.Context()); err != nil {
			t.Error(err)
		}
		checkSharedState(t, w, h, p, device.TimeSliceDefault)
	})
}

func TestLeftoverDaemonsAreStopped(t *testing.T) {
	for name, lose := range map[string]func(*testing.T, *plugin) (left int){
		"all files": func(t *testing.T, p *plugin) int {
			removeHolders(t, p)
			for _, uid := range []types.UID{part1.UID, "uid-alone"} {
				if err := p.Records.Remove(uid); err != nil {
					t.Fatal(err)
				}
			}
			return 0
		},
		// The claims that use the MPS daemons still have records, so Reconcile must write the removed
		// files, which list the daemons' claims, again.
		"the holders' files": func(t *testing.T, p *plugin) int { removeHolders(t, p); return 2 },
		"nothing":            func(*testing.T, *plugin) int { return 2 },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			withMPS(w)
			p := w.plugin(t)
			mustPrepare(t, p, part1)
			mustPrepare(t, p, shareBy(newClaim("alone", allocated("r", gpu1)), "GpuConfig", byMPS))
			left := lose(t, p)
			w.daemons.running["uid-unknown-1"] = mps.Daemon{ID: "uid-unknown-1"}
			for range 2 {
				if err := p.Reconcile(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if len(w.daemons.running) != left || w.daemons.running["uid-unknown-1"].ID != "" {
				t.Errorf("%d are to be left, there are %v", left, w.daemons.running)
			}
		})
	}
}

// If the CDI specs cannot be listed, Reconcile must still stop the leftover MPS daemon.
func TestLeftoverDaemonStopsThoughSpecsCannotBeListed(t *testing.T) {
	w := newWorld(t)
	withMPS(w)
	mustPrepare(t, w.plugin(t), newClaim("bad", fraction("r", share0, "1Gi", "0")))
	if err := w.disk.Remove(recordFile(t, w, "uid-bad")); err != nil {
		t.Fatal(err)
	}
	w.specs.unlisted = errors.New("input/output error")
	if err := w.plugin(t).Reconcile(t.Context()); !errors.Is(err, w.specs.unlisted) {
		t.Errorf("the failure is not reported: %v", err)
	}
	if len(w.daemons.running) != 0 || len(w.holders()) != 0 {
		t.Errorf("left: %v, %q", w.daemons.running, w.holders())
	}
}

// An MPS daemon without a file that lists its claims must not be stopped while a claim's unreadable
// record may name it, or while a call has the GPU's lock.
func TestDaemonOfUnreadableRecordIsLeftAlone(t *testing.T) {
	w := newWorld(t)
	withMPS(w)
	p := w.plugin(t)
	mustPrepare(t, p, part1)
	removeHolders(t, p)
	w.disk.Put(recordFile(t, w, "uid-c"), []byte("{"))
	reconcileUnreadable(t, p)
	if len(w.daemons.running) != 1 {
		t.Error(w.daemons.running)
	}
	mustUnprepare(t, p, part1.UID)
	synctest.Test(t, func(t *testing.T) {
		p := w.plugin(t)
		held, err := p.Locks.Acquire(t.Context(), gpu0)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Reconcile(t.Context()); err == nil || len(w.daemons.running) != 1 {
			t.Errorf("while a call holds the GPU: %v, %v", err, w.daemons.running)
		}
		held.Release()
		if err := p.Reconcile(t.Context()); err != nil || len(w.daemons.running) != 0 {
			t.Errorf("%v, %v", err, w.daemons.running)
		}
	})
}

func removeHolders(t *testing.T, p *plugin) {
	t.Helper()
	keys, err := p.Records.Holders()
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		if err := p.Records.RemoveHolder(key); err != nil {
			t.Fatal(err)
		}
	}
}

// A fraction has a limited part of a device's memory and compute, and claims never get more than
// there is.

package prepare_test

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
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
	daemon := mps.Daemon{ID: share0, Devices: []string{"GPU-0"}, MemoryLimits: map[int]uint64{}, MultiUser: true}
	if len(w.daemons.running) != 1 || !reflect.DeepEqual(w.daemons.running[share0], daemon) ||
		h.of(t, gpu0).ComputeMode != device.ComputeExclusiveProcess {
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
	if len(w.daemons.running) != 0 || h.of(t, gpu0).ComputeMode != device.ComputeDefault {
		t.Errorf("left: %v, %s", w.daemons.running, h.of(t, gpu0).ComputeMode)
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
			if got := strings.Count(spec, "/limit/GPU-0/0/4096"); got > 0 != tc.want || strings.Count(spec, "/limit/") != got {
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

// Five claims are each allocated almost all of one GPU. That happens after Pods were deleted by
// force: the scheduler regards their shares as free, but the Pods still run. Prepare must accept
// only one of these claims at a time.
func TestOneOfFiveNearlyFullSharesIsPrepared(t *testing.T) {
	w := newWorldWithShares(t)
	claims := make([]*resourceapi.ResourceClaim, 5)
	for i := range claims {
		claims[i] = newClaim(fmt.Sprintf("c%d", i), fraction("r", share0, "38Gi", "100"))
	}
	mustPrepare(t, w.plugin(t), claims[0])
	for _, c := range claims[1:] {
		// A new plugin process handles each call, so the test fails if the capacity in use is kept only
		// in memory.
		p := w.plugin(t)
		if err := p.Reconcile(t.Context()); err != nil {
			t.Fatal(err)
		}
		_, err := p.Prepare(t.Context(), c)
		checkCapacityError(t, err, "cores", "100", "100", "100", "c0")
		mustPrepare(t, p, claims[0])
	}
	p := w.plugin(t)
	mustUnprepare(t, p, claims[0].UID)
	mustPrepare(t, p, claims[3])
	_, err := p.Prepare(t.Context(), claims[0])
	checkCapacityError(t, err, "cores", "100", "100", "100", "c3")
	mustUnprepare(t, p, claims[3].UID)
	checkClean(t, w)
}

func TestSharesAreRefusedWhenCapacityIsExceeded(t *testing.T) {
	withoutCores := fraction("r", share0, "1Gi", "0")
	delete(withoutCores.ConsumedCapacity, "cores")
	for name, c := range map[string]struct {
		held                   []result
		asked                  []result
		capacity, a, h, totals string
	}{
		"memory": {[]result{fraction("r", share0, "38Gi", "0")}, []result{fraction("r", share0, "38Gi", "0")},
			"memory", "38Gi", "38Gi", "40Gi"},
		"cores": {[]result{fraction("r", share0, "1Gi", "60")}, []result{fraction("r", share0, "1Gi", "60")},
			"cores", "60", "60", "100"},
		"an exact fit": {[]result{fraction("r", share0, "20Gi", "50")}, []result{fraction("r", share0, "20Gi", "50")},
			"", "", "", ""},
		"cores without a request": {[]result{fraction("r", share0, "1Gi", "100")}, []result{fraction("r", share0, "1Gi", "0")}, "",
			"", "", ""},
		"cores missing from the allocation": {[]result{fraction("r", share0, "1Gi", "100")}, []result{withoutCores}, "", "", "", ""},
		"another GPU": {[]result{fraction("r", share0, "38Gi", "100")}, []result{fraction("r", share1, "38Gi", "100")},
			"", "", "", ""},
		"several shares in use": {[]result{fraction("a", share0, "15Gi", "0"), fraction("b", share0, "15Gi", "0")},
			[]result{fraction("r", share0, "11Gi", "0")}, "memory", "11Gi", "30Gi", "40Gi"},
		"several requested shares": {[]result{fraction("r", share0, "15Gi", "0")},
			[]result{fraction("a", share0, "13Gi", "0"), fraction("b", share0, "13Gi", "0")}, "memory", "26Gi", "15Gi", "40Gi"},
		"a partition's memory": {[]result{fraction("r", migShare0, "5Gi", "0")}, []result{fraction("r", migShare0, "5Gi", "0")},
			"memory", "5Gi", "5Gi", "9984Mi"},
		"enough memory of a partition": {[]result{fraction("r", migShare0, "4Gi", "0")}, []result{fraction("r", migShare0, "4Gi", "0")},
			"", "", "", ""},
		"plain shares": {[]result{plain("a", share0), plain("b", share0)}, []result{plainShares("r", share0, "2")}, "", "", "", ""},
		"plain shares of a partition": {[]result{plain("a", migShare0), plain("b", migShare0)}, []result{plain("r", migShare0)},
			"", "", "", ""},
		"admin access to a full device":   {[]result{fraction("r", share0, "40Gi", "100")}, []result{admin("r", share0)}, "", "", "", ""},
		"a full device with admin access": {[]result{admin("r", share0)}, []result{fraction("r", share0, "40Gi", "100")}, "", "", "", ""},
		"admin access with an amount": {[]result{withShareID(admin("r", share0))}, []result{fraction("r", share0, "40Gi", "100")}, "",
			"", "", ""},
		"admin access and shares in one claim": {[]result{fraction("r", share0, "40Gi", "100")}, []result{withShareID(admin("r", share0))}, "",
			"", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorldWithShares(t)
			p := w.plugin(t)
			held, asked := newClaim("held", c.held...), newClaim("asked", c.asked...)
			mustPrepare(t, p, held)
			_, err := w.plugin(t).Prepare(t.Context(), asked)
			if c.capacity == "" {
				if err != nil {
					t.Error(err)
				}
			} else {
				checkCapacityError(t, err, c.capacity, c.a, c.h, c.totals, "held")
			}
			mustUnprepare(t, p, held.UID)
			mustPrepare(t, p, asked)
			mustUnprepare(t, p, asked.UID)
			checkClean(t, w)
		})
	}
}

func checkCapacityError(t *testing.T, err error, capacity, asked, held, there string, holders ...string) {
	t.Helper()
	if cause.Of(err) != cause.Held {
		t.Errorf("cause %s: %v", cause.Of(err), err)
		return
	}
	var names []string
	for _, h := range holders {
		names = append(names, fmt.Sprintf("default/%s (UID uid-%s)", h, h))
	}
	for _, said := range []string{
		fmt.Sprintf("asks for %s of capacity %s of device ", asked, capacity),
		fmt.Sprintf(", which has %s, and other claims use %s: ", there, held),
		": " + strings.Join(names, ", "),
	} {
		if !strings.Contains(err.Error(), said) {
			t.Errorf("%v does not say %q", err, said)
		}
	}
	if n := strings.Count(err.Error(), "(UID "); n != len(holders) {
		t.Errorf("%v names %d claims", err, n)
	}
}

// plainShares returns a plain share that consumes this many of the device's shares.
func plainShares(request, name, shares string) result {
	r := shareOf(request, name)
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"shares": resource.MustParse(shares)}
	return r
}

// withShareID makes r, a result with admin access, consume capacity of the device, as a share does.
func withShareID(r result) result {
	r.ConsumedCapacity = fraction("r", share0, "38Gi", "100").ConsumedCapacity
	return r
}

// Prepare must wait for capacity, and succeed as soon as one of the claims that use the GPU is
// unprepared.
func TestPrepareWaitsBrieflyForCapacity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorldWithShares(t)
		w.conflictWait, w.stopping = 5*time.Second, make(chan struct{})
		next := newClaim("next", fraction("r", share0, "15Gi", "0"))
		w.readClaim = func() (*resourceapi.ResourceClaim, error) { return next, nil }
		p := w.plugin(t)
		first, second := newClaim("first", fraction("r", share0, "15Gi", "0")), newClaim("second", fraction("r", share0, "15Gi", "0"))
		mustPrepare(t, p, first)
		mustPrepare(t, p, second)
		began, ended := time.Now(), make(chan error)
		go func() {
			_, err := p.Prepare(t.Context(), next)
			ended <- err
		}()
		synctest.Wait()
		mustUnprepare(t, p, second.UID)
		if err := <-ended; err != nil || time.Since(began) > 2*conflictPoll {
			t.Error(err, time.Since(began))
		}
	})
}

func TestClaimIsNotCountedAgainstItself(t *testing.T) {
	w := newWorldWithShares(t)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("other", fraction("r", share0, "10Gi", "0")))
	for _, memory := range []string{"30Gi", "30Gi", "20Gi", "25Gi"} {
		mustPrepare(t, p, newClaim("c", fraction("r", share0, memory, "0")))
	}
	_, err := p.Prepare(t.Context(), newClaim("c", fraction("r", share0, "31Gi", "0")))
	checkCapacityError(t, err, "memory", "31Gi", "10Gi", "40Gi", "other")
	mustPrepare(t, p, newClaim("c", fraction("r", share0, "30Gi", "0")))
}

// After a reboot all claims must get their shares again, even if the driver reserves more memory by
// then, or the GPU has less.
func TestRePrepareDoesNotRecheckCapacity(t *testing.T) {
	w := newWorldWithShares(t)
	claims := []*resourceapi.ResourceClaim{
		newClaim("a", fraction("r", share0, "20Gi", "0")), newClaim("b", fraction("r", share0, "20Gi", "0")),
	}
	for _, c := range claims {
		mustPrepare(t, w.plugin(t), c)
	}
	w.snapshot.Node.GPUs[0].MemoryBytes -= gib
	w.reboot()
	for _, c := range claims {
		mustPrepare(t, w.plugin(t), c)
	}
	_, err := w.plugin(t).Prepare(t.Context(), newClaim("c", fraction("r", share0, "1Gi", "0")))
	checkCapacityError(t, err, "memory", "1Gi", "40Gi", "39Gi", "a", "b")
}

func TestConsumedCapacityIsRecorded(t *testing.T) {
	w := newWorldWithShares(t)
	c := newClaim("c", fraction("a", share0, "10Gi", "25"), fraction("b", share0, "1Gi", "0"))
	mustPrepare(t, w.plugin(t), c)
	w.disk.PowerCut()
	r, found, err := w.plugin(t).Records.Load(c.UID)
	if err != nil || !found || len(r.Devices) != 2 {
		t.Fatal(r, found, err)
	}
	for i, want := range []map[string]string{{"memory": "10Gi", "cores": "25"}, {"memory": "1Gi", "cores": "0"}} {
		for name, amount := range want {
			if q := r.Devices[i].ConsumedCapacity[name]; q.String() != amount {
				t.Errorf("share %d has %s of %s, want %s", i, q.String(), name, amount)
			}
		}
	}
}

// If the record of one claim is unreadable, it is unknown how much that claim uses. So Prepare must
// refuse a further share of the same GPU.
func TestShareIsRefusedWhileAnotherRecordIsUnreadable(t *testing.T) {
	w := newWorldWithShares(t)
	p := w.plugin(t)
	first, second := newClaim("first", fraction("r", share0, "10Gi", "0")), newClaim("second", fraction("r", share0, "10Gi", "0"))
	mustPrepare(t, p, first)
	mustPrepare(t, p, second)
	w.disk.Put(recordFile(t, w, "uid-first"), []byte("{"))
	_, err := p.Prepare(t.Context(), newClaim("third", fraction("r", share0, "1Gi", "0")))
	if cause.Of(err) != cause.Held || !strings.Contains(err.Error(), "uid-first") || !strings.Contains(err.Error(), "cannot be read") ||
		strings.Contains(err.Error(), "another way") {
		t.Errorf("cause %s: %v", cause.Of(err), err)
	}
	// But a claim keeps the share that it had before, even if it is prepared again after a reboot.
	w.reboot()
	mustPrepare(t, w.plugin(t), second)
}

func TestConcurrentInstancesNeverExceedCapacity(t *testing.T) {
	w := newWorldWithShares(t)
	claims := map[string]*resourceapi.ResourceClaim{}
	for i := range 6 {
		c := newClaim(fmt.Sprintf("c%d", i), fraction("r", share0, "15Gi", "0"))
		claims[c.Name] = c
	}
	var mu sync.Mutex
	prepared := map[string]bool{}
	var wg sync.WaitGroup
	for range 2 {
		p := w.plugin(t)
		p.OnRead = func(_ context.Context, _, name string) (*resourceapi.ResourceClaim, error) { return claims[name], nil }
		for _, c := range claims {
			wg.Go(func() {
				_, err := p.Prepare(t.Context(), c)
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					prepared[c.Name] = true
				} else if cause.Of(err) != cause.Held || !strings.Contains(err.Error(), " of capacity ") || strings.Count(err.Error(), "(UID ") != 2 {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	if len(prepared) != 2 {
		t.Errorf("prepared: %v", prepared)
	}
}

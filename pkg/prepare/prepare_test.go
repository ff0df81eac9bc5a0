package prepare_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/claimlock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

func mustPrepare(t *testing.T, p *plugin, c *resourceapi.ResourceClaim) []kubeletplugin.Device {
	t.Helper()
	devices, err := p.Prepare(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return devices
}

func mustUnprepare(t *testing.T, p *plugin, uid types.UID) {
	t.Helper()
	if err := p.Unprepare(t.Context(), uid); err != nil {
		t.Fatal(err)
	}
}

// checkClean fails the test if a record, a CDI spec or another file of a claim is left on the node.
func checkClean(t *testing.T, w *world) {
	t.Helper()
	if r := w.records(); len(r) != 0 {
		t.Errorf("records left: %q", r)
	}
	if s, _ := w.specs.Claims(); len(s) != 0 {
		t.Errorf("specs left: %q", s)
	}
	locks, err := os.ReadDir(w.locks)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range locks {
		if l.Name() != claimLocks && !strings.HasPrefix(l.Name(), "gpu-") {
			t.Errorf("lock left: %s", l.Name())
		}
	}
}

func TestPrepareAnswersForEachResult(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	foreign := allocated("nic", "eth0")
	foreign.Driver = "net.example.com"
	got := mustPrepare(t, p, newClaim("c", allocated("a", gpu0), foreign, allocated("b/large", gpu1)))
	want := []kubeletplugin.Device{
		{Requests: []string{"a"}, PoolName: pool, DeviceName: gpu0, CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/base=driver",
			"k8s.gpu.nvidia.com/claim=uid-c-" + gpu0}},
		{Requests: []string{"b/large"}, PoolName: pool, DeviceName: gpu1, CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/base=driver",
			"k8s.gpu.nvidia.com/claim=uid-c-" + gpu1}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if spec := w.specs.of("uid-c"); !strings.Contains(spec, "/dev/nvidia0") || !strings.Contains(spec, "/dev/nvidia1") ||
		!strings.Contains(spec, "uid-c-"+gpu0) {
		t.Errorf("the spec is %s", spec)
	}
	if !strings.Contains(w.specs.base, "libcuda") {
		t.Errorf("the base spec is %s", w.specs.base)
	}
	if held, err := p.Usage(); err != nil || held != (ledger.Usage{Claims: 1, GPUs: 2}) {
		t.Error(held, err)
	}
	mustUnprepare(t, p, "uid-c")
	checkClean(t, w)
	mustUnprepare(t, p, "uid-c")
	mustUnprepare(t, p, "never seen")
}

func TestClaimOfOtherDriversLeavesNoFiles(t *testing.T) {
	w := newWorld(t)
	w.snapshot.Ready = false
	foreign := allocated("nic", "eth0")
	foreign.Driver = "net.example.com"
	if devices := mustPrepare(t, w.plugin(t), newClaim("c", foreign)); len(devices) != 0 {
		t.Error(devices)
	}
	checkClean(t, w)
}

// A record without devices, which this driver never writes, must not make Prepare fail.
func TestEmptyRecordIsRemovedByPrepare(t *testing.T) {
	for name, bootID := range map[string]string{"of this boot": "boot-1", "of an earlier one": "boot-0"} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			p := w.plugin(t)
			list, err := steps.Encode([]steps.Step{&steps.ClaimSpec{}})
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Records.Save(checkpoint.Record{ClaimUID: "uid-c", Namespace: "default", Name: "c", State: checkpoint.Prepared,
				BootID: bootID, Steps: list}); err != nil {
				t.Fatal(err)
			}
			foreign := allocated("nic", "eth0")
			foreign.Driver = "net.example.com"
			if devices := mustPrepare(t, p, newClaim("c", foreign)); len(devices) != 0 {
				t.Error(devices)
			}
			checkClean(t, w)
		})
	}
}

func TestShareHasItsOwnID(t *testing.T) {
	r := allocated("a", gpu0)
	r.ShareID = ptr.To(types.UID("share"))
	got := mustPrepare(t, newWorld(t).plugin(t), newClaim("c", r))
	if id := got[0].CDIDeviceIDs[1]; id != "k8s.gpu.nvidia.com/claim=uid-c-"+gpu0+"-share" || *got[0].ShareID != "share" {
		t.Error(got)
	}
}

func TestRefusals(t *testing.T) {
	elsewhere := allocated("r", gpu0)
	elsewhere.Pool = "node-2"
	for _, c := range []struct {
		name  string
		node  func(*world)
		claim *resourceapi.ResourceClaim
		cause cause.Cause
		says  []string
	}{
		{"a claim that is not allocated", nil, &resourceapi.ResourceClaim{}, cause.Claim, []string{"not allocated"}},
		{"a device of another node", nil, newClaim("c", elsewhere), cause.Claim, []string{"request r", gpu0, "node-2", pool}},
		{"an unknown device", nil, newClaim("c", allocated("r", "foo")), cause.Device, []string{"request r", "foo", gpu0, gpu1}},
		{"a device that vanished", func(w *world) { w.snapshot.Node.GPUs = w.snapshot.Node.GPUs[:1] }, newClaim("c", allocated("r", gpu1)),
			cause.Device, []string{gpu1, "it has", gpu0}},
		{"no device at all", func(w *world) { w.snapshot.Node.GPUs = nil }, newClaim("c", allocated("r", gpu1)), cause.Device,
			[]string{gpu1, "no GPUs"}},
		{"a broken device", func(w *world) {
			w.snapshot.Node.GPUs = w.snapshot.Node.GPUs[:1]
			w.snapshot.Node.Problems = []nvidia.Problem{{PCIAddress: "0000:1c:00.0", Message: "it fell off the bus"}}
		}, newClaim("c", allocated("r", gpu1)), cause.Device, []string{gpu1, "it fell off the bus"}},
		{"a node that is not ready", func(w *world) { w.snapshot.Ready, w.snapshot.Reason = false, "no driver: install it" },
			newClaim("c", allocated("r", gpu0)), cause.NotReady, []string{"the node is not ready: no driver: install it"}},
		{"a node that is not ready without a reason", func(w *world) { w.snapshot.Ready = false }, newClaim("c", allocated("r", gpu0)),
			cause.NotReady, []string{"the node is not ready: "}},
		{"one device twice", nil, newClaim("c", allocated("a", gpu0), allocated("b", gpu0)), cause.Claim, []string{"requests a and b", gpu0}},
		{"sharing by MPS", nil, configured(newClaim("c", allocated("r", gpu0)),
			`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS"}}`), cause.NotReady,
			[]string{"the claim needs MPS", "mps.enabled"}},
		{"sharing by time slices", nil, configured(newClaim("c", allocated("r", gpu0)),
			`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing"}}`), cause.Step,
			[]string{gpu0, "time slices"}},
		{"a malformed configuration", nil, configured(newClaim("c", allocated("r", gpu0)), `{`), cause.Claim,
			[]string{"the claim's configuration"}},
		{"a missing device node", func(w *world) {
			w.missing = map[string]error{"/dev/nvidia0": errors.New("device node /dev/nvidia0 is missing")}
		}, newClaim("c", allocated("r", gpu0)), cause.Device, []string{gpu0, "device node /dev/nvidia0 is missing"}},
		{"a missing library", func(w *world) {
			w.missing = map[string]error{"/usr/lib/libcuda.so.1": errors.New("mount source libcuda is missing")}
		}, newClaim("c", allocated("r", gpu0)), cause.NotReady, []string{"mount source libcuda is missing"}},
		{"a very long reason of many lines", func(w *world) { w.snapshot.Ready, w.snapshot.Reason = false, strings.Repeat("ä\n", 1000) },
			newClaim("c", allocated("r", gpu0)), cause.NotReady, []string{"ä; ä"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			if c.node != nil {
				c.node(w)
			}
			_, err := w.plugin(t).Prepare(t.Context(), c.claim)
			if err == nil {
				t.Fatal("prepared")
			}
			if cause.Of(err) != c.cause {
				t.Errorf("cause %q", cause.Of(err))
			}
			for _, want := range append(c.says, "claim "+c.claim.Namespace+"/"+c.claim.Name) {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
			if strings.Contains(err.Error(), "\n") || len(err.Error()) > 1024 {
				t.Errorf("does not fit into an Event: %q", err)
			}
			checkClean(t, w)
		})
	}
}

func TestDeviceInUseIsRefusedNamingTheClaim(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("first", allocated("r", gpu0)))
	_, err := w.plugin(t).Prepare(t.Context(), newClaim("second", allocated("free", gpu1), allocated("r", gpu0)))
	var held *prepare.InUseError
	if !errors.As(err, &held) || cause.Of(err) != cause.Held {
		t.Fatal(err)
	}
	for _, want := range []string{"default/second", "request r", gpu0, "default/first", "uid-first"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
	if w.specs.of("uid-second") != "" || len(w.records()) != 1 {
		t.Error("instances or records are left")
	}
	mustUnprepare(t, p, "uid-first")
	mustPrepare(t, p, newClaim("second", allocated("r", gpu0)))
}

func TestAdminAccessNeitherBlocksNorIsBlocked(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("user", allocated("r", gpu0)))
	devices := mustPrepare(t, p, newClaim("admin", admin("a", gpu0), admin("b", gpu0), allocated("c", gpu1)))
	if len(devices) != 3 {
		t.Error(devices)
	}
	if n := strings.Count(w.specs.of("uid-admin"), "uid-admin-"+gpu0); n != 1 {
		t.Errorf("the spec names the device %d times", n)
	}
	mustUnprepare(t, p, "uid-user")
	mustPrepare(t, p, newClaim("next", allocated("r", gpu0)))
	if _, err := p.Prepare(t.Context(), newClaim("late", allocated("r", gpu1))); cause.Of(err) != cause.Held {
		t.Error(err)
	}
}

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

func TestPrepareAfterRebootRewritesSpec(t *testing.T) {
	w := newWorld(t)
	c := newClaim("c", allocated("r", gpu0))
	mustPrepare(t, w.plugin(t), c)
	w.reboot()
	w.snapshot.Node.GPUs[0] = newGPU("0000:1b:00.0", "GPU-0", "/dev/nvidia7")
	p := w.plugin(t)
	if err := errors.Join(p.Recover(t.Context()), p.RepairAllSpecs(t.Context())); err != nil {
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
	if err != nil || r.BootID != w.bootID || !strings.Contains(string(r.Steps[0].Params), "/dev/nvidia7") {
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
	if err := p.RepairAllSpecs(t.Context()); err == nil || w.specs.of("uid-c") != "" {
		t.Errorf("a restarted container gets the other card: %v", err)
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

func TestClaimWithMoreGPUsThanAFileNameFits(t *testing.T) {
	w := newWorld(t)
	w.snapshot.Node.GPUs = nil
	var results []result
	for i := range 16 {
		address := device.PCIAddress(fmt.Sprintf("0000:%02x:00.0", i))
		w.snapshot.Node.GPUs = append(w.snapshot.Node.GPUs, newGPU(address, fmt.Sprint("GPU-", i), fmt.Sprint("/dev/nvidia", i)))
		results = append(results, allocated(fmt.Sprint("r", i), address.WholeName()))
	}
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("large", results[:15]...))
	if r := w.records(); len(r) != 1 || r[0] != "uid-large_all.json" {
		t.Fatalf("the test needs another record: %q", r)
	}
	if held, err := p.Usage(); err != nil || held != (ledger.Usage{Claims: 1, GPUs: 15}) {
		t.Error(held, err)
	}
	mustPrepare(t, p, newClaim("rest", results[15:]...))
	if _, err := p.Prepare(t.Context(), newClaim("more", results[3])); cause.Of(err) != cause.Held ||
		!strings.Contains(err.Error(), "default/large") {
		t.Error(err)
	}
}

// While Prepare waits for the claim's lock, another call may unprepare the claim. So Prepare must
// read the claim again after the wait.
func TestPrepareRereadsClaimAfterWait(t *testing.T) {
	same := newClaim("c", allocated("r", gpu0))
	replaced := newClaim("c", allocated("r", gpu0))
	replaced.UID = "another"
	for _, c := range []struct {
		name  string
		claim *resourceapi.ResourceClaim
		err   error
		says  string
	}{
		{"unchanged", same, nil, ""},
		{"deleted", nil, errors.New("not found"), "not found"},
		{"replaced", replaced, nil, "another"},
		{"allocated anew", newClaim("c", allocated("r", gpu1)), nil, "allocation changed"},
		{"reserved for its next Pod", forPods(newClaim("c", allocated("r", gpu0)), "next"), nil, ""},
		{"no longer reserved", forPods(newClaim("c", allocated("r", gpu0))), nil, "not reserved"},
		{"no longer allocated", &resourceapi.ResourceClaim{ObjectMeta: same.ObjectMeta}, nil, "not allocated"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				w.readClaim = func() (*resourceapi.ResourceClaim, error) { return c.claim, c.err }
				p := w.plugin(t)
				other, err := p.Locks.Acquire(t.Context(), claimlock.ClaimName(same.UID))
				if err != nil {
					t.Fatal(err)
				}
				done := make(chan error)
				go func() {
					_, err := p.Prepare(t.Context(), same)
					done <- err
				}()
				synctest.Wait() // until Prepare waits for the lock
				other.Release()
				err = <-done
				if c.says == "" && err != nil || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
					t.Error(err)
				}
			})
		})
	}
}

func TestCallCanceledWhileWaitingChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		p := w.plugin(t)
		other, err := p.Locks.Acquire(t.Context(), claimlock.GPUNames(gpu0)...)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		w.readClaim = func() (*resourceapi.ResourceClaim, error) { return nil, ctx.Err() }
		done := make(chan error)
		go func() {
			_, err := p.Prepare(ctx, newClaim("c", allocated("r", gpu0)))
			done <- err
		}()
		synctest.Wait()
		cancel()
		if err := <-done; cause.Of(err) != cause.Canceled {
			t.Error(err)
		}
		other.Release()
		checkClean(t, w)
	})
}

func TestLockWaitEndsWithTheCall(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	claims, err := p.Locks.Acquire(t.Context(), claimlock.ClaimName("uid-a"))
	if err != nil {
		t.Fatal(err)
	}
	defer claims.Release()
	gpus, err := p.Locks.Acquire(t.Context(), claimlock.GPUNames(gpu0)...)
	if err != nil {
		t.Fatal(err)
	}
	defer gpus.Release()
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for _, name := range []string{"a", "b"} {
		if _, err := p.Prepare(gone, newClaim(name, allocated("r", gpu0))); cause.Of(err) != cause.Canceled || !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := p.Unprepare(gone, "uid-a"); cause.Of(err) != cause.Canceled {
		t.Error(err)
	}
	if len(w.records()) != 0 {
		t.Errorf("left %q", w.records())
	}
}

func TestConcurrentCallsGiveEachGPUToOneClaim(t *testing.T) {
	w := newWorld(t)
	claims := make([]*resourceapi.ResourceClaim, 8)
	for i := range claims {
		claims[i] = newClaim(fmt.Sprint("c", i), allocated("a", gpu0), allocated("b", gpu1))
	}
	var mu sync.Mutex
	prepared := map[types.UID]bool{}
	var wg sync.WaitGroup
	// Two plugin instances prepare the claims concurrently, as during an upgrade.
	for range 2 {
		p := w.plugin(t)
		p.OnRead = func(_ context.Context, _, name string) (*resourceapi.ResourceClaim, error) {
			for _, c := range claims {
				if c.Name == name {
					return c, nil
				}
			}
			return nil, errors.New("not found")
		}
		for _, c := range claims {
			wg.Go(func() {
				_, err := p.Prepare(t.Context(), c)
				if err != nil {
					if cause.Of(err) != cause.Held {
						t.Error(err)
					}
					return
				}
				mu.Lock()
				prepared[c.UID] = true
				mu.Unlock()
			})
		}
	}
	wg.Wait()
	if len(prepared) != 1 || len(w.records()) != 1 {
		t.Errorf("prepared %v, records %q", prepared, w.records())
	}
}

func TestFullDiskFailsAndLeavesNothing(t *testing.T) {
	for n := 1; ; n++ {
		w := newWorld(t)
		p := w.plugin(t)
		w.disk.FailAt(n, syscall.ENOSPC)
		c := newClaim("c", allocated("r", gpu0))
		_, err := p.Prepare(t.Context(), c)
		if w.disk.Writes() < n {
			if err != nil {
				t.Error(err)
			}
			return
		}
		if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "default/c") {
			t.Errorf("write %d: %v", n, err)
		}
		checkClean(t, w)
		mustPrepare(t, p, c)
	}
}

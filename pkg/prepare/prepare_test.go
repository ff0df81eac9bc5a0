// If Prepare succeeds, all that the claim's containers need exists; if it fails, nothing is left.

package prepare_test

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metadata"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

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

func TestShareHasItsOwnID(t *testing.T) {
	r := allocated("a", gpu0)
	r.ShareID = ptr.To(types.UID("share"))
	got := mustPrepare(t, newWorld(t).plugin(t), newClaim("c", r))
	if id := got[0].CDIDeviceIDs[1]; id != "k8s.gpu.nvidia.com/claim=uid-c-"+gpu0+"-share" || *got[0].ShareID != "share" {
		t.Error(got)
	}
}

// This test uses the real store of CDI specs, because the CDI library must accept the specs. The
// fake store does not check that.
func TestPrepareWithRealCDISpecs(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	store := cdi.NewStore(dir)
	p := w.plugin(t)
	p.with(func(n *steps.Node) { n.Specs = metadata.WithSpecs{Store: store, Files: metadata.NewFiles(t.TempDir())} })
	p.OnVerify = func(edits specs.ContainerEdits) error { return w.verify(edits) }
	mustPrepare(t, p, newClaim("c", admin("a", gpu0), admin("b", gpu0), allocated("c", gpu1)))
	file := filepath.Join(dir, "k8s.gpu.nvidia.com-claim_uid-c.json")
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after, err := os.ReadFile(file); err != nil || string(after) != string(before) {
		t.Errorf("%s, %v", after, err)
	}
	mustUnprepare(t, p, "uid-c")
	if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// Claims share the disk, so Prepare must make no more writes than these. Saving a record takes
// three writes: the file, its rename and the directory sync.
func TestPrepareWritesNoMoreThanNeeded(t *testing.T) {
	const save, baseSpec, spec, marked = 3, 1, 1, 3
	// A repeated Prepare only syncs a directory. The fake disk counts that as a write, although a real
	// disk that is up to date writes nothing.
	const settled = 1
	w := newWorld(t)
	withMIG(w)
	p := w.plugin(t)
	for _, c := range []struct {
		what, device string
		writes       int
	}{
		{"a whole GPU: the record once all is there", gpu1, save},
		{"a GPU's first partition, also the mark of its MIG mode", small0, marked + 4*save},
		{"a further partition: the plan, what was there before, the instance is there, all is there", gpu0 + "-mig-19-1", 4 * save},
	} {
		w.disk.StopAt(math.MaxInt)
		mustPrepare(t, p, newClaim(c.device, allocated("r", c.device)))
		if got := w.disk.Writes() - baseSpec - spec; got != c.writes {
			t.Errorf("%s: %d writes to the disk, and %d are needed", c.what, got, c.writes)
		}
		w.disk.StopAt(math.MaxInt)
		mustPrepare(t, p, newClaim(c.device, allocated("r", c.device)))
		if got := w.disk.Writes() - baseSpec - spec; got != settled {
			t.Errorf("%s: %d writes when it is prepared once more", c.what, got-settled)
		}
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

// Metrics show the Pod. A claim that no Pod owns may get other Pods while it stays prepared.
func TestRecordNamesThePodThatOwnsTheClaim(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	owned := newClaim("owned", allocated("a", gpu0))
	owned.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "worker-0", Controller: ptr.To(true)}}
	mustPrepare(t, p, owned)
	mustPrepare(t, p, newClaim("free", allocated("a", gpu1)))
	claims, err := p.ListPrepared()
	if err != nil || len(claims) != 2 || claims[0].Pod != "" || claims[1].Pod != "worker-0" {
		t.Errorf("%v, %+v", err, claims)
	}
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

func TestBrokenLockFileBlamesNoOtherCall(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	w.breakLocks(t)
	_, err := p.Prepare(t.Context(), newClaim("a", allocated("r", gpu0)))
	switch {
	case cause.Of(err) != cause.Record:
		t.Errorf("the cause is %q: %v", cause.Of(err), err)
	case !strings.Contains(err.Error(), w.locks):
		t.Errorf("%v does not name %s", err, w.locks)
	case strings.Contains(err.Error(), "another call"):
		t.Errorf("%v blames another call", err)
	}
}

package prepare_test

import (
	"context"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

func (h *hardware) SetComputeMode(_ context.Context, c device.Card, mode device.ComputeMode) error {
	op := fmt.Sprintf("set compute mode %s", mode)
	return h.call(op, c, func(s *fakeGPU) error {
		if s.on && mode == device.ComputeExclusiveProcess {
			return failure(device.FailureNotSupported, op, c)
		}
		s.mode = mode
		return nil
	})
}

func (h *hardware) TimeSlice(_ context.Context, c device.Card) (slice device.TimeSlice, err error) {
	err = h.call("time slice", c, func(s *fakeGPU) error {
		if s.unsliced {
			return failure(device.FailureNotSupported, "read the time slice", c)
		}
		slice = s.slice
		return nil
	})
	return slice, err
}

func (h *hardware) SetTimeSlice(_ context.Context, c device.Card, slice device.TimeSlice) error {
	return h.call(fmt.Sprintf("set time slice %d", slice), c, func(s *fakeGPU) error {
		s.slice = slice
		return nil
	})
}

// daemons fakes a node's MPS supervisor, which keeps running when the plugin restarts. A fake
// daemon starts only if its devices exist, and if no other process uses its whole GPUs.
type daemons struct {
	h       *hardware
	running map[string]mps.Daemon
	hang    map[string]bool // by device UUID: starting a daemon for it hangs
	apart   bool            // injected faults hit GPU calls but no daemon calls
	absent  bool            // the supervisor does not run
	stuck   bool            // stopping a daemon hangs
	ending  time.Duration   // how long a stop takes
}

var (
	_         steps.Daemons = &daemons{}
	errAbsent               = &mps.NotRunningError{Socket: "/mps/socket", Err: fs.ErrNotExist}
)

// withMPS adds fake MIG GPUs and a fake MPS supervisor to the node, and returns the fake GPUs.
func withMPS(w *world) *hardware {
	h := withMIG(w)
	w.daemons.h, w.daemons.absent = h, false
	return h
}

func (d *daemons) Start(ctx context.Context, daemon mps.Daemon) error {
	if err := daemon.Validate(); err != nil {
		return err
	}
	if d.absent {
		return fmt.Errorf("start MPS daemon %s: %w", daemon.ID, errAbsent)
	}
	if slices.ContainsFunc(daemon.Devices, func(uuid string) bool { return d.hang[uuid] }) {
		<-ctx.Done()
		return fmt.Errorf("start MPS daemon %s: the MPS supervisor has not answered in time: %w", daemon.ID, context.Cause(ctx))
	}
	return d.h.inject("start "+daemon.ID, func() error {
		for _, uuid := range daemon.Devices {
			if !d.h.serves(uuid) {
				return fmt.Errorf("start MPS daemon %s: no device %s is there for it alone", daemon.ID, uuid)
			}
		}
		d.running[daemon.ID] = daemon
		return nil
	})
}

func (d *daemons) List(context.Context) ([]mps.Status, error) {
	if d.absent {
		return nil, errAbsent
	}
	if d.h.disk.Stopped() {
		return nil, durabletest.ErrStopped
	}
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	var all []mps.Status
	for _, daemon := range d.running {
		all = append(all, mps.Status{Daemon: daemon, State: mps.Ready})
	}
	return all, nil
}

// Stop also succeeds for a daemon that ended with the supervisor, as with the real supervisor.
func (d *daemons) Stop(ctx context.Context, id string) error {
	ended := time.After(d.ending)
	if d.stuck {
		ended = nil
	}
	select {
	case <-ended:
	case <-ctx.Done():
		return fmt.Errorf("stop MPS daemon %s: the MPS supervisor has not answered in time: %w", id, context.Cause(ctx))
	}
	if d.apart {
		delete(d.running, id)
		return nil
	}
	return d.h.inject("stop "+id, func() error {
		delete(d.running, id)
		return nil
	})
}

// serves reports whether an MPS daemon could use the device: a GPU in exclusive mode, or an
// existing MIG device.
func (h *hardware) serves(uuid string) bool {
	for _, s := range h.cards {
		if s.uuid == uuid {
			return !s.on && s.mode == device.ComputeExclusiveProcess
		}
		for _, in := range s.instances {
			if slices.ContainsFunc(in.Compute, func(c device.ComputeInstance) bool { return c.UUID == uuid }) {
				return true
			}
		}
	}
	return false
}

func (d *daemons) edits(id string) specs.ContainerEdits {
	return specs.ContainerEdits{
		Env:    []string{"CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"},
		Mounts: []*specs.Mount{{HostPath: "/mps/" + id, ContainerPath: "/tmp/nvidia-mps"}},
	}
}

// verify fails if the edits mount the directory of a daemon that does not run.
func (d *daemons) verify(edits specs.ContainerEdits) error {
	if d.h == nil {
		return nil
	}
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	for _, m := range edits.Mounts {
		if id, ok := strings.CutPrefix(m.HostPath, "/mps/"); ok {
			if _, there := d.running[id]; !there {
				return fmt.Errorf("mount source %s is missing", m.HostPath)
			}
		}
	}
	return nil
}

const (
	share0    = gpu0 + "-share"
	share1    = gpu1 + "-share"
	migShare0 = small0 + "-share"
)

// fraction returns an allocated share with this much memory and this percentage of the cores.
func fraction(request, name, memory, cores string) result {
	r := shareOf(request, name)
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory),
		"cores": resource.MustParse(cores)}
	return r
}

// plain returns an allocated plain share, which has no limits.
func plain(request, name string) result {
	r := shareOf(request, name)
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"shares": resource.MustParse("1")}
	return r
}

func shareOf(request, name string) result {
	r := allocated(request, name)
	r.ShareID = ptr.To(types.UID("share-" + request))
	return r
}

// shareBy adds a configuration of this kind to the claim, with these sharing settings. It applies
// to all requests.
func shareBy(c *resourceapi.ResourceClaim, kind, sharing string) *resourceapi.ResourceClaim {
	return configured(c, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"`+kind+`","sharing":`+sharing+`}`)
}

// shareEach adds one configuration for each request, all with the same sharing settings.
func shareEach(c *resourceapi.ResourceClaim, kind, sharing string) *resourceapi.ResourceClaim {
	for _, r := range c.Status.Allocation.Devices.Results {
		shareBy(c, kind, sharing)
		all := c.Status.Allocation.Devices.Config
		all[len(all)-1].Requests = []string{r.Request}
	}
	return c
}

func slicing(interval string) string {
	return `{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"` + interval + `"}}`
}

const byMPS = `{"strategy":"MPS"}`

func TestTimeSliceIsSetAndRestored(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	h.of(t, gpu0).slice = device.TimeSliceMedium
	p := w.plugin(t)
	c := shareBy(newClaim("c", allocated("r", gpu0)), "GpuConfig", slicing("Long"))
	mustPrepare(t, p, c)
	if got := h.of(t, gpu0).slice; got != device.TimeSliceLong {
		t.Errorf("the time slice is %d", got)
	}
	h.takeCalls()
	mustPrepare(t, p, c)
	if calls := h.takeCalls(); !slices.Equal(calls, []string{"time slice"}) {
		t.Errorf("a repeated call made hardware calls: %q", calls)
	}
	h.of(t, gpu0).forget()
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := h.of(t, gpu0).slice; got != device.TimeSliceLong {
		t.Errorf("after a reset the time slice is %d", got)
	}
	mustUnprepare(t, p, c.UID)
	if got := h.of(t, gpu0).slice; got != device.TimeSliceMedium {
		t.Errorf("restored, the time slice is %d", got)
	}
	checkClean(t, w)
}

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
	if got := w.daemons.running["uid-c-0"]; !got.Equal(want) {
		t.Errorf("the daemon is %+v", got)
	}
	if a, b := h.of(t, gpu0).mode, h.of(t, gpu1).mode; a != device.ComputeExclusiveProcess || b != device.ComputeExclusiveProcess {
		t.Errorf("the compute modes are %s and %s", a, b)
	}
	if spec := w.specs.of(c.UID); strings.Count(spec, "/mps/uid-c-0") != 2 || strings.Count(spec, "CUDA_MPS_PIPE_DIRECTORY") != 2 ||
		strings.Contains(spec, "LIMIT") {
		t.Errorf("the spec is %s", spec)
	}
	mustPrepare(t, p, c)
	mustUnprepare(t, p, c.UID)
	if a, b := h.of(t, gpu0).mode, h.of(t, gpu1).mode; len(w.daemons.running) != 0 || a != device.ComputeDefault ||
		b != device.ComputeDefault {
		t.Errorf("left: %v, %s, %s", w.daemons.running, a, b)
	}
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
			if got := w.daemons.running["uid-c-0"]; !got.Equal(want) {
				t.Errorf("the daemon is %+v, want %+v", got, want)
			}
			mustUnprepare(t, p, claim.UID)
			checkClean(t, w)
		})
	}
}

func TestMPSDaemonFollowsRecreatedPartition(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	p := w.plugin(t)
	c := shareBy(newClaim("c", allocated("a", small0)), "MigDeviceConfig", byMPS)
	mustPrepare(t, p, c)
	if got := w.daemons.running["uid-c-0"].Devices; !slices.Equal(got, []string{"MIG-1"}) || h.of(t, gpu0).mode != device.ComputeDefault {
		t.Errorf("the daemon has %q, the compute mode is %s", got, h.of(t, gpu0).mode)
	}
	h.of(t, gpu0).reset()
	w.scan()
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := w.daemons.running["uid-c-0"].Devices; !slices.Equal(got, []string{"MIG-2"}) {
		t.Errorf("after the partition was recreated the daemon has %q", got)
	}
	mustUnprepare(t, p, c.UID)
	if len(w.daemons.running) != 0 || len(h.of(t, gpu0).instances) != 0 {
		t.Errorf("left: %v", w.daemons.running)
	}
	checkClean(t, w)
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

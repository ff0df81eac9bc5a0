package conformance

import (
	"sync"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

const attachCost = 300 * time.Millisecond

// attaching returns a simulated node with count GPUs. On this node, opening a GPU that no process
// has open takes attachCost.
func attaching(t *testing.T, count int) *world {
	t.Helper()
	node := manyOf(t, "l40s-48gb", count)
	node.AttachCost.Duration = attachCost
	return newWorld(t, node)
}

// pays opens the GPU with this index and reports whether that took attachCost, because the driver
// first had to attach the GPU.
func pays(t *testing.T, library nvml.Interface, index int) bool {
	t.Helper()
	began := time.Now()
	_, ret := library.DeviceGetHandleByIndex(index)
	want(t, "handle", ret, nvml.SUCCESS)
	return time.Since(began) >= attachCost
}

func TestFirstProcessPaysForAttaching(t *testing.T) {
	w := attaching(t, 2)
	library := initialize(t)
	if !pays(t, library, 0) {
		t.Error("a closed GPU is opened at no cost")
	}
	if pays(t, library, 0) {
		t.Error("a GPU that this process has open is attached once more")
	}
	holder := start(t, "hold", gpuVariable+"=1")
	holder.expect("ready")
	if pays(t, library, 1) {
		t.Error("a GPU that another process has open is attached once more")
	}
	holder.kill()
	want(t, "shutdown", library.Shutdown(), nvml.SUCCESS)
	want(t, "init", library.Init(), nvml.SUCCESS)
	if !pays(t, library, 1) {
		t.Error("a GPU that everybody has closed is opened at no cost")
	}
	device, _ := library.DeviceGetHandleByIndex(1)
	want(t, "set persistence mode", device.SetPersistenceMode(nvml.FEATURE_ENABLED), nvml.SUCCESS)
	want(t, "shutdown", library.Shutdown(), nvml.SUCCESS)
	want(t, "init", library.Init(), nvml.SUCCESS)
	if pays(t, library, 1) {
		t.Error("a GPU with persistence mode is attached once more")
	}
	w.must(w.state.SetAttachCost(0))
	if pays(t, library, 0) {
		t.Error("a GPU that costs nothing is attached once more")
	}
}

// When several processes open closed GPUs, the driver must attach each GPU only once, and one GPU
// after another.
func TestGPUsAttachOneAfterAnother(t *testing.T) {
	const count = 3
	attaching(t, count)
	library := initialize(t)
	began := time.Now()
	var all sync.WaitGroup
	for range 2 {
		for i := range count {
			all.Go(func() { pays(t, library, i) })
		}
	}
	all.Wait()
	if took := time.Since(began); took < count*attachCost || took >= 2*count*attachCost {
		t.Errorf("%d GPUs, each opened twice at a cost of %s, took %s", count, attachCost, took)
	}
}

// If a process dies while it attaches a GPU, the driver's lock must become free, so that other
// processes are not blocked.
func TestKilledProcessDropsAttachLock(t *testing.T) {
	w := attaching(t, 2)
	w.must(w.state.SetAttachCost(time.Hour))
	p := start(t, "hold")
	for !w.state.Attaching() {
		<-time.After(time.Millisecond)
	}
	w.must(w.state.SetAttachCost(attachCost))
	p.kill()
	if !pays(t, initialize(t), 1) {
		t.Error("after the death of one who attached is opened at no cost")
	}
}

func TestGPUWithoutMemoryInfo(t *testing.T) {
	w := newWorld(t, readNode(t, "l40s-x2"))
	w.must(w.state.SetMemoryInfo(1, false))
	for i, device := range devices(t, initialize(t)) {
		wanted := []nvml.Return{nvml.SUCCESS, nvml.ERROR_NOT_SUPPORTED}[i]
		_, ret := device.GetMemoryInfo()
		want(t, "memory", ret, wanted)
		_, ret = device.GetMemoryInfo_v2()
		want(t, "memory (version 2)", ret, wanted)
	}
}

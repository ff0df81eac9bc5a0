package inventory

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// fakeHardware fakes a node whose hardware the tests change while the inventory scans it.
type fakeHardware struct {
	mu          sync.Mutex
	absent      bool
	unknown     bool // Present fails
	fingerprint string
	node        nvidia.Node
	err         error
	scans       int
	presence    int
	hang        bool
	changes     atomic.Int32 // calls of changed since the last changeAnnounced
}

func (f *fakeHardware) hardware() Hardware {
	return Hardware{
		Scan: func(ctx context.Context) (nvidia.Node, error) {
			f.mu.Lock()
			f.scans++
			node, err, hang := f.node, f.err, f.hang
			f.mu.Unlock()
			if hang {
				<-ctx.Done()
				return nvidia.Node{}, ctx.Err()
			}
			if err != nil {
				return nvidia.Node{}, err
			}
			return node, nil
		},
		Fingerprint: func() string {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.fingerprint
		},
		Present: func() (bool, error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.presence++
			if f.unknown {
				return false, errors.New("sysfs cannot be read")
			}
			return !f.absent, nil
		},
	}
}

// change edits the fake hardware. If seen is true, change also changes the fingerprint, which makes
// the inventory scan.
func (f *fakeHardware) change(seen bool, edit func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	edit()
	if seen {
		f.fingerprint += "x"
	}
}

func (f *fakeHardware) scanned() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.scans
}

func nodeWith(addresses ...device.PCIAddress) nvidia.Node {
	n := nvidia.Node{Driver: device.Driver{Version: "580.65.06", CUDAVersion: "13.0"}}
	for i, a := range addresses {
		n.GPUs = append(n.GPUs, nvidia.GPU{GPU: device.GPU{
			PCIAddress: a, UUID: "GPU-" + string(a), Minor: i, ProductName: "NVIDIA H200", MemoryBytes: 1 << 30,
		}})
	}
	return n
}

// runInventory calls test with a running inventory of the fake hardware f, in a synctest bubble.
// test calls wait to let fake time pass.
func runInventory(t *testing.T, f *fakeHardware, test func(i *Inventory, wait func(time.Duration))) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		i := New(f.hardware())
		if s := i.Snapshot(); s.Ready || s.Known || s.Reason == "" {
			t.Errorf("snapshot before the first scan: %+v", s)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			i.Run(ctx, func() { f.changes.Add(1) })
		}()
		synctest.Wait()
		test(i, func(d time.Duration) {
			time.Sleep(d) //nolint:forbidigo // the bubble's fake time
			synctest.Wait()
		})
		cancel()
		<-done
	})
}

// changeAnnounced reports whether the inventory has called changed since the last call.
func (f *fakeHardware) changeAnnounced() bool { return f.changes.Swap(0) > 0 }

func TestReadyNodeIsScannedOnce(t *testing.T) {
	f := &fakeHardware{node: nodeWith("0000:1b:00.0", "0000:43:00.0")}
	runInventory(t, f, func(i *Inventory, wait func(time.Duration)) {
		if s := i.Snapshot(); !s.Ready || !s.Known || len(s.Node.GPUs) != 2 || s.Reason != "" {
			t.Errorf("%+v", s)
		}
		if !f.changeAnnounced() {
			t.Error("the first snapshot was not announced")
		}
		wait(time.Hour)
		if f.scanned() != 1 || f.changeAnnounced() {
			t.Errorf("scanned %d times in an hour without a change, want once", f.scanned())
		}
	})
}

func TestMIGModeChangeTriggersRescan(t *testing.T) {
	f := &fakeHardware{node: nodeWith("0000:1b:00.0", "0000:43:00.0")}
	f.node.GPUs[0].MIG = &device.MIG{}
	runInventory(t, f, func(i *Inventory, wait func(time.Duration)) {
		f.changeAnnounced()
		f.change(false, func() {
			f.node = nodeWith("0000:1b:00.0", "0000:43:00.0")
			f.node.GPUs[0].MIG = &device.MIG{Enabled: true, Pending: true, Instances: []device.Instance{{ID: 1}}}
		})
		i.RequestScan() // the health loop has seen the mode
		wait(0)
		if s := i.Snapshot(); !s.Node.GPUs[0].MIG.Enabled || !f.changeAnnounced() {
			t.Errorf("%+v", s)
		}
		before := f.scanned()
		wait(time.Hour)
		if n := f.scanned() - before; n < 55 || n > 61 {
			t.Errorf("scanned %d times in an hour in MIG mode, want 55 to 61", n)
		}
		f.change(false, func() {
			f.node = nodeWith("0000:1b:00.0", "0000:43:00.0")
			f.node.GPUs[0].MIG = &device.MIG{}
		})
		i.RequestScan()
		wait(0)
		if s := i.Snapshot(); s.Node.GPUs[0].MIG.Enabled || !f.changeAnnounced() {
			t.Errorf("no scan after the request: %+v", s)
		}
		f.change(true, func() { f.node.GPUs[0].MIG = &device.MIG{Enabled: true, Pending: true} })
		wait(pollReady)
		if s := i.Snapshot(); len(s.Node.GPUs[0].MIG.Instances) > 0 || !f.changeAnnounced() {
			t.Errorf("%+v", s)
		}
	})
}

func TestRescanWaitsForAScanThatBeganLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gpus := atomic.Int32{}
		inv := New(Hardware{
			Scan: func(ctx context.Context) (nvidia.Node, error) {
				node := nvidia.Node{GPUs: make([]nvidia.GPU, gpus.Load())}
				select {
				case <-time.After(time.Second): // what a scan found may be outdated when it ends
				case <-ctx.Done():
				}
				return node, ctx.Err()
			},
			Fingerprint: func() string { return "" },
			Present:     func() (bool, error) { return true, nil },
		})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			inv.Run(ctx, func() {})
		}()
		for range 2 {
			<-time.After(500 * time.Millisecond) // a scan runs
			want := int(gpus.Add(1))
			inv.Rescan(ctx)
			if got := len(inv.Snapshot().Node.GPUs); got != want {
				t.Errorf("the snapshot has %d GPUs, want %d", got, want)
			}
			inv.RequestScan()
		}
		waiting, began := make(chan struct{}), time.Now()
		go func() {
			defer close(waiting)
			inv.Rescan(t.Context())
		}()
		cancel()
		<-ended
		<-waiting
		if inv.Rescan(t.Context()); time.Since(began) > time.Second {
			t.Errorf("after the end of Run, Rescan waits %s", time.Since(began))
		}
	})
}

func TestLateDriverIsFoundWithinASecond(t *testing.T) {
	f := &fakeHardware{err: &nvidia.NotReadyError{Reason: "the module is not loaded", Remedy: "load it"}}
	runInventory(t, f, func(i *Inventory, wait func(time.Duration)) {
		wait(time.Minute)
		if s := i.Snapshot(); s.Ready || s.Known || s.Reason != "the module is not loaded: load it" {
			t.Errorf("%+v", s)
		}
		f.changeAnnounced()
		f.change(true, func() { f.err, f.node = nil, nodeWith("0000:1b:00.0") })
		wait(pollUnready)
		if s := i.Snapshot(); !s.Ready || len(s.Node.GPUs) != 1 || !f.changeAnnounced() {
			t.Errorf("%+v", s)
		}
	})
}

func TestFailedScanIsRetriedWithoutFileChange(t *testing.T) {
	f := &fakeHardware{err: errors.New("NVML failed")}
	runInventory(t, f, func(i *Inventory, wait func(time.Duration)) {
		wait(time.Minute)
		if n := f.scanned(); n < 60/int(failureRetry.Seconds()) || n > 20 {
			t.Errorf("scanned %d times in a minute", n)
		}
		f.change(false, func() { f.err, f.node = nil, nodeWith("0000:1b:00.0") })
		wait(failureRetry + pollUnready)
		if s := i.Snapshot(); !s.Ready {
			t.Errorf("%+v", s)
		}
	})
}

func TestNodeWithoutGPUIsNeverScanned(t *testing.T) {
	f := &fakeHardware{absent: true}
	runInventory(t, f, func(i *Inventory, wait func(time.Duration)) {
		wait(time.Minute)
		if s := i.Snapshot(); s.Ready || s.Known || !strings.Contains(s.Reason, "no NVIDIA GPU") || f.scanned() != 0 {
			t.Errorf("%+v after %d scans", s, f.scanned())
		}
		f.change(false, func() { f.absent, f.node = false, nodeWith("0000:1b:00.0") }) // hot-plugged
		wait(pollUnready)
		if s := i.Snapshot(); !s.Ready {
			t.Errorf("%+v", s)
		}
	})
}

func TestUnreadablePCIBusStillScans(t *testing.T) {
	f := &fakeHardware{unknown: true, node: nodeWith("0000:1b:00.0")}
	runInventory(t, f, func(i *Inventory, _ func(time.Duration)) {
		if s := i.Snapshot(); !s.Ready {
			t.Errorf("%+v", s)
		}
	})
}

func TestFailedScanKeepsLastResult(t *testing.T) {
	f := &fakeHardware{node: nodeWith("0000:1b:00.0")}
	runInventory(t, f, func(i *Inventory, wait func(time.Duration)) {
		f.change(true, func() { f.err = errors.New("the scan has not ended") })
		wait(pollReady)
		s := i.Snapshot()
		if !s.Ready || len(s.Node.GPUs) != 1 || s.Failure != "the scan has not ended" {
			t.Errorf("%+v", s)
		}
		f.change(false, func() { f.err = nil })
		wait(failureRetry + pollReady)
		if s := i.Snapshot(); s.Failure != "" || !s.Ready {
			t.Errorf("after recovery: %+v", s)
		}
	})
}

func TestUnreadyNodeHasCodeAndTime(t *testing.T) {
	f := &fakeHardware{node: nodeWith("0000:1b:00.0")}
	runInventory(t, f, func(i *Inventory, wait func(time.Duration)) {
		if s := i.Snapshot(); s.Code != "" || !s.Since.IsZero() {
			t.Errorf("code or time on a ready node: %+v", s)
		}
		f.change(true, func() { f.err = errors.New("the scan has not ended") })
		wait(pollReady)
		if s := i.Snapshot(); !s.Ready || s.Code != "" {
			t.Errorf("a failed scan made a ready node unready: %+v", s)
		}
		f.change(true, func() { f.err = &nvidia.NotReadyError{Reason: "gone"} })
		wait(pollReady)
		since := i.Snapshot().Since
		if ago := time.Since(since); since.IsZero() || ago > pollReady {
			t.Errorf("the node has been unready for %s", ago)
		}
		for _, step := range []struct {
			code   string
			change func()
		}{
			{CodeDriverMissing, func() { f.err = errors.New("it does not answer either") }},
			{CodeNoGPU, func() { f.node, f.err = nvidia.Node{}, nil }},
		} {
			f.change(true, step.change)
			wait(pollReady)
			if s := i.Snapshot(); s.Code != step.code || !s.Since.Equal(since) {
				t.Errorf("%s since %s, want %s since %s", s.Code, s.Since, step.code, since)
			}
		}
		f.change(true, func() { f.node = nodeWith("0000:1b:00.0") })
		wait(pollReady)
		if s := i.Snapshot(); s.Code != "" || !s.Since.IsZero() {
			t.Errorf("code or time after recovery: %+v", s)
		}
	})
	if s := New(Hardware{}).Snapshot(); s.Code != CodeNotScanned || s.Since.IsZero() {
		t.Errorf("before the first scan: %+v", s)
	}
}

func TestUnloadedDriverKeepsLastResult(t *testing.T) {
	f := &fakeHardware{node: nodeWith("0000:1b:00.0")}
	runInventory(t, f, func(i *Inventory, wait func(time.Duration)) {
		f.changeAnnounced()
		f.change(true, func() { f.err = &nvidia.NotReadyError{Reason: "gone"} })
		wait(pollReady)
		if s := i.Snapshot(); s.Ready || !s.Known || s.Reason != "gone" || len(s.Node.GPUs) != 1 || !f.changeAnnounced() {
			t.Errorf("%+v", s)
		}
		f.change(true, func() { f.err = errors.New("still broken, in another way") })
		wait(pollReady)
		if s := i.Snapshot(); s.Ready || s.Reason != "gone" || s.Failure == "" {
			t.Errorf("after a failure of another kind: %+v", s)
		}
		f.change(true, func() { f.err = nil })
		wait(pollUnready)
		if s := i.Snapshot(); !s.Ready || !f.changeAnnounced() {
			t.Errorf("%+v", s)
		}
	})
}

func TestGPUWithProblemIsRescanned(t *testing.T) {
	f := &fakeHardware{node: nodeWith("0000:1b:00.0")}
	f.node.Problems = []nvidia.Problem{{PCIAddress: "0000:43:00.0", Message: "MIG mode is on"}}
	runInventory(t, f, func(i *Inventory, wait func(time.Duration)) {
		if s := i.Snapshot(); !s.Ready || len(s.Node.Problems) != 1 {
			t.Errorf("%+v", s)
		}
		wait(time.Hour)
		if n := f.scanned(); n > int(time.Hour/problemRetry)+5 {
			t.Errorf("scanned %d times in an hour", n)
		}
		f.changeAnnounced()
		f.change(false, func() { f.node = nodeWith("0000:1b:00.0", "0000:43:00.0") })
		wait(problemRetry + pollReady)
		if s := i.Snapshot(); len(s.Node.GPUs) != 2 || !f.changeAnnounced() {
			t.Errorf("%+v", s)
		}
	})
}

func TestCardWithUnreadableInstanceIsKeptForGracePeriod(t *testing.T) {
	whole := nodeWith("0000:1b:00.0", "0000:43:00.0")
	whole.GPUs[0].MIG = &device.MIG{Enabled: true, Instances: []device.Instance{{ID: 1, ProfileID: 19}}}
	unread := func(uuid string) nvidia.Node {
		n := whole
		n.GPUs = n.GPUs[1:]
		n.Problems = []nvidia.Problem{{PCIAddress: "0000:1b:00.0", Message: "an instance cannot be read", Uncertain: uuid}}
		return n
	}
	for name, tc := range map[string]struct {
		then nvidia.Node
		kept bool
	}{
		"same card":              {unread(whole.GPUs[0].UUID), true},
		"different card":         {unread("GPU-another"), false},
		"the card itself failed": {unread(""), false},
		"different driver version": {func() nvidia.Node {
			n := unread(whole.GPUs[0].UUID)
			n.Driver.Version = "590.48.01"
			return n
		}(), false},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fakeHardware{node: whole}
			runInventory(t, f, func(i *Inventory, wait func(time.Duration)) {
				f.change(true, func() { f.node = tc.then })
				wait(pollReady)
				s := i.Snapshot()
				if kept := len(s.Node.GPUs) == 2; kept != tc.kept || len(s.Node.Problems) != 1 {
					t.Errorf("%+v", s)
				}
				if tc.kept && !reflect.DeepEqual(s.Node.GPUs, whole.GPUs) {
					t.Errorf("%+v", s.Node.GPUs)
				}
				wait(uncertainGrace + problemRetry + pollReady)
				if s := i.Snapshot(); len(s.Node.GPUs) != 1 {
					t.Errorf("the card is kept after the grace period: %+v", s.Node.GPUs)
				}
				f.change(true, func() { f.node = whole })
				wait(pollReady)
				if s := i.Snapshot(); len(s.Node.GPUs) != 2 || len(s.Node.Problems) != 0 {
					t.Errorf("%+v", s)
				}
			})
		})
	}
}

// A failed scan says nothing about the GPU, so the grace period of the GPU with unreadable MIG
// instances must still end.
func TestFailedScansDoNotExtendGracePeriod(t *testing.T) {
	whole := nodeWith("0000:1b:00.0", "0000:43:00.0")
	whole.GPUs[0].MIG = &device.MIG{Enabled: true, Instances: []device.Instance{{ID: 1, ProfileID: 19}}}
	f := &fakeHardware{node: whole}
	runInventory(t, f, func(i *Inventory, wait func(time.Duration)) {
		f.change(true, func() {
			f.node.GPUs = whole.GPUs[1:]
			f.node.Problems = []nvidia.Problem{
				{PCIAddress: "0000:1b:00.0", Message: "an instance cannot be read", Uncertain: whole.GPUs[0].UUID},
			}
		})
		wait(pollReady)
		if s := i.Snapshot(); len(s.Node.GPUs) != 2 {
			t.Fatalf("the card is not kept at all: %+v", s.Node.GPUs)
		}
		for passed := time.Duration(0); passed < uncertainGrace; passed += 2 * pollReady {
			f.change(true, func() { f.err = errors.New("the scan failed") })
			wait(pollReady)
			if s := i.Snapshot(); s.Failure == "" {
				t.Fatalf("no scan has failed: %+v", s)
			}
			f.change(true, func() { f.err = nil })
			wait(pollReady)
		}
		if s := i.Snapshot(); len(s.Node.GPUs) != 1 {
			t.Errorf("the card is kept longer than the grace period: %+v", s.Node.GPUs)
		}
	})
}

func TestNodeWithNothingToOfferSaysWhy(t *testing.T) {
	f := &fakeHardware{node: nvidia.Node{Problems: []nvidia.Problem{
		{PCIAddress: "0000:43:00.0", Message: "MIG mode is on"}, {Message: "lost"},
	}}}
	runInventory(t, f, func(i *Inventory, wait func(time.Duration)) {
		if s := i.Snapshot(); s.Ready || !s.Known || s.Empty ||
			s.Reason != "no GPU of this node can be offered; 0000:43:00.0: MIG mode is on; lost" {
			t.Errorf("%+v", s)
		}
		f.change(true, func() { f.node = nvidia.Node{} })
		wait(pollUnready)
		if s := i.Snapshot(); s.Ready || !s.Empty || !strings.Contains(s.Reason, "lists no GPU") {
			t.Errorf("%+v", s)
		}
		f.change(true, func() { f.unknown = true })
		wait(pollUnready)
		if s := i.Snapshot(); s.Empty {
			t.Errorf("Empty although the PCI bus cannot be read: %+v", s)
		}
	})
}

func TestChangesCoalesce(t *testing.T) {
	f := &fakeHardware{node: nodeWith("0000:1b:00.0")}
	runInventory(t, f, func(i *Inventory, wait func(time.Duration)) {
		for _, a := range []device.PCIAddress{"0000:01:00.0", "0000:02:00.0", "0000:03:00.0"} {
			f.change(true, func() { f.node = nodeWith(a) })
			wait(pollReady)
		}
		if !f.changeAnnounced() || f.changeAnnounced() {
			t.Error("three unread changes do not coalesce into one announcement")
		}
		if s := i.Snapshot(); s.Node.GPUs[0].PCIAddress != "0000:03:00.0" {
			t.Errorf("%+v", s)
		}
	})
}

func TestScanInFlightEndsWithInventory(t *testing.T) {
	f := &fakeHardware{hang: true}
	runInventory(t, f, func(i *Inventory, _ func(time.Duration)) {
		if s := i.Snapshot(); s.Ready {
			t.Errorf("%+v", s)
		}
	})
}

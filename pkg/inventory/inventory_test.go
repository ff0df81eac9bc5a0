package inventory

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// fakeHardware is a node that tests change while the inventory looks at it.
type fakeHardware struct {
	mu          sync.Mutex
	absent      bool
	unknown     bool // whether there is a GPU at all
	fingerprint string
	node        nvidia.Node
	err         error
	scans       int
	presence    int
	hang        bool
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

// change edits the fake; it also gives it another fingerprint if it is to be seen at once.
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
		n.GPUs = append(n.GPUs, nvidia.GPU{GPU: device.GPU{PCIAddress: a, UUID: "GPU-" + string(a), Minor: i, ProductName: "NVIDIA H200", MemoryBytes: 1 << 30}})
	}
	return n
}

// running starts an inventory of f in a bubble of fake time; wait lets d pass.
func running(t *testing.T, f *fakeHardware, test func(i *Inventory, wait func(time.Duration))) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		i := New(f.hardware())
		if s := i.Snapshot(); s.Ready || s.Known || s.Reason == "" {
			t.Errorf("before the first look it says %+v", s)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			i.Run(ctx)
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

// told says whether a change was announced, and takes the announcement.
func told(i *Inventory) bool {
	select {
	case <-i.Changed():
		return true
	default:
		return false
	}
}

func TestAReadyNodeIsKnownAtOnceAndLeftInPeace(t *testing.T) {
	f := &fakeHardware{node: nodeWith("0000:1b:00.0", "0000:43:00.0")}
	running(t, f, func(i *Inventory, wait func(time.Duration)) {
		if s := i.Snapshot(); !s.Ready || !s.Known || len(s.Node.GPUs) != 2 || s.Reason != "" {
			t.Errorf("%+v", s)
		}
		if !told(i) {
			t.Error("nobody was told")
		}
		wait(time.Hour)
		if f.scanned() != 1 || told(i) {
			t.Errorf("in an hour without a change it was scanned %d times", f.scanned())
		}
	})
}

func TestAChangeOfTheMIGModeIsNoticed(t *testing.T) {
	f := &fakeHardware{node: nodeWith("0000:1b:00.0", "0000:43:00.0")}
	f.node.GPUs[0].MIG = &device.MIG{}
	running(t, f, func(i *Inventory, wait func(time.Duration)) {
		wait(time.Hour)
		if n := f.scanned(); n < 11 || n > 13 {
			t.Errorf("in an hour it was scanned %d times", n)
		}
		told(i)
		f.change(false, func() {
			f.node = nodeWith("0000:1b:00.0", "0000:43:00.0")
			f.node.GPUs[0].MIG = &device.MIG{Enabled: true, Pending: true, Instances: []device.Instance{{ID: 1}}}
		})
		wait(whileCuttable + whileReady)
		if s := i.Snapshot(); !s.Node.GPUs[0].MIG.Enabled || !told(i) {
			t.Errorf("%+v", s)
		}
		before := f.scanned()
		wait(time.Hour)
		if n := f.scanned() - before; n < 55 || n > 61 {
			t.Errorf("in an hour with instances it was scanned %d times", n)
		}
		f.change(false, func() {
			f.node = nodeWith("0000:1b:00.0", "0000:43:00.0")
			f.node.GPUs[0].MIG = &device.MIG{}
		})
		i.Doubt()
		wait(0)
		if s := i.Snapshot(); s.Node.GPUs[0].MIG.Enabled || !told(i) {
			t.Errorf("doubted and not looked at: %+v", s)
		}
		f.change(true, func() { f.node.GPUs[0].MIG = &device.MIG{Enabled: true, Pending: true} })
		wait(whileReady)
		if s := i.Snapshot(); len(s.Node.GPUs[0].MIG.Instances) > 0 || !told(i) {
			t.Errorf("%+v", s)
		}
	})
}

func TestAGPUThatAClaimCutIsNoNews(t *testing.T) {
	last, now := nodeWith("0000:1b:00.0", "0000:43:00.0"), nodeWith("0000:1b:00.0", "0000:43:00.0")
	last.GPUs[1].MIG, now.GPUs[1].MIG = &device.MIG{}, &device.MIG{Instances: []device.Instance{{ID: 1}}}
	if !reflect.DeepEqual(uncut(last), uncut(now)) || len(now.GPUs[1].MIG.Instances) != 1 {
		t.Error("it is another node")
	}
	if names := recut(last, now); len(names) != 1 || names[0] != "gpu-0000-43-00-0" {
		t.Error(names)
	}
}

func TestALateDriverIsNoticedWithinASecond(t *testing.T) {
	f := &fakeHardware{err: &nvidia.NotReadyError{Reason: "the module is not loaded", Remedy: "load it"}}
	running(t, f, func(i *Inventory, wait func(time.Duration)) {
		wait(time.Minute)
		if s := i.Snapshot(); s.Ready || s.Known || s.Reason != "the module is not loaded: load it" {
			t.Errorf("%+v", s)
		}
		told(i)
		f.change(true, func() { f.err, f.node = nil, nodeWith("0000:1b:00.0") })
		wait(whileUnready)
		if s := i.Snapshot(); !s.Ready || len(s.Node.GPUs) != 1 || !told(i) {
			t.Errorf("%+v", s)
		}
	})
}

func TestADriverThatNoFileAnnouncesIsStillFound(t *testing.T) {
	f := &fakeHardware{err: errors.New("NVML is moody")}
	running(t, f, func(i *Inventory, wait func(time.Duration)) {
		wait(time.Minute)
		if n := f.scanned(); n < 60/int(failureRetry.Seconds()) || n > 20 {
			t.Errorf("in a minute it was scanned %d times", n)
		}
		f.change(false, func() { f.err, f.node = nil, nodeWith("0000:1b:00.0") })
		wait(failureRetry + whileUnready)
		if s := i.Snapshot(); !s.Ready {
			t.Errorf("%+v", s)
		}
	})
}

func TestANodeWithoutAGPUIsNeverScanned(t *testing.T) {
	f := &fakeHardware{absent: true}
	running(t, f, func(i *Inventory, wait func(time.Duration)) {
		wait(time.Minute)
		if s := i.Snapshot(); s.Ready || s.Known || !strings.Contains(s.Reason, "no NVIDIA GPU") || f.scanned() != 0 {
			t.Errorf("%+v after %d scans", s, f.scanned())
		}
		f.change(false, func() { f.absent, f.node = false, nodeWith("0000:1b:00.0") }) // hot-plugged
		wait(whileUnready)
		if s := i.Snapshot(); !s.Ready {
			t.Errorf("%+v", s)
		}
	})
}

func TestAnUnreadableBusIsNoProofOfAbsence(t *testing.T) {
	f := &fakeHardware{unknown: true, node: nodeWith("0000:1b:00.0")}
	running(t, f, func(i *Inventory, _ func(time.Duration)) {
		if s := i.Snapshot(); !s.Ready {
			t.Errorf("%+v", s)
		}
	})
}

func TestAFailedScanKeepsTheLastGoodAnswer(t *testing.T) {
	f := &fakeHardware{node: nodeWith("0000:1b:00.0")}
	running(t, f, func(i *Inventory, wait func(time.Duration)) {
		f.change(true, func() { f.err = errors.New("the scan has not ended") })
		wait(whileReady)
		s := i.Snapshot()
		if !s.Ready || len(s.Node.GPUs) != 1 || s.Failure != "the scan has not ended" {
			t.Errorf("%+v", s)
		}
		f.change(false, func() { f.err = nil })
		wait(failureRetry + whileReady)
		if s := i.Snapshot(); s.Failure != "" || !s.Ready {
			t.Errorf("after it works again: %+v", s)
		}
	})
}

func TestUnreadyNodeHasACodeAndATime(t *testing.T) {
	f := &fakeHardware{node: nodeWith("0000:1b:00.0")}
	running(t, f, func(i *Inventory, wait func(time.Duration)) {
		if s := i.Snapshot(); s.Code != "" || !s.Since.IsZero() {
			t.Errorf("nothing is wrong: %+v", s)
		}
		f.change(true, func() { f.err = errors.New("the scan has not ended") })
		wait(whileReady)
		if s := i.Snapshot(); !s.Ready || s.Code != "" {
			t.Errorf("a scan that fails must leave a ready node ready: %+v", s)
		}
		f.change(true, func() { f.err = &nvidia.NotReadyError{Reason: "gone"} })
		wait(whileReady)
		since := i.Snapshot().Since
		if ago := time.Since(since); since.IsZero() || ago > whileReady {
			t.Errorf("wrong for %s", ago)
		}
		for _, step := range []struct {
			code   string
			change func()
		}{
			{CodeDriverMissing, func() { f.err = errors.New("it does not answer, either") }},
			{CodeNoGPU, func() { f.node, f.err = nvidia.Node{}, nil }},
		} {
			f.change(true, step.change)
			wait(whileReady)
			if s := i.Snapshot(); s.Code != step.code || !s.Since.Equal(since) {
				t.Errorf("%s since %s, want %s since %s", s.Code, s.Since, step.code, since)
			}
		}
		f.change(true, func() { f.node = nodeWith("0000:1b:00.0") })
		wait(whileReady)
		if s := i.Snapshot(); s.Code != "" || !s.Since.IsZero() {
			t.Errorf("nothing is wrong any more: %+v", s)
		}
	})
	if s := New(Hardware{}).Snapshot(); s.Code != CodeNotScanned || s.Since.IsZero() {
		t.Errorf("before the first scan: %+v", s)
	}
}

func TestADriverThatIsTakenAwayLeavesWhatIsKnown(t *testing.T) {
	f := &fakeHardware{node: nodeWith("0000:1b:00.0")}
	running(t, f, func(i *Inventory, wait func(time.Duration)) {
		told(i)
		f.change(true, func() { f.err = &nvidia.NotReadyError{Reason: "gone"} })
		wait(whileReady)
		if s := i.Snapshot(); s.Ready || !s.Known || s.Reason != "gone" || len(s.Node.GPUs) != 1 || !told(i) {
			t.Errorf("%+v", s)
		}
		f.change(true, func() { f.err = errors.New("still broken, in another way") })
		wait(whileReady)
		if s := i.Snapshot(); s.Ready || s.Reason != "gone" || s.Failure == "" {
			t.Errorf("a failure does not make it ready: %+v", s)
		}
		f.change(true, func() { f.err = nil })
		wait(whileUnready)
		if s := i.Snapshot(); !s.Ready || !told(i) {
			t.Errorf("%+v", s)
		}
	})
}

func TestAGPUWithAProblemIsLookedAtAgain(t *testing.T) {
	f := &fakeHardware{node: nodeWith("0000:1b:00.0")}
	f.node.Problems = []nvidia.Problem{{PCIAddress: "0000:43:00.0", Message: "MIG mode is on"}}
	running(t, f, func(i *Inventory, wait func(time.Duration)) {
		if s := i.Snapshot(); !s.Ready || len(s.Node.Problems) != 1 {
			t.Errorf("%+v", s)
		}
		wait(time.Hour)
		if n := f.scanned(); n > int(time.Hour/problemRetry)+5 {
			t.Errorf("in an hour it was scanned %d times", n)
		}
		told(i)
		f.change(false, func() { f.node = nodeWith("0000:1b:00.0", "0000:43:00.0") })
		wait(problemRetry + whileReady)
		if s := i.Snapshot(); len(s.Node.GPUs) != 2 || !told(i) {
			t.Errorf("%+v", s)
		}
	})
}

func TestACardOfWhichAnInstanceCannotBeReadIsKeptForAFewLooks(t *testing.T) {
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
		"the card that was there":     {unread(whole.GPUs[0].UUID), true},
		"another card":                {unread("GPU-another"), false},
		"the card itself is not well": {unread(""), false},
		"with another driver": {func() nvidia.Node {
			n := unread(whole.GPUs[0].UUID)
			n.Driver.Version = "590.48.01"
			return n
		}(), false},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fakeHardware{node: whole}
			running(t, f, func(i *Inventory, wait func(time.Duration)) {
				f.change(true, func() { f.node = tc.then })
				wait(whileReady)
				s := i.Snapshot()
				if kept := len(s.Node.GPUs) == 2; kept != tc.kept || len(s.Node.Problems) != 1 {
					t.Errorf("%+v", s)
				}
				if tc.kept && !reflect.DeepEqual(s.Node.GPUs, whole.GPUs) {
					t.Errorf("%+v", s.Node.GPUs)
				}
				wait(keepUncertain + problemRetry + whileReady)
				if s := i.Snapshot(); len(s.Node.GPUs) != 1 {
					t.Errorf("it is kept for ever: %+v", s.Node.GPUs)
				}
				f.change(true, func() { f.node = whole })
				wait(whileReady)
				if s := i.Snapshot(); len(s.Node.GPUs) != 2 || len(s.Node.Problems) != 0 {
					t.Errorf("%+v", s)
				}
			})
		})
	}
}

// Looks that fail in between say nothing of the card: the time for which it is kept goes on.
func TestLooksThatFailDoNotKeepACardForLonger(t *testing.T) {
	whole := nodeWith("0000:1b:00.0", "0000:43:00.0")
	whole.GPUs[0].MIG = &device.MIG{Enabled: true, Instances: []device.Instance{{ID: 1, ProfileID: 19}}}
	f := &fakeHardware{node: whole}
	running(t, f, func(i *Inventory, wait func(time.Duration)) {
		f.change(true, func() {
			f.node.GPUs = whole.GPUs[1:]
			f.node.Problems = []nvidia.Problem{{PCIAddress: "0000:1b:00.0", Message: "an instance cannot be read", Uncertain: whole.GPUs[0].UUID}}
		})
		wait(whileReady)
		if s := i.Snapshot(); len(s.Node.GPUs) != 2 {
			t.Fatalf("it is not kept at all: %+v", s.Node.GPUs)
		}
		for passed := time.Duration(0); passed < keepUncertain; passed += 2 * whileReady {
			f.change(true, func() { f.err = errors.New("a look that fails") })
			wait(whileReady)
			if s := i.Snapshot(); s.Failure == "" {
				t.Fatalf("no look has failed: %+v", s)
			}
			f.change(true, func() { f.err = nil })
			wait(whileReady)
		}
		if s := i.Snapshot(); len(s.Node.GPUs) != 1 {
			t.Errorf("it is kept for longer: %+v", s.Node.GPUs)
		}
	})
}

func TestANodeOfWhichNothingCanBeOfferedSaysWhy(t *testing.T) {
	f := &fakeHardware{node: nvidia.Node{Problems: []nvidia.Problem{{PCIAddress: "0000:43:00.0", Message: "MIG mode is on"}, {Message: "lost"}}}}
	running(t, f, func(i *Inventory, wait func(time.Duration)) {
		if s := i.Snapshot(); s.Ready || !s.Known || s.Empty || s.Reason != "no GPU of this node can be offered; 0000:43:00.0: MIG mode is on; lost" {
			t.Errorf("%+v", s)
		}
		f.change(true, func() { f.node = nvidia.Node{} })
		wait(whileUnready)
		if s := i.Snapshot(); s.Ready || !s.Empty || !strings.Contains(s.Reason, "lists no GPU") {
			t.Errorf("%+v", s)
		}
		f.change(true, func() { f.unknown = true })
		wait(whileUnready)
		if s := i.Snapshot(); s.Empty {
			t.Errorf("the bus cannot be read: %+v", s)
		}
	})
}

func TestChangesCoalesce(t *testing.T) {
	f := &fakeHardware{node: nodeWith("0000:1b:00.0")}
	running(t, f, func(i *Inventory, wait func(time.Duration)) {
		for _, a := range []device.PCIAddress{"0000:01:00.0", "0000:02:00.0", "0000:03:00.0"} {
			f.change(true, func() { f.node = nodeWith(a) })
			wait(whileReady)
		}
		if !told(i) || told(i) {
			t.Error("three changes nobody read about are one announcement")
		}
		if s := i.Snapshot(); s.Node.GPUs[0].PCIAddress != "0000:03:00.0" {
			t.Errorf("%+v", s)
		}
	})
}

func TestAScanThatIsUnderWayEndsWithTheInventory(t *testing.T) {
	f := &fakeHardware{hang: true}
	running(t, f, func(i *Inventory, _ func(time.Duration)) {
		if s := i.Snapshot(); s.Ready {
			t.Errorf("%+v", s)
		}
	})
}

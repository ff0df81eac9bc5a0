package health

import (
	"testing"
	"time"

	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

const (
	address = device.PCIAddress("0000:1b:00.0")
	uuid    = "GPU-1"
)

var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// gpu is like an H100, but has only the profiles 1g (1 memory slice), 3g (4 memory slices) and 7g
// (8 memory slices).
var gpu = device.GPU{PCIAddress: address, UUID: uuid, MIG: &device.MIG{Enabled: true, Profiles: []device.Profile{
	{ID: 19, Name: "1g.10gb", Size: 1, Starts: []uint32{0, 1, 2, 3, 4, 5, 6}},
	{ID: 9, Name: "3g.40gb", Size: 4, Starts: []uint32{0, 4}},
	{ID: 0, Name: "7g.80gb", Size: 8, Starts: []uint32{0}},
}}}

const gpuName = "gpu-0000-1b-00-0"

// testMonitor is a monitor of one GPU, with the clock now that only the test advances.
type testMonitor struct {
	*Monitor
	t   *testing.T
	now time.Time
}

func newTestMonitor(t *testing.T, rules Rules) *testMonitor {
	t.Helper()
	w := &testMonitor{Monitor: New(rules, start), t: t, now: start}
	w.watcherUp("load-1")
	w.Expect([]device.GPU{gpu}, w.now)
	w.answerOK()
	return w
}

func (w *testMonitor) watcherUp(driver string) {
	w.Apply(device.Signal{Watcher: &device.WatcherState{Up: true, Events: true, Driver: driver, At: w.now}}, w.now)
}

// healthyFor advances the time by d. Meanwhile the GPU answers its queries and reports nothing bad.
func (w *testMonitor) healthyFor(d time.Duration) {
	for end := w.now.Add(d); w.now.Before(end); {
		w.advance(min(20*time.Second, end.Sub(w.now)))
		w.answerOK()
	}
}

func (w *testMonitor) advance(d time.Duration) {
	w.now = w.now.Add(d)
	w.Tick(w.now)
}

func (w *testMonitor) answer(c device.Condition) {
	c.Card, c.At = gpu.Card(), w.now
	if c.Reach == "" {
		c.Reach = device.ReachOK
	}
	w.Apply(device.Signal{Condition: &c}, w.now)
}

func (w *testMonitor) answerCounters(uncorrected, energy uint64) {
	w.advance(time.Second)
	w.answer(device.Condition{Uncorrected: &uncorrected, EnergyMillijoules: &energy})
}

func (w *testMonitor) answerOK() { w.answer(device.Condition{}) }

func (w *testMonitor) answerRecovery(a device.RecoveryAction) {
	w.answer(device.Condition{Recovery: a})
}

func (w *testMonitor) sendEvent(e device.HealthEvent) {
	w.now = w.now.Add(time.Millisecond)
	e.Card, e.At = gpu.Card(), w.now
	w.Apply(device.Signal{Event: &e}, w.now)
}

func (w *testMonitor) sendXID(code uint64) {
	w.sendEvent(device.HealthEvent{Kind: device.EventXID, XID: code})
}

// sendXIDOn sends an XID of the MIG instance with this profile. The instance begins at the memory
// slice given by first and has as many slices as given by size.
func (w *testMonitor) sendXIDOn(code uint64, profile, first, size uint32) {
	w.sendEvent(device.HealthEvent{
		Kind: device.EventXID, XID: code, GPUInstance: ptr.To(uint32(3)), ComputeInstance: ptr.To(uint32(0)),
		Place: &device.EventPlace{ProfileID: profile, Placement: device.Placement{Start: first, Size: size}},
	})
}

func (w *testMonitor) verdict(name string) Verdict {
	w.t.Helper()
	n, ok := device.ParseName(name)
	if !ok {
		w.t.Fatal(name)
	}
	return w.View().Of(gpu, n)
}

func (w *testMonitor) wantState(name string, s State) {
	w.t.Helper()
	if v := w.verdict(name); v.State != s {
		w.t.Errorf("%s is %s (%s), want %s", name, v.State, v.Message(), s)
	}
}

func newStore() (Store, *durabletest.Disk) {
	disk := durabletest.New()
	return Store{Disk: disk, Path: "/state/health.json", BootID: "boot-1"}, disk
}

// restart acts like a restart of the plugin: it saves the findings, and returns a test monitor with
// a new Monitor that has loaded them.
func (w *testMonitor) restart(s Store, rules Rules) *testMonitor {
	w.t.Helper()
	if err := s.Save(w.Monitor); err != nil {
		w.t.Fatal(err)
	}
	m := New(rules, w.now)
	if err := s.Load(m, w.now); err != nil {
		w.t.Fatal(err)
	}
	return &testMonitor{Monitor: m, t: w.t, now: w.now}
}

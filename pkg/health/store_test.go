package health

import (
	"bytes"
	"encoding/json"
	"errors"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

func TestResetDuringPluginDowntimeIsNoticed(t *testing.T) {
	for name, after := range map[string]func(w *testMonitor){
		"recovery action is none": func(w *testMonitor) { w.answerRecovery(device.RecoveryNone) },
		"error counter restarted": func(w *testMonitor) {
			w.answer(device.Condition{Uncorrected: ptr.To(uint64(0)), Recovery: device.RecoveryNone})
		},
		"driver was loaded again": func(w *testMonitor) {
			w.watcherUp("load-2")
			w.answerRecovery(device.RecoveryNone)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, _ := newStore()
			w := newTestMonitor(t, nil)
			w.answer(device.Condition{Uncorrected: ptr.To(uint64(3)), Recovery: device.RecoveryReset})
			w.sendXID(95)
			w = w.restart(s, nil)
			w.wantState(gpuName, Unhealthy)
			w.advance(time.Minute)
			w.wantState(gpuName, Unhealthy)
			after(w)
			w.wantState(gpuName, Healthy)
		})
	}
}

func TestRestartKeepsFindings(t *testing.T) {
	s, _ := newStore()
	w := newTestMonitor(t, nil)
	w.answerRecovery(device.RecoveryNone)
	w.sendXID(79)
	first := w.now
	w.healthyFor(time.Hour)
	for range 3 {
		w = w.restart(s, nil)
		w.advance(time.Second)
		w.watcherUp("load-1")
		w.Expect([]device.GPU{gpu}, w.now)
		w.answerRecovery(device.RecoveryNone)
		if v := w.verdict(gpuName); v.State != Unhealthy || !v.Causes[0].Since.Equal(first) {
			t.Fatalf("%+v", v)
		}
		if c := w.Changes(); len(c) != 0 {
			t.Errorf("a restart is reported as %+v", c)
		}
	}
}

func TestRebootDropsFindings(t *testing.T) {
	s, _ := newStore()
	w := newTestMonitor(t, nil)
	w.sendXID(79)
	if err := s.Save(w.Monitor); err != nil {
		t.Fatal(err)
	}
	s.BootID = "boot-2"
	m := New(nil, w.now)
	if err := s.Load(m, w.now); err != nil || len(m.cards) != 0 {
		t.Errorf("%v, %v", m.cards, err)
	}
}

func TestNewRulesApplyToSavedFindings(t *testing.T) {
	s, _ := newStore()
	w := newTestMonitor(t, nil)
	w.sendXID(79)
	w.sendXID(95)
	w = w.restart(s, Rules{79: Reported, 95: Ignored})
	w.wantState(gpuName, Healthy)
	w = w.restart(s, Rules{})
	w.wantState(gpuName, Unhealthy)
}

// A plugin knows the rules only after it has read the labels of its Node.
func TestSavedFindingsStayUntilRulesAreKnown(t *testing.T) {
	s, _ := newStore()
	breaking := Rules{13: Breaking}
	w := newTestMonitor(t, breaking)
	w.sendXID(13)
	w = w.restart(s, nil)
	w.wantState(gpuName, Unhealthy)
	w.advance(2 * quietPeriod)
	w.SetRules(breaking)
	w.wantState(gpuName, Unhealthy)
}

// The Pods of the GPU saw an Event about the finding, and must see its end.
func TestEndOfFindingByNewRuleIsReported(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.sendXID(79)
	w.Changes()
	w.SetRules(Rules{79: Ignored})
	w.wantState(gpuName, Healthy)
	if c := w.Changes(); len(c) != 1 || !c[0].Over || c[0].Finding.State != Unhealthy || !strings.Contains(c[0].Why, "rule") {
		t.Errorf("%+v", c)
	}
}

func TestReplacedCardInheritsNoFindings(t *testing.T) {
	s, _ := newStore()
	w := newTestMonitor(t, nil)
	w.sendXID(95)
	if err := s.Save(w.Monitor); err != nil {
		t.Fatal(err)
	}
	m := New(nil, w.now)
	other := gpu
	other.UUID = "GPU-2"
	m.Expect([]device.GPU{other}, w.now)
	if err := s.Load(m, w.now); err != nil {
		t.Fatal(err)
	}
	if v := m.View().Of(other, device.Name{GPU: gpuName}); v.State != Healthy {
		t.Errorf("%+v", v)
	}
}

func TestNewInstanceTakesOverSavedFindings(t *testing.T) {
	s, _ := newStore()
	old := newTestMonitor(t, nil)
	old.sendXID(95)
	first := old.now
	if err := s.Save(old.Monitor); err != nil {
		t.Fatal(err)
	}
	w := newTestMonitor(t, nil)
	w.now = first.Add(time.Minute)
	w.sendXID(95)
	w.sendXID(31)
	if err := s.Load(w.Monitor, w.now); err != nil {
		t.Fatal(err)
	}
	if v := w.verdict(gpuName); !v.Causes[0].Since.Equal(first) || len(w.View().Findings(address)) != 2 {
		t.Errorf("%+v", v)
	}
}

// An upgrade may find a card with so many findings that one stands for all others.
func TestLoadKeepsThatOtherFindingsNeedReset(t *testing.T) {
	s, _ := newStore()
	rules := Rules{}
	for code := range uint64(maxFindings) {
		rules[2000+code] = Degrading // these end by time
	}
	fill := func(w *testMonitor) {
		for code := range rules {
			w.sendXID(code)
		}
	}
	old := newTestMonitor(t, rules)
	fill(old)
	old.sendXID(175)
	if err := s.Save(old.Monitor); err != nil {
		t.Fatal(err)
	}
	w := newTestMonitor(t, rules)
	fill(w)
	w.now = old.now
	if err := s.Load(w.Monitor, w.now); err != nil {
		t.Fatal(err)
	}
	w.healthyFor(2 * quietPeriod)
	w.wantState(gpuName, Degraded)
}

func TestLoadDoesNotReviveEndedFindings(t *testing.T) {
	s, _ := newStore()
	old := newTestMonitor(t, nil)
	old.answerRecovery(device.RecoveryReset)
	old.sendXID(95)
	w := old.restart(s, nil)
	w.watcherUp("load-1")
	w.advance(time.Second)
	w.answerRecovery(device.RecoveryNone)
	w.wantState(gpuName, Healthy)
	old.now = w.now
	old.sendXIDOn(64, 19, 1, 1) // the monitor w has not seen this XID
	if err := s.Save(old.Monitor); err != nil {
		t.Fatal(err)
	}
	w.advance(time.Second)
	if err := s.Load(w.Monitor, w.now); err != nil {
		t.Fatal(err)
	}
	w.wantState(gpuName+"-mig-19-1", Unhealthy)
	w.wantState(gpuName+"-mig-19-2", Healthy)
}

func TestClockSetBackDoesNotKeepFindings(t *testing.T) {
	s, _ := newStore()
	w := newTestMonitor(t, nil)
	w.sendXID(31)
	if err := s.Save(w.Monitor); err != nil {
		t.Fatal(err)
	}
	before := w.now.Add(-1000 * time.Hour)
	m := New(nil, before)
	if err := s.Load(m, before); err != nil {
		t.Fatal(err)
	}
	m.Tick(before.Add(quietPeriod))
	if f := m.View().Findings(address); len(f) > 0 && f[0].Code == "xid-31" {
		t.Errorf("%+v", f)
	}
}

// A clock that is hours ahead at the boot is set back while the plugin runs. Taints have the times,
// so Pods that tolerate one for a while would stay for hours. A check would count only after hours.
func TestClockSetBackLeavesNoTimeInTheFuture(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.sendXID(79)
	version := w.Version()
	w.advance(-8 * time.Hour)
	if v := w.verdict(gpuName); len(v.Causes) != 1 || v.Causes[0].Since.After(w.now) || v.Causes[0].First.After(w.now) ||
		v.Causes[0].Last.After(w.now) || w.Version() == version {
		t.Errorf("version %d after %d: %+v", w.Version(), version, v)
	}
	w.wantUnvalidated(true)
	w.check()
	w.wantUnvalidated(false)
}

func TestUnreadableFileIsSetAside(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.sendXID(95)
	for name, spoil := range map[string]func([]byte) []byte{
		"empty":      func([]byte) []byte { return nil },
		"truncated":  func(b []byte) []byte { return b[:len(b)/2] },
		"altered":    func(b []byte) []byte { return []byte(strings.Replace(string(b), "boot-1", "boot-2", 1)) },
		"wrong type": func([]byte) []byte { return []byte(`[]`) },
	} {
		t.Run(name, func(t *testing.T) {
			s, disk := newStore()
			if err := s.Save(w.Monitor); err != nil {
				t.Fatal(err)
			}
			raw, err := disk.ReadFile(s.Path)
			if err != nil {
				t.Fatal(err)
			}
			disk.Put(s.Path, spoil(raw))
			m := New(nil, w.now)
			if err := s.Load(m, w.now); err == nil || !strings.Contains(err.Error(), s.Path) || len(m.cards) != 0 {
				t.Errorf("%v, %v", m.cards, err)
			}
			if names := disk.Names(filepath.Dir(s.Path)); len(names) != 1 || names[0] != "health.json.unreadable" {
				t.Errorf("%q", names)
			}
			if err := s.Load(m, w.now); err != nil {
				t.Errorf("the next start: %v", err)
			}
		})
	}
}

// The plugin loads the findings again when it becomes the leader, before it first saves.
func TestOneFailedReadKeepsTheFindings(t *testing.T) {
	s, disk := newStore()
	w := newTestMonitor(t, nil)
	w.sendXID(95)
	if err := s.Save(w.Monitor); err != nil {
		t.Fatal(err)
	}
	m := New(nil, w.now)
	disk.FailReads(s.Path, syscall.EIO)
	if err := s.Load(m, w.now); !errors.Is(err, syscall.EIO) {
		t.Error(err)
	}
	disk.FailReads(s.Path, nil)
	if err := s.Load(m, w.now); err != nil {
		t.Fatal(err)
	}
	if f := m.View().Findings(address); len(f) != 1 || f[0].Code != "xid-95" {
		t.Errorf("%+v", f)
	}
}

func TestPipeInPlaceOfTheFindingsIsSetAside(t *testing.T) {
	w := newTestMonitor(t, nil)
	s := Store{Disk: durable.OS{}, Path: filepath.Join(t.TempDir(), "health.json"), BootID: "boot-1"}
	durabletest.Pipe(t, s.Path)
	m := New(nil, w.now)
	var first, next error
	durabletest.Returns(t, func() { first, next = s.Load(m, w.now), s.Load(m, w.now) })
	if first == nil || !strings.Contains(first.Error(), s.Path) || next != nil {
		t.Errorf("first %v, then %v", first, next)
	}
	if err := s.Save(w.Monitor); err != nil {
		t.Error(err)
	}
}

func TestFileOfLaterVersionIsRefusedAndKept(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.sendXID(95)
	s, disk := newStore()
	later := statefile.Format{Kind: "Health", Version: 3, MinReader: 2}
	if err := later.Write(disk, s.Path, map[string]any{"later": 1}); err != nil {
		t.Fatal(err)
	}
	raw, err := disk.ReadFile(s.Path)
	if err != nil {
		t.Fatal(err)
	}
	m := New(nil, w.now)
	for _, err := range []error{s.Load(m, w.now), s.Save(w.Monitor)} {
		if newer := new(statefile.NewerError); !errors.As(err, &newer) || !strings.Contains(err.Error(), s.Path) {
			t.Error(err)
		}
	}
	if got, err := disk.ReadFile(s.Path); err != nil || !bytes.Equal(got, raw) || len(m.cards) != 0 {
		t.Errorf("%s, %v", got, err)
	}
}

func TestSaveReturnsDiskError(t *testing.T) {
	s, disk := newStore()
	w := newTestMonitor(t, nil)
	disk.FailAt(1, syscall.ENOSPC)
	if err := s.Save(w.Monitor); !errors.Is(err, syscall.ENOSPC) {
		t.Error(err)
	}
}

// FuzzStateFile loads arbitrary payloads with a correct checksum. Load may reject a payload. After
// Load accepts one, the monitor must still work, and no cause may have a start time in the future.
func FuzzStateFile(f *testing.F) {
	f.Add([]byte(`{"bootID":"boot-1","cards":[{"card":{"pciAddress":"0000:1b:00.0","uuid":"GPU-1"},"findings":[` +
		`{"code":"xid-79","xid":79,"state":"Unhealthy","ends":"reset",` +
		`"first":"2026-03-01T12:00:00Z","last":"2026-03-01T12:00:00Z","since":"2026-03-01T12:00:00Z"}]}]}`))
	f.Add([]byte(`{"bootID":"boot-1","cards":[null]}`))
	f.Add([]byte(`{"bootID":"boot-1","cards":[{"findings":[null]}]}`))
	f.Add([]byte(`{"bootID":"boot-1","cards":[{"card":{"pciAddress":"0000:1b:00.0"},"findings":[{"code":"x","ends":"time",` +
		`"part":{"instance":{"profileID":19,"placement":{"start":4294967295,"size":4294967295}},"compute":3}}]}]}`))
	f.Fuzz(func(t *testing.T, payload []byte) {
		s, disk := newStore()
		if err := format.Write(disk, s.Path, json.RawMessage(payload)); err != nil {
			return // no JSON
		}
		w := &testMonitor{Monitor: New(nil, start), t: t, now: start}
		if err := s.Load(w.Monitor, start); err != nil {
			return
		}
		w.Expect([]device.GPU{gpu}, start)
		w.watcherUp("load-1")
		w.sendXID(79)
		w.wantState(gpuName, Unhealthy)
		w.answerOK()
		w.healthyFor(time.Hour)
		for _, name := range gpu.DeviceNames() {
			for _, c := range w.verdict(name).Causes {
				if c.Since.After(w.now) {
					t.Errorf("%s since %s", name, c.Since)
				}
			}
		}
		w = w.restart(s, nil)
		w.wantState(gpuName, Unhealthy)
	})
}

package health

import (
	"errors"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable/durabletest"
)

func onDisk() (Store, *durabletest.Disk) {
	disk := durabletest.New()
	return Store{Disk: disk, Path: "/state/health.json", BootID: "boot-1"}, disk
}

// restarted is the same watcher with a new monitor that has read what the old one saved.
func (w *watched) restarted(s Store, o Options) *watched {
	w.t.Helper()
	if err := s.Save(w.Monitor); err != nil {
		w.t.Fatal(err)
	}
	m := New(o, w.now)
	if err := s.Load(m, w.now); err != nil {
		w.t.Fatal(err)
	}
	return &watched{Monitor: m, t: w.t, now: w.now}
}

func TestAResetWhileThePluginWasAwayIsSeen(t *testing.T) {
	for name, after := range map[string]func(w *watched){
		"the action is none now": func(w *watched) { w.recovery(device.RecoveryNone) },
		"errors began anew": func(w *watched) {
			w.answer(device.Condition{Uncorrected: ptr.To(uint64(0)), Recovery: device.RecoveryNone})
		},
		"the driver was loaded again": func(w *watched) {
			w.listen("load-2")
			w.recovery(device.RecoveryNone)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, _ := onDisk()
			w := watch(t, Options{})
			w.answer(device.Condition{Uncorrected: ptr.To(uint64(3)), Recovery: device.RecoveryReset})
			w.xid(95)
			w = w.restarted(s, Options{})
			w.want(whole, Unhealthy)
			w.wait(time.Minute)
			w.want(whole, Unhealthy)
			after(w)
			w.want(whole, Healthy)
		})
	}
}

func TestARestartEndsNothing(t *testing.T) {
	s, _ := onDisk()
	w := watch(t, Options{})
	w.recovery(device.RecoveryNone)
	w.xid(79)
	first := w.now
	w.pass(time.Hour)
	for range 3 {
		w = w.restarted(s, Options{})
		w.wait(time.Second)
		w.listen("load-1")
		w.Expect([]device.GPU{gpu}, w.now)
		w.recovery(device.RecoveryNone)
		if v := w.of(whole); v.State != Unhealthy || !v.Causes[0].Since.Equal(first) {
			t.Fatalf("%+v", v)
		}
		if c := w.Changes(); len(c) != 0 {
			t.Errorf("a restart is told as %+v", c)
		}
	}
}

func TestARebootForgets(t *testing.T) {
	s, _ := onDisk()
	w := watch(t, Options{})
	w.xid(79)
	if err := s.Save(w.Monitor); err != nil {
		t.Fatal(err)
	}
	s.BootID = "boot-2"
	m := New(Options{}, w.now)
	if err := s.Load(m, w.now); err != nil || len(m.cards) != 0 {
		t.Errorf("%v, %v", m.cards, err)
	}
}

func TestOtherRulesHoldForWhatIsKnownAlready(t *testing.T) {
	s, _ := onDisk()
	w := watch(t, Options{})
	w.xid(79)
	w.xid(95)
	w = w.restarted(s, Options{Rules: Rules{79: Told, 95: Ignored}})
	w.want(whole, Healthy)
	w = w.restarted(s, Options{})
	w.want(whole, Unhealthy)
}

func TestAnotherCardAtThePlaceInheritsNothing(t *testing.T) {
	s, _ := onDisk()
	w := watch(t, Options{})
	w.xid(95)
	if err := s.Save(w.Monitor); err != nil {
		t.Fatal(err)
	}
	m := New(Options{}, w.now)
	other := gpu
	other.UUID = "GPU-2"
	m.Expect([]device.GPU{other}, w.now)
	if err := s.Load(m, w.now); err != nil {
		t.Fatal(err)
	}
	if v := m.View().Of(other, device.Name{GPU: whole}); v.State != Healthy {
		t.Errorf("%+v", v)
	}
}

func TestWhatOneInstanceSawTheOtherTakesOver(t *testing.T) {
	s, _ := onDisk()
	old := watch(t, Options{})
	old.xid(95)
	first := old.now
	if err := s.Save(old.Monitor); err != nil {
		t.Fatal(err)
	}
	w := watch(t, Options{})
	w.now = first.Add(time.Minute)
	w.xid(95)
	w.xid(31)
	if err := s.Load(w.Monitor, w.now); err != nil {
		t.Fatal(err)
	}
	if v := w.of(whole); !v.Causes[0].Since.Equal(first) || len(w.View().Findings(address)) != 2 {
		t.Errorf("%+v", v)
	}
}

func TestWhatIsOverDoesNotComeBackFromTheDisk(t *testing.T) {
	s, _ := onDisk()
	old := watch(t, Options{})
	old.recovery(device.RecoveryReset)
	old.xid(95)
	w := old.restarted(s, Options{})
	w.listen("load-1")
	w.wait(time.Second)
	w.recovery(device.RecoveryNone)
	w.want(whole, Healthy)
	old.now = w.now
	old.xidOn(64, 19, 1, 1) // which the new one has not heard of
	if err := s.Save(old.Monitor); err != nil {
		t.Fatal(err)
	}
	w.wait(time.Second)
	if err := s.Load(w.Monitor, w.now); err != nil {
		t.Fatal(err)
	}
	w.want(whole+"-mig-19-1", Unhealthy)
	w.want(whole+"-mig-19-2", Healthy)
}

func TestAClockThatWasSetBackDoesNotKeepFindings(t *testing.T) {
	s, _ := onDisk()
	w := watch(t, Options{})
	w.xid(31)
	if err := s.Save(w.Monitor); err != nil {
		t.Fatal(err)
	}
	before := w.now.Add(-1000 * time.Hour)
	m := New(Options{}, before)
	if err := s.Load(m, before); err != nil {
		t.Fatal(err)
	}
	m.Tick(before.Add(DefaultQuiet))
	if f := m.View().Findings(address); len(f) > 0 && f[0].Code == "xid-31" {
		t.Errorf("%+v", f)
	}
}

func TestAnUnreadableFileIsPutAside(t *testing.T) {
	w := watch(t, Options{})
	w.xid(95)
	for name, spoil := range map[string]func([]byte) []byte{
		"empty":   func([]byte) []byte { return nil },
		"cut off": func(b []byte) []byte { return b[:len(b)/2] },
		"altered": func(b []byte) []byte { return []byte(strings.Replace(string(b), "boot-1", "boot-2", 1)) },
		"too new": func(b []byte) []byte {
			return []byte(strings.Replace(string(b), `"formatVersion":1`, `"formatVersion":9`, 1))
		},
		"other words": func([]byte) []byte { return []byte(`[]`) },
	} {
		t.Run(name, func(t *testing.T) {
			s, disk := onDisk()
			if err := s.Save(w.Monitor); err != nil {
				t.Fatal(err)
			}
			raw, err := disk.ReadFile(s.Path)
			if err != nil {
				t.Fatal(err)
			}
			disk.Put(s.Path, spoil(raw))
			m := New(Options{}, w.now)
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

func TestADiskThatFailsIsAnError(t *testing.T) {
	s, disk := onDisk()
	w := watch(t, Options{})
	disk.FailAt(1, syscall.ENOSPC)
	if err := s.Save(w.Monitor); !errors.Is(err, syscall.ENOSPC) {
		t.Error(err)
	}
}

// FuzzStateFile gives the plugin any payload with a right checksum: it may refuse it, and must neither fail nor say what it could not have written.
func FuzzStateFile(f *testing.F) {
	f.Add([]byte(`{"bootID":"boot-1","cards":[{"card":{"pciAddress":"0000:1b:00.0","uuid":"GPU-1"},"findings":[{"code":"xid-79","xid":79,"state":"Unhealthy","ends":"reset","first":"2026-03-01T12:00:00Z","last":"2026-03-01T12:00:00Z","since":"2026-03-01T12:00:00Z"}]}]}`))
	f.Add([]byte(`{"bootID":"boot-1","cards":[null]}`))
	f.Add([]byte(`{"bootID":"boot-1","cards":[{"findings":[null]}]}`))
	f.Add([]byte(`{"bootID":"boot-1","cards":[{"card":{"pciAddress":"0000:1b:00.0"},"findings":[{"code":"x","ends":"time","part":{"instance":{"profileID":19,"placement":{"start":4294967295,"size":4294967295}},"compute":3}}]}]}`))
	f.Fuzz(func(t *testing.T, payload []byte) {
		s, disk := onDisk()
		disk.Put(s.Path, []byte(`{"formatVersion":1,"checksum":"`+checksum(payload)+`","payload":`+string(payload)+`}`))
		w := &watched{Monitor: New(Options{}, start), t: t, now: start}
		if err := s.Load(w.Monitor, start); err != nil {
			return
		}
		w.Expect([]device.GPU{gpu}, start)
		w.listen("load-1")
		w.xid(79)
		w.want(whole, Unhealthy)
		w.ok()
		w.pass(time.Hour)
		for _, name := range gpu.DeviceNames() {
			for _, c := range w.of(name).Causes {
				if c.Since.After(w.now) {
					t.Errorf("%s since %s", name, c.Since)
				}
			}
		}
		w = w.restarted(s, Options{})
		w.want(whole, Unhealthy)
	})
}

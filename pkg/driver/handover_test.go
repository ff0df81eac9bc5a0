package driver

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// handover is a simulated node on which a newer plugin instance takes over from an older one. When
// the newer one ends, the older one leads again.
type handover struct {
	older, newer *healthNode
}

func newHandover(t *testing.T) *handover {
	t.Helper()
	older := newHealthNode(t)
	cfg := *older.cfg
	cfg.PodUID, cfg.HookSource = "newer", "/bin/false" // the newer instance has another hook binary
	cfg.HookPath = filepath.Join(cfg.HookDirs[0], "hooks-2", "nvidia-cdi-hook")
	newer := &healthNode{node: &node{cfg: &cfg, client: older.client, probe: NewProbe()}}
	newer.setHardware("driver", twoGPUs)
	older.run(t)
	older.register(t)
	return &handover{older, newer}
}

func (r *handover) startNewer(t *testing.T) {
	t.Helper()
	r.newer.startPlugin(t)
	eventually(t, "the newer instance takes over", r.older.driver.host.leader.NewerLeads)
}

func (r *handover) expectOlder(t *testing.T, ready bool, why string) {
	t.Helper()
	r.older.setHardware(why, twoGPUs) // the new fingerprint makes the driver check its conditions again
	eventually(t, "the older instance reports: "+why, func() bool {
		err := r.older.probe.isReady(t.Context())
		return ready && err == nil || !ready && err != nil && strings.Contains(err.Error(), why)
	})
}

func (r *handover) expectOlderLeadsAgain(t *testing.T) {
	t.Helper()
	if err := r.newer.stop(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the older instance publishes again", func() bool { return !r.older.driver.host.leader.NewerLeads() })
	r.expectOlder(t, true, "ready")
	if msg := r.older.prepare(t, r.older.claim(t, "late", firstGPU)).GetError(); msg != "" {
		t.Error(msg)
	}
	eventually(t, "its own hook is installed again", func() bool { return sameFiles(t, r.older.cfg.HookSource, r.older.cfg.HookPath) })
}

func sameFiles(t *testing.T, one, other string) bool {
	t.Helper()
	a, errA := os.ReadFile(one)
	b, errB := os.ReadFile(other)
	return errA == nil && errB == nil && bytes.Equal(a, b)
}

// blockHook replaces the hook binary by a directory, so that no plugin instance can install the
// hook. unblock removes the directory.
func (r *handover) blockHook(t *testing.T) (unblock func()) {
	t.Helper()
	hook := r.older.cfg.HookPath
	if err := os.Remove(hook); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(hook, "full"), 0o755); err != nil {
		t.Fatal(err)
	}
	r.expectOlder(t, false, "hook")
	return func() {
		if err := os.RemoveAll(hook); err != nil {
			t.Fatal(err)
		}
	}
}

func TestFormerLeaderSeesRepairedHook(t *testing.T) {
	t.Parallel()
	r := newHandover(t)
	unblock := r.blockHook(t)
	unblock()
	r.startNewer(t)
	r.expectOlder(t, true, "ready")
	r.expectOlderLeadsAgain(t)
}

// Each instance keeps the hook that its claims' specs name, whichever instance leads.
func TestInstancesOfTwoVersionsKeepTheirHooks(t *testing.T) {
	t.Parallel()
	r := newHandover(t)
	r.startNewer(t)
	eventually(t, "the newer instance installs its hook", func() bool { return sameFiles(t, r.newer.cfg.HookSource, r.newer.cfg.HookPath) })
	if err := os.Remove(r.older.cfg.HookPath); err != nil {
		t.Fatal(err)
	}
	r.older.setHardware("hook gone", twoGPUs)
	older := r.older.cfg
	eventually(t, "the older instance installs its hook again", func() bool { return sameFiles(t, older.HookSource, older.HookPath) })
	if !sameFiles(t, r.newer.cfg.HookSource, r.newer.cfg.HookPath) {
		t.Error("the older instance overwrote the newer one's hook")
	}
	r.expectOlderLeadsAgain(t)
}

func TestFormerLeaderLeadsAgain(t *testing.T) {
	t.Parallel()
	r := newHandover(t)
	unblock := r.blockHook(t)
	r.startNewer(t)
	unblock()
	r.expectOlderLeadsAgain(t)
}

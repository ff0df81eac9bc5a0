package driver

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// rollout is a node on which a newer instance takes over from an older one, and ends again.
type rollout struct {
	older, newer *ailing
}

func newRollout(t *testing.T) *rollout {
	t.Helper()
	older := newAiling(t)
	cfg := *older.cfg
	cfg.PodUID, cfg.HookSource = "newer", "/bin/false" // another version of the hook
	newer := &ailing{node: &node{cfg: &cfg, client: older.client, probe: NewProbe()}}
	newer.say("driver", twoGPUs)
	older.run(t)
	older.register(t)
	return &rollout{older, newer}
}

func (r *rollout) takeOver(t *testing.T) {
	t.Helper()
	r.newer.begin(t)
	eventually(t, "the newer instance takes over", r.older.driver.superseded.Load)
}

func (r *rollout) olderIs(t *testing.T, ready bool, why string) {
	t.Helper()
	r.older.say(why, twoGPUs) // wakes it
	eventually(t, "the older instance says: "+why, func() bool {
		err := r.older.probe.isReady(t.Context())
		return ready && err == nil || !ready && err != nil && strings.Contains(err.Error(), why)
	})
}

func (r *rollout) olderServesAlone(t *testing.T) {
	t.Helper()
	if err := r.newer.stop(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the older instance publishes again", func() bool { return !r.older.driver.superseded.Load() })
	r.olderIs(t, true, "ready")
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

// blockHook puts a directory where the hook belongs, which no instance removes.
func (r *rollout) blockHook(t *testing.T) (unblock func()) {
	t.Helper()
	hook := r.older.cfg.HookPath
	if err := os.Remove(hook); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(hook, "full"), 0o755); err != nil {
		t.Fatal(err)
	}
	r.olderIs(t, false, "hook")
	return func() {
		if err := os.RemoveAll(hook); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSupersededSeesGoodHook(t *testing.T) {
	r := newRollout(t)
	unblock := r.blockHook(t)
	unblock()
	r.takeOver(t)
	r.olderIs(t, true, "ready")
	r.olderServesAlone(t)
}

func TestSupersededSeesBadHook(t *testing.T) {
	r := newRollout(t)
	r.takeOver(t)
	eventually(t, "the newer instance installs its hook", func() bool { return sameFiles(t, r.newer.cfg.HookSource, r.older.cfg.HookPath) })
	if err := os.Chmod(r.older.cfg.HookPath, 0o644); err != nil {
		t.Fatal(err)
	}
	r.olderIs(t, false, "not executable")
	if !sameFiles(t, r.newer.cfg.HookSource, r.older.cfg.HookPath) {
		t.Error("the older instance installed a hook that is the newer one's to keep")
	}
	if err := os.Chmod(r.older.cfg.HookPath, 0o755); err != nil {
		t.Fatal(err)
	}
	r.olderIs(t, true, "ready")
	r.olderServesAlone(t)
}

func TestSupersededLeadsAgain(t *testing.T) {
	r := newRollout(t)
	r.newer.cfg.HookPath = filepath.Join(r.newer.cfg.PluginDir, "bin-newer", "nvidia-cdi-hook")
	unblock := r.blockHook(t)
	r.takeOver(t)
	unblock()
	r.olderServesAlone(t)
}

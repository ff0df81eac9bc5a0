package uninstall

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
)

// fakeNode fakes a node with one GPU in MIG mode and no prepared claims.
type fakeNode struct {
	released   bool // the GPUs are released for a driver upgrade
	disable    func(ctx context.Context) error
	removeHook error
	events     []string
	removed    []string
}

func (n *fakeNode) Usage() (ledger.Usage, error) { return ledger.Usage{}, nil }

func (n *fakeNode) DisableUnusedMIGMode(ctx context.Context, _ device.GPU) (bool, error) {
	err := n.disable(ctx)
	return err == nil, err
}

func (n *fakeNode) Use() (done func(), ok bool) { return func() {}, !n.released }

func (n *fakeNode) Snapshot() inventory.Snapshot {
	gpu := nvidia.GPU{GPU: device.GPU{PCIAddress: "0000:1b:00.0", MIG: &device.MIG{Enabled: true}}}
	return inventory.Snapshot{Node: nvidia.Node{GPUs: []nvidia.GPU{gpu}}}
}

func (n *fakeNode) StopAll(context.Context) error {
	n.removed = append(n.removed, "daemons")
	return nil
}

func (n *fakeNode) RemoveBase() error { n.removed = append(n.removed, "base spec"); return nil }

func (n *fakeNode) Remove() error { n.removed = append(n.removed, "hook"); return n.removeHook }

func (n *fakeNode) EventNow(ctx context.Context, _ kubernetes.Interface, reason events.Reason, message string) error {
	n.events = append(n.events, reason.String()+": "+message)
	return ctx.Err()
}

// cleanUp runs the Cleaner of a plugin whose DaemonSet is deleted. It returns the plugin directory.
func (n *fakeNode) cleanUp(t *testing.T) (pluginDir string) {
	t.Helper()
	pluginDir = filepath.Join(t.TempDir(), "plugin")
	lock, err := AcquireInstanceLock(t.Context(), pluginDir)
	if err != nil {
		t.Fatal(err)
	}
	c := &Cleaner{
		Client: fake.NewClientset(), Namespace: "gpu", DaemonSet: "plugin",
		Node: "node", PluginDir: pluginDir, StateDir: filepath.Join(pluginDir, "state"),
		Lock: lock, Claims: n, Use: n.Use, Snapshot: n.Snapshot, StopDaemons: n.StopAll, EventNow: n.EventNow,
		RemoveFiles: []func() error{n.RemoveBase, n.Remove, n.Remove},
	}
	defer c.Release()
	c.CleanUp(t.Context())
	return pluginDir
}

func TestCleanupWaitsTenSecondsForHungGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &fakeNode{disable: func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) }}
		began := time.Now()
		n.cleanUp(t)
		if took := time.Since(began); took != migModesTimeout {
			t.Errorf("it took %s", took)
		}
		// The Event must be written although the time limit for switching off MIG mode has passed.
		if len(n.events) != 1 || !strings.HasPrefix(n.events[0], "MIGModeStays: ") {
			t.Errorf("Events: %q", n.events)
		}
	})
}

func TestCleanupDoesNotOpenReleasedHardware(t *testing.T) {
	n := &fakeNode{released: true, disable: func(context.Context) error { t.Error("the GPU was opened"); return nil }}
	n.cleanUp(t)
}

func TestCleanupKeepsTheLockOfACardThatACallStillChanges(t *testing.T) {
	pluginDir := filepath.Join(t.TempDir(), "plugin")
	stateDir := filepath.Join(pluginDir, "state")
	if err := os.MkdirAll(filepath.Join(stateDir, "claims"), 0o700); err != nil {
		t.Fatal(err)
	}
	hung, free := filepath.Join(stateDir, "gpu-0000-1b-00-0.lock"), filepath.Join(stateDir, "gpu-0000-c3-00-0.lock")
	for _, path := range []string{hung, free} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	held, err := os.Open(hung)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(held.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if _, err := removePluginDir(pluginDir, stateDir); err == nil || !strings.Contains(err.Error(), hung) {
		t.Errorf("the error does not name the lock that stays: %v", err)
	}
	if entries, err := os.ReadDir(stateDir); err != nil || len(entries) != 1 || entries[0].Name() != filepath.Base(hung) {
		t.Errorf("left in the state directory: %v, %v", entries, err)
	}
	_ = held.Close()
	if _, err := removePluginDir(pluginDir, stateDir); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(pluginDir); !os.IsNotExist(err) {
		t.Errorf("the plugin directory still exists: %v", err)
	}
}

func TestCleanupContinuesAfterAnError(t *testing.T) {
	n := &fakeNode{disable: func(context.Context) error { return nil }, removeHook: errors.New("read-only")}
	dir := n.cleanUp(t)
	if got := strings.Join(n.removed, ", "); got != "daemons, base spec, hook, hook" {
		t.Errorf("removed: %s", got)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the plugin directory still exists: %v", err)
	}
}

package driver

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/preparetest"
)

func TestOnlyStaleSocketsAreRemoved(t *testing.T) {
	plugin, registrar := t.TempDir(), t.TempDir()
	stale := []string{filepath.Join(plugin, "dra-1.sock"), filepath.Join(registrar, DriverName+"-1-reg.sock")}
	kept := []string{
		filepath.Join(plugin, "dra-2.sock"), filepath.Join(registrar, DriverName+"-2-reg.sock"),
		filepath.Join(registrar, "other.example.com-reg.sock")}
	for _, path := range append(append([]string(nil), stale...), kept[2]) {
		createStaleSocket(t, path)
	}
	for _, path := range kept[:2] {
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = l.Close() }()
	}
	if err := removeStaleSockets(t.Context(), plugin, registrar); err != nil {
		t.Fatal(err)
	}
	for _, path := range stale {
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("%s is still there (%v)", path, err)
		}
	}
	for _, path := range kept {
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("%s is gone: %v", path, err)
		}
	}
}

// The path of a Unix socket has at most 107 bytes. MicroK8s' kubelet root alone has 39.
func TestPluginServesBelowDeepKubeletRoot(t *testing.T) {
	const microk8s = len("/var/snap/microk8s/common/var/lib/kubelet")
	for _, length := range []int{len("/var/lib/kubelet"), 30, 38, microk8s, 57} {
		t.Run(fmt.Sprint(length, " bytes"), func(t *testing.T) {
			n := newNode(t)
			n.cfg.PodUID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
			n.setKubeletRoot(t, length)
			stale := []string{
				filepath.Join(n.cfg.PluginDir, "dra-0123abcd.sock"),
				filepath.Join(n.cfg.RegistrarDir, DriverName+"-0123abcd-reg.sock"),
			}
			for _, path := range stale {
				if len(path) <= maxSocketPath {
					createStaleSocket(t, path)
				}
			}
			n.start(t)
			n.register(t)
			c := n.claim(t, "deep", firstGPU)
			eventually(t, "a claim is prepared", func() bool { return n.prepare(t, c).GetError() == "" })
			if msg := n.unprepare(t, c); msg != "" {
				t.Error(msg)
			}
			for _, path := range stale {
				if _, err := os.Lstat(path); !os.IsNotExist(err) {
					t.Errorf("%s is still there (%v)", path, err)
				}
			}
			if err := n.stop(); err != nil {
				t.Error(err)
			}
		})
	}
}

// The helper creates the sockets once. Without them the kubelet cannot register the plugin after
// its next restart, or call it.
func TestRemovedSocketEndsLiveness(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.start(t)
	n.register(t)
	serving, registering := filepath.Join(n.cfg.PluginDir, "dra-*.sock"), filepath.Join(n.cfg.RegistrarDir, DriverName+"-*-reg.sock")
	for _, pattern := range []string{serving, registering} {
		if err := n.probe.isLive(t.Context()); err != nil {
			t.Errorf("with both sockets: %v", err)
		}
		socket := only(pattern)
		if err := os.Rename(socket, socket+".away"); err != nil {
			t.Fatal(err)
		}
		if err := n.probe.isLive(t.Context()); err == nil || !strings.Contains(err.Error(), socket) {
			t.Errorf("without %s: %v", socket, err)
		}
		if err := os.Rename(socket+".away", socket); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTooDeepKubeletRootIsRefused(t *testing.T) {
	for uid, length := range map[string]int{"0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0": 58, "": 75} {
		n := newNode(t)
		n.cfg.PodUID = uid
		n.setKubeletRoot(t, length)
		d, err := New(t.Context(), n.cfg, Parts{
			Client: n.client, StatusClient: n.client, Hardware: n.hardware(), Partitions: preparetest.NoPartitions{},
			Metrics: metrics.New("test"), Watch: watchNothing, StopWorkers: noWorkers,
		})
		if err != nil {
			t.Fatal(err)
		}
		err = d.Run(t.Context(), n.probe)
		if err == nil || !strings.Contains(err.Error(), n.cfg.RegistrarDir) || !strings.Contains(err.Error(), "107") {
			t.Errorf("the error does not name the path and the limit: %v", err)
		}
	}
}

// setKubeletRoot moves the plugin's directories below a kubelet root whose path has this length.
func (n *node) setKubeletRoot(t *testing.T, length int) {
	t.Helper()
	dir, err := os.MkdirTemp("", "") //nolint:usetesting // the path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	root := filepath.Join(dir, strings.Repeat("k", max(1, length-len(dir)-1)))
	n.cfg.PluginDir = filepath.Join(root, "plugins", DriverName)
	n.cfg.RegistrarDir = filepath.Join(root, "plugins_registry")
	n.cfg.HookDirs = []string{filepath.Join(n.cfg.PluginDir, "bin")}
	n.cfg.HookPath = filepath.Join(n.cfg.HookDirs[0], "hooks-1", "nvidia-cdi-hook")
	for _, d := range []string{n.cfg.StateDir(), n.cfg.RegistrarDir} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// createStaleSocket creates a socket file on which no process listens, as a killed process leaves
// it.
func createStaleSocket(t *testing.T, path string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

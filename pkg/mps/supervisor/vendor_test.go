package supervisor

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/smi"
)

// The supervisor must work with NVIDIA's own control daemon, which runs without a GPU: only its
// servers need one. The test takes the daemons of three Debian suites: bookworm has driver 535,
// trixie 550, and experimental 555. Only 555 knows the option for several users.
func TestVendorControlDaemon(t *testing.T) {
	for suite, multiUser := range map[string]bool{"bookworm": false, "trixie": false, "experimental": true} {
		t.Run(suite, func(t *testing.T) {
			n := newVendorNode(t, suite)
			n.superviseSeparately()
			threads := 30
			d := mps.Daemon{ID: "a", Devices: []string{"GPU-a", "GPU-b", "MIG-c"}, ThreadPercentage: &threads,
				MemoryLimits: map[int]uint64{0: 18 << 10, 1: 1500, 2: 700}}
			n.mustStart(d)
			before := n.processes("a")
			n.kill()
			n.await("the daemon has ended with its supervisor", func() bool { return len(n.processes("a")) == 0 })
			n.supervise()
			n.mustStart(d)
			after := n.processes("a")
			if len(after) != 1 || after[0] == before[0] {
				t.Errorf("want another daemon, got processes %v after %v", after, before)
			}
			n.killProcess(after[0])
			n.await("the daemon is ready again", func() bool { s := n.status("a"); return s.State == mps.Ready && s.PID != after[0] })
			d.MemoryLimits[1] = 2048
			n.mustStart(d)
			n.mustStop("a")
			if log := n.supervisorLog(); !strings.Contains(log, "Starting control daemon using socket /tmp/nvidia-mps/control") ||
				!strings.Contains(log, "Exit with status 0") {
				t.Errorf("the daemon's lines are not in the log:\n%s", log)
			}
			if strings.Contains(n.supervisorLog(), "Accepting connection") {
				t.Error("routine lines are in the log")
			}
			d.MultiUser = true
			if multiUser {
				n.mustStart(d)
				n.mustStop("a")
				return
			}
			if err := n.start(d); err == nil || !strings.Contains(err.Error(), "no MPS for several users") {
				t.Error("driver without the option:", err)
			}
			n.mustStop("a")
		})
	}
}

// newVendorNode returns a node with NVIDIA's own MPS programs from this Debian suite instead of the
// fake ones.
func newVendorNode(t *testing.T, suite string) *node {
	t.Helper()
	n := newNode(t)
	for _, program := range []string{"usr/bin/" + controlProgram, "usr/sbin/" + serverProgram} {
		path, err := smi.FetchProgram(t.Context(), suite, "nvidia-cuda-mps", filepath.Base(program))
		if errors.Is(err, smi.ErrUnavailable) {
			t.Skip(err)
		}
		must(t, err)
		data, err := os.ReadFile(path)
		must(t, err)
		target := filepath.Join(n.options.DriverRootMount, program)
		// Remove the hard link first, or the write would go to the fake daemon of all tests.
		must(t, os.Remove(target), os.WriteFile(target, data, 0o755))
	}
	return n
}

// NVIDIA's control daemon runs as root of the node. Root in a client's container creates links
// where the daemon writes, and ends the daemon. No other file of the node may change.
func TestVendorControlDaemonFollowsNoPlantedLink(t *testing.T) {
	for _, suite := range []string{"bookworm", "trixie", "experimental"} {
		t.Run(suite, func(t *testing.T) {
			n := newVendorNode(t, suite)
			n.supervise()
			d := mps.Daemon{ID: "a", Devices: []string{"GPU-a"}}
			n.mustStart(d)
			const secret = "the node's"
			// inside is the driver root's path in the daemon's mount namespace.
			const inside = "/tmp/driver"
			victim, absent := filepath.Join(n.options.DriverRootMount, "victim"), filepath.Join(n.options.DriverRootMount, "absent")
			must(t, os.WriteFile(victim, []byte(secret), 0o600))
			plant := func() {
				for name, target := range map[string]string{controlProgram + ".pid": inside + "/victim",
					"control_lock": inside + "/absent"} { // files that the control daemons of all three drivers write
					path := filepath.Join(n.paths.Pipes("a"), name)
					_ = os.Remove(path)
					_ = os.Symlink(target, path)
				}
			}
			whole := func() {
				t.Helper()
				if data, err := os.ReadFile(victim); err != nil || string(data) != secret {
					t.Errorf("a file of the node changed to %q, %v", data, err)
				}
				if _, err := os.Lstat(absent); err == nil {
					t.Error("a file was created on the node")
				}
			}
			t.Cleanup(whole)
			first := n.status("a").PID
			plant()
			n.killProcess(first)
			n.await("the daemon is ready again", func() bool { s := n.status("a"); return s.State == mps.Ready && s.PID != first })
			whole()
			n.mustStart(d)

			// Create the links again and again, so that some appear between the supervisor's cleanup and the
			// daemon's start.
			enough := make(chan struct{})
			var planting sync.WaitGroup
			planting.Go(func() {
				for {
					select {
					case <-enough:
						return
					default:
						plant()
					}
				}
			})
			before := n.status("a").Restarts
			n.killProcess(n.status("a").PID)
			n.await("the daemon has been restarted with planted links", func() bool {
				s := n.status("a")
				return s.Restarts > before+1 || s.Restarts > before && s.State == mps.Ready
			})
			close(enough)
			planting.Wait()
			whole()
			n.await("the daemon recovers", func() bool { return n.status("a").State == mps.Ready })
			n.mustStop("a")
		})
	}
}

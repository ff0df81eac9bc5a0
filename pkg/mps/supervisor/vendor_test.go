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

// The vendor's own control daemon runs without a GPU; only its servers need one. So what is said to it, and how its answers are read, is tried on the real
// one, of three drivers (bookworm has 535, trixie 550, experimental 555, the first with an option for several users).
func TestTheVendorsControlDaemon(t *testing.T) {
	for suite, multiUser := range map[string]bool{"bookworm": false, "trixie": false, "experimental": true} {
		t.Run(suite, func(t *testing.T) {
			n := newVendorsNode(t, suite)
			n.superviseApart()
			threads := 30
			d := mps.Daemon{ID: "a", Devices: []string{"GPU-a", "GPU-b", "MIG-c"}, ThreadPercentage: &threads, MemoryLimits: map[int]uint64{0: 18 << 10, 1: 1500, 2: 700}}
			n.mustStart(d)
			before := n.processes("a")
			n.kill()
			n.supervise()
			n.mustStart(d)
			if after := n.processes("a"); len(after) != 1 || after[0] != before[0] {
				t.Errorf("it was not taken over: %v, %v", before, after)
			}
			n.killProcess(before[0])
			n.await("it is ready again", func() bool { s := n.status("a"); return s.State == mps.Ready && s.PID != before[0] })
			d.MemoryLimits[1] = 2048
			n.mustStart(d)
			n.mustStop("a")
			if said := n.said(); !strings.Contains(said, "Starting control daemon using socket /tmp/nvidia-mps/control") || !strings.Contains(said, "Exit with status 0") {
				t.Errorf("its words are not in the log:\n%s", said)
			}
			if strings.Contains(n.said(), "Accepting connection") {
				t.Error("routine is in the log")
			}
			d.MultiUser = true
			if multiUser {
				n.mustStart(d)
				n.mustStop("a")
				return
			}
			if err := n.start(d); err == nil || !strings.Contains(err.Error(), "no MPS for several users") {
				t.Error("a driver without the option:", err)
			}
			n.nothingLeft("a")
		})
	}
}

// newVendorsNode is a node whose driver has the vendor's own MPS programs.
func newVendorsNode(t *testing.T, suite string) *node {
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
		must(t, os.Remove(target), os.WriteFile(target, data, 0o755)) // the name was a link to the stand-in
	}
	return n
}

// Root in a client's container puts links where the vendor's daemon, root of the node, writes, and ends it.
func TestTheVendorsControlDaemonFollowsNoPlantedLink(t *testing.T) {
	for _, suite := range []string{"bookworm", "trixie", "experimental"} {
		t.Run(suite, func(t *testing.T) {
			n := newVendorsNode(t, suite)
			n.supervise()
			d := mps.Daemon{ID: "a", Devices: []string{"GPU-a"}}
			n.mustStart(d)
			const secret = "the node's"
			// A place that the daemon sees, by the name that it has there.
			const inside = "/tmp/driver"
			victim, absent := filepath.Join(n.options.DriverRootMount, "victim"), filepath.Join(n.options.DriverRootMount, "absent")
			must(t, os.WriteFile(victim, []byte(secret), 0o600))
			plant := func() {
				for name, target := range map[string]string{controlProgram + ".pid": inside + "/victim", "control_lock": inside + "/absent"} { // the vendor's, in all three
					path := filepath.Join(n.paths.Pipes("a"), name)
					_ = os.Remove(path)
					_ = os.Symlink(target, path)
				}
			}
			whole := func() {
				t.Helper()
				if data, err := os.ReadFile(victim); err != nil || string(data) != secret {
					t.Errorf("a file of the node's is %q now, %v", data, err)
				}
				if _, err := os.Lstat(absent); err == nil {
					t.Error("a file of the node's was made")
				}
			}
			t.Cleanup(whole)
			first := n.status("a").PID
			plant()
			n.killProcess(first)
			n.await("it is ready again", func() bool { s := n.status("a"); return s.State == mps.Ready && s.PID != first })
			whole()
			n.mustStart(d)

			// They are put there again and again, so also between the cleaning and the start.
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
			n.await("it has been started against them", func() bool {
				s := n.status("a")
				return s.Restarts > before+1 || s.Restarts > before && s.State == mps.Ready
			})
			close(enough)
			planting.Wait()
			whole()
			n.await("it gets over it", func() bool { return n.status("a").State == mps.Ready })
			n.mustStop("a")
		})
	}
}

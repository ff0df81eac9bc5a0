package supervisor

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/smi"
)

// The vendor's own control daemon runs without a GPU; only its servers need one. So what is said to it, and how its answers are read, is tried on the real
// one, of three drivers (bookworm has 535, trixie 550, experimental 555, the first with an option for several users).
func TestTheVendorsControlDaemon(t *testing.T) {
	for suite, multiUser := range map[string]bool{"bookworm": false, "trixie": false, "experimental": true} {
		t.Run(suite, func(t *testing.T) {
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

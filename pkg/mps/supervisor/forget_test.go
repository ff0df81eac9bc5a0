package supervisor

import (
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

func TestForgetRemovesDaemonWithoutSupervisor(t *testing.T) {
	needMounts(t)
	paths := mps.Paths{PluginDir: t.TempDir()}
	if err := Forget(t.Context(), paths, procRoot, "claim-0"); err != nil {
		t.Errorf("on a node without a supervisor: %v", err)
	}
	d := directories{paths: paths}
	if err := d.prepare(); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"claim-0", "claim-1"} {
		if err := d.make(id); err != nil {
			t.Fatal(err)
		}
		if err := d.writeSpec("boot", mps.Daemon{ID: id, Devices: []string{"GPU-a"}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := Forget(t.Context(), paths, procRoot, "claim-0"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(paths.Dir("claim-0")); !os.IsNotExist(err) {
		t.Errorf("%s: %v", paths.Dir("claim-0"), err)
	}
	if left, err := d.daemonIDs(); err != nil || !slices.Equal(left, []string{"claim-1"}) {
		t.Errorf("daemons left: %v, %v", left, err)
	}
	if err := RemoveAll(paths); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(paths.Root()); !os.IsNotExist(err) {
		t.Errorf("%s: %v", paths.Root(), err)
	}
}

func TestForgetFailsWhileSupervisorRuns(t *testing.T) {
	n := newNode(t)
	n.supervise()
	n.mustStart(daemonWithLimits("claim-0", "GPU-a", "GPU-b"))
	if err := Forget(t.Context(), n.paths, procRoot, "claim-0"); err == nil || !strings.Contains(err.Error(), "starting or ending") {
		t.Error("wrong error:", err)
	}
	if s := n.status("claim-0"); s.State != mps.Ready {
		t.Errorf("%+v", s)
	}
}

// Several claims may end at the same time, so concurrent calls of Forget must all succeed.
func TestConcurrentForget(t *testing.T) {
	needMounts(t)
	paths := mps.Paths{PluginDir: t.TempDir()}
	d := directories{paths: paths}
	must(t, d.prepare())
	for i := range 16 {
		must(t, d.make("claim-"+itoa(i)))
	}
	var wait sync.WaitGroup
	for i := range 16 {
		id := "claim-" + itoa(i)
		wait.Go(func() {
			if err := Forget(t.Context(), paths, procRoot, id); err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	if left, err := d.daemonIDs(); err != nil || len(left) > 0 {
		t.Error(left, err)
	}
}

// A daemon that hangs in the NVIDIA driver survives its supervisor's Pod. Forget must fail then,
// and succeed once the daemon has ended.
func TestForgetFailsWhileDaemonSurvives(t *testing.T) {
	for name, hide := range map[string]func(*runRecord){
		"recognized by control groups": func(r *runRecord) { r.PID = 0 },
		"recognized by start time":     func(r *runRecord) { r.Groups = "0::/of/another/view" },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.superviseSeparately()
			n.mustStart(mps.Daemon{ID: "a", Devices: []string{"GPU-a"}})
			n.kill()
			d := directories{paths: n.paths}
			var run runRecord
			must(t, d.read("a", runFile, &run))
			pid := run.PID
			hide(&run)
			must(t, d.write("a", runFile, run))
			if err := Forget(t.Context(), n.paths, procRoot, "a"); err == nil || !strings.Contains(err.Error(), itoa(pid)) ||
				!strings.Contains(err.Error(), "mps.enabled") {
				t.Error(err)
			}
			must(t, n.processesOf("a").end(normalWaits), Forget(t.Context(), n.paths, procRoot, "a"))
			n.expectNothingLeft("a")
		})
	}
}

// A killed process that hangs in the NVIDIA driver has given up its memory, and with it the link to
// its program and its environment. It still holds the GPU.
func TestProcessWithoutMemorySurvives(t *testing.T) {
	for state, survives := range map[string]bool{"S": true, "D": true, "Z": false, "X": false} {
		t.Run(state, func(t *testing.T) {
			proc := t.TempDir()
			must(t, os.Mkdir(proc+"/42", 0o755))
			fields := strings.Repeat(" 0", statStart-1)
			must(t, os.WriteFile(proc+"/42/stat", []byte("42 (nvidia-cuda-mps) "+state+fields+" 1234 0\n"), 0o600))
			left, err := survivors(runRecord{PID: 42, StartTime: 1234}, processSet{proc: proc})
			if err != nil || (len(left) == 1) != survives {
				t.Errorf("survivors are %v (%v), want one: %v", left, err, survives)
			}
			if left, err := survivors(runRecord{PID: 42, StartTime: 1}, processSet{proc: proc}); err != nil || len(left) > 0 {
				t.Errorf("another process with the same PID survives: %v (%v)", left, err)
			}
		})
	}
}

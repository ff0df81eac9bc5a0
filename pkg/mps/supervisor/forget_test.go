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

// A server that hangs in the NVIDIA driver survives its supervisor's Pod. Forget must fail then,
// and succeed once the server has ended.
func TestForgetFailsWhileServerSurvives(t *testing.T) {
	n := newNode(t)
	n.behave(behaviour{Server: true})
	n.superviseSeparately()
	n.mustStart(mps.Daemon{ID: "a", Devices: []string{"GPU-a"}})
	n.kill()
	n.await("the control daemon has ended", func() bool { return len(n.daemons("a")) == 0 })
	left := n.processes("a")
	if len(left) != 1 {
		t.Fatalf("want one server, got processes %v", left)
	}
	if err := Forget(t.Context(), n.paths, procRoot, "a"); err == nil || !strings.Contains(err.Error(), itoa(left[0])) ||
		!strings.Contains(err.Error(), "mps.enabled") {
		t.Error(err)
	}
	n.killProcess(left[0])
	n.await("the server has ended", func() bool { return len(n.processes("a")) == 0 })
	must(t, Forget(t.Context(), n.paths, procRoot, "a"))
	n.expectNothingLeft("a")
}

// A killed process that hangs in the NVIDIA driver has given up its memory, and with it the link to
// its program and its environment. It still holds the GPU.
func TestProcessWithoutMemorySurvives(t *testing.T) {
	for state, survives := range map[string]bool{"S": true, "D": true, "Z": false, "X": false} {
		t.Run(state, func(t *testing.T) {
			proc := t.TempDir()
			must(t, os.Mkdir(proc+"/42", 0o755))
			fields := " 1 1 41" + strings.Repeat(" 0", 15)
			must(t, os.WriteFile(proc+"/42/stat", []byte("42 (nvidia-cuda-mps) "+state+fields+" 1234 0\n"), 0o600))
			for run, want := range map[runRecord]bool{{42, "1234"}: survives, {41, "1"}: survives, {42, "1"}: false, {40, "1"}: false} {
				if left, err := (processSet{run, proc}).processes(); err != nil || (len(left) == 1) != want {
					t.Errorf("survivors of %v are %v (%v), want one: %v", run, left, err, want)
				}
			}
		})
	}
}

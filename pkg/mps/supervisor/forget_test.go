package supervisor

import (
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

func TestWithoutASupervisorADaemonIsForgotten(t *testing.T) {
	paths := mps.Paths{PluginDir: t.TempDir(), ShmRoot: t.TempDir()}
	if err := Forget(paths, "claim-0"); err != nil {
		t.Errorf("on a node that has never had a supervisor: %v", err)
	}
	d := directories{paths: paths, shm: new(sync.Mutex)}
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
	if err := Forget(paths, "claim-0"); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{paths.Dir("claim-0"), paths.Shm("claim-0")} {
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("%s: %v", dir, err)
		}
	}
	if left, err := d.known(); err != nil || !slices.Equal(slices.Compact(left), []string{"claim-1"}) {
		t.Errorf("left are %v, %v", left, err)
	}
}

func TestASupervisorsDaemonIsNotForgottenBehindItsBack(t *testing.T) {
	n := newNode(t)
	n.supervise()
	n.mustStart(limited40("claim-0", "GPU-a", "GPU-b"))
	if err := Forget(n.paths, "claim-0"); err == nil {
		t.Error("it was")
	}
	if s := n.status("claim-0"); s.State != mps.Ready {
		t.Errorf("%+v", s)
	}
}

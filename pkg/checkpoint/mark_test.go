package checkpoint

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

// Every version of the driver undoes the preparation of a claim whose record has another state than
// "Prepared". So no other state constant may be "Prepared" or empty.
func TestOnlyPreparedStateMeansPrepared(t *testing.T) {
	for _, s := range []State{Preparing, Reverting} {
		if s == Prepared || s == "" {
			t.Errorf("%q", s)
		}
	}
}

func TestMarkLastsUntilUnmark(t *testing.T) {
	disk := durabletest.New()
	s := open(t, disk)
	marked := func(gpu string, want bool) {
		t.Helper()
		if _, got, err := s.Marked(gpu); err != nil || got != want {
			t.Errorf("%s: %v, %v", gpu, got, err)
		}
	}
	marked(gpu0, false)
	for range 2 {
		if err := s.Mark(gpu0, "boot-1"); err != nil {
			t.Fatal(err)
		}
	}
	disk.PowerCut()
	marked(gpu0, true)
	marked(gpu1, false)
	for range 2 {
		if err := s.Unmark(gpu0); err != nil {
			t.Fatal(err)
		}
	}
	disk.PowerCut()
	marked(gpu0, false)

	disk.Put(filepath.Join(s.marks, gpu0), nil)
	disk.FailReads(filepath.Join(s.marks, gpu0), syscall.EMFILE)
	if _, _, err := s.Marked(gpu0); err == nil || !strings.Contains(err.Error(), gpu0) {
		t.Error(err)
	}
	mark := func(gpu string) error { return s.Mark(gpu, "boot-1") }
	for _, do := range []func(string) error{mark, s.Unmark} {
		if err := do(gpu0); err == nil {
			t.Error("a mark that cannot be read was passed over")
		}
	}
}

// A mark says that the plugin enabled a GPU's MIG mode. The test expects that a mark of an earlier
// boot does not allow the plugin to disable MIG mode, but still makes claims for the whole GPU read
// the hardware.
func TestMarkOfEarlierBootProvesNothing(t *testing.T) {
	disk := durabletest.New()
	s := open(t, disk)
	ours := func(bootID string, want bool) {
		t.Helper()
		boot, marked, err := s.Marked(gpu0)
		if err != nil || (boot == bootID) != want {
			t.Errorf("in %s: %s, %v", bootID, boot, err)
		}
		if !marked {
			t.Error("a claim for the whole GPU would not read the hardware")
		}
	}
	disk.Put(filepath.Join(s.marks, gpu0), nil) // damaged
	ours("boot-1", false)
	for _, bootID := range []string{"boot-1", "boot-2"} {
		if err := s.Mark(gpu0, bootID); err != nil {
			t.Fatal(err)
		}
		disk.PowerCut()
		ours(bootID, true)
		ours(bootID+"+", false)
	}
	ours("boot-1", false)
}

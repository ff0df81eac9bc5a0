package driver

import (
	"os"
	"path/filepath"
	"testing"
)

func TestAClaimThatCannotBeMendedIsNoReasonToMendAgain(t *testing.T) {
	n := newAiling(t)
	n.run(t)
	n.register(t)
	c := n.claim(t, "unreadable", firstGPU)
	eventually(t, "a claim is prepared", func() bool { return n.prepare(t, c).GetError() == "" })
	records, err := filepath.Glob(filepath.Join(n.cfg.StateDir(), "claims", "uid-unreadable*"))
	if err != nil || len(records) != 1 {
		t.Fatalf("records %q, %v", records, err)
	}
	if err := os.WriteFile(records[0], []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := n.driver.mend(t.Context()); err != nil {
		t.Error(err)
	}
}

package driver

import (
	"errors"
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

func TestASpecWrittenAgainIsARepair(t *testing.T) {
	n := newAiling(t)
	n.run(t)
	n.register(t)
	c := n.claim(t, "altered", firstGPU)
	eventually(t, "a claim is prepared", func() bool { return n.prepare(t, c).GetError() == "" })
	if err := n.driver.mend(t.Context()); err != nil {
		t.Error(err)
	}
	if n.metric(t, "gpu_dra_repairs_total kind=cdi-spec") {
		t.Error("what was as it should be is told as repaired")
	}
	spec := filepath.Join(n.cfg.CDIRoot, "k8s.gpu.nvidia.com-claim_uid-altered.json")
	// The watch may not have begun: what it has not seen before is not altered to it.
	eventually(t, "a spec that is removed is told as repaired", func() bool {
		if err := os.Remove(spec); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
		return n.hasEvent(t, "Node", "node", "Repaired", filepath.Base(spec))
	})
	if !n.metric(t, "gpu_dra_repairs_total kind=cdi-spec") {
		t.Error("it is not counted")
	}
}

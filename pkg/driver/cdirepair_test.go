package driver

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestLastingRepairErrorIsNotReturned(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
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
	if err := n.driver.reconciler.RepairSpecs(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestRestoredSpecIsReportedAsRepair(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	n.run(t)
	n.register(t)
	c := n.claim(t, "altered", firstGPU)
	eventually(t, "a claim is prepared", func() bool { return n.prepare(t, c).GetError() == "" })
	if err := n.driver.reconciler.RepairSpecs(t.Context()); err != nil {
		t.Error(err)
	}
	if n.metric(t, "gpu_dra_repairs_total kind=cdi-spec") {
		t.Error("an intact spec is reported as repaired")
	}
	spec := filepath.Join(n.cfg.CDIRoot, "k8s.gpu.nvidia.com-claim_uid-altered.json")
	// The test removes the CDI spec again and again, because the driver's watch of the CDI directory
	// may start late and miss earlier removals.
	eventually(t, "a removed spec is reported as repaired", func() bool {
		if err := os.Remove(spec); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
		return n.hasEvent(t, "Node", "node", "Repaired", filepath.Base(spec))
	})
	if !n.metric(t, "gpu_dra_repairs_total kind=cdi-spec") {
		t.Error("the repair is not counted")
	}
}

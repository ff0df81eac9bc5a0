package driver

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestRestoredSpecIsReportedAsRepair(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	n.run(t)
	n.register(t)
	c := n.claim(t, "altered", firstGPU)
	eventually(t, "a claim is prepared", func() bool { return n.prepare(t, c).GetError() == "" })
	if n.metric(t, "gpu_dra_repairs_total kind=cdi-spec") {
		t.Error("an intact spec is reported as repaired")
	}
	spec := filepath.Join(n.cfg.CDIRoot, "k8s.gpu.nvidia.com-claim_uid-altered.json")
	base := filepath.Join(n.cfg.CDIRoot, "k8s.gpu.nvidia.com-base.json")
	before, err := os.ReadFile(spec)
	if err := errors.Join(err, os.Remove(base), os.Remove(spec)); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{base, spec} {
		eventually(t, "a removed spec is reported as repaired", func() bool {
			_, err := os.Stat(path)
			return err == nil && n.hasEvent(t, "Node", "node", "Repaired", filepath.Base(path))
		})
	}
	if err := os.WriteFile(spec, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	n.driver.reconciler.Wake()
	eventually(t, "an altered spec is repaired", func() bool {
		now, err := os.ReadFile(spec)
		return err == nil && bytes.Equal(now, before)
	})
	if !n.metric(t, "gpu_dra_repairs_total kind=cdi-spec") {
		t.Error("the repair is not counted")
	}
}

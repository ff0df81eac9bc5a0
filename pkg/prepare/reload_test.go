package prepare_test

import (
	"os"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

// A reloaded NVIDIA driver may number its device nodes differently, so /dev/nvidia1 may now be
// another claim's card. The repair must write the new device node into the CDI spec.
func TestSpecNamesNewDeviceNodeAfterDriverReload(t *testing.T) {
	w := newWorld(t)
	mustPrepare(t, w.plugin(t), newClaim("a", allocated("r", gpu1)))
	if !strings.Contains(w.specs.of("uid-a"), "/dev/nvidia1") {
		t.Fatal(w.specs.of("uid-a"))
	}
	w.snapshot.Node.GPUs = []nvidia.GPU{newGPU("0000:1c:00.0", "GPU-1", "/dev/nvidia0")}
	if err := w.plugin(t).RepairAllSpecs(t.Context()); err != nil {
		t.Fatal(err)
	}
	if spec := w.specs.of("uid-a"); !strings.Contains(spec, "/dev/nvidia0") || strings.Contains(spec, "/dev/nvidia1") {
		t.Errorf("the spec is %s", spec)
	}
	// The record must have the new device node too: the next repair uses the record, because the
	// inventory lacks the card.
	w.specs.clear()
	w.snapshot.Node.GPUs = nil
	if err := w.plugin(t).RepairAllSpecs(t.Context()); err != nil {
		t.Fatal(err)
	}
	if spec := w.specs.of("uid-a"); !strings.Contains(spec, "/dev/nvidia0") {
		t.Errorf("the spec is %s", spec)
	}
}

func TestLockFileErrorIsNotReportedAsAWait(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	if err := os.RemoveAll(w.locks); err != nil {
		t.Fatal(err)
	}
	_, err := p.Prepare(t.Context(), newClaim("a", allocated("r", gpu0)))
	if cause.Of(err) != cause.Record || strings.Contains(err.Error(), "under way") || strings.Contains(err.Error(), "another instance") {
		t.Errorf("%s: %v", cause.Of(err), err)
	}
}

func TestStepsOfOtherVersionsAreKept(t *testing.T) {
	w := newWorld(t)
	mustPrepare(t, w.plugin(t), newClaim("a", allocated("r", gpu0)))
	p := w.plugin(t)
	r, _, err := p.Records.Load("uid-a")
	if err != nil {
		t.Fatal(err)
	}
	r.Steps = append(r.Steps, r.Steps[0])
	r.Steps[1].Kind = "of-a-later-version"
	if err := p.Records.Save(r); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Prepare(t.Context(), newClaim("a", allocated("r", gpu0))); err == nil ||
		!strings.Contains(err.Error(), "of-a-later-version") {
		t.Errorf("prepared over a step that would never be reverted: %v", err)
	}
	if r, _, err := p.Records.Load("uid-a"); err != nil || len(r.Steps) != 2 {
		t.Errorf("the record lost the step: %+v, %v", r.Steps, err)
	}
}

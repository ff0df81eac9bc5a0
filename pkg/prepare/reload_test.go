package prepare

import (
	"os"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// A driver that is loaded anew numbers its device nodes anew: what was /dev/nvidia1 may be another claim's card.
func TestAfterADriverReloadASpecNamesTheCardsNewDeviceNode(t *testing.T) {
	w := newWorld(t)
	mustPrepare(t, w.plugin(t), newClaim("a", allocated("r", gpu1)))
	if !strings.Contains(w.specs.of("uid-a"), "/dev/nvidia1") {
		t.Fatal(w.specs.of("uid-a"))
	}
	w.snapshot.Node.GPUs = []nvidia.GPU{card("0000:1c:00.0", "GPU-1", "/dev/nvidia0")}
	if err := w.plugin(t).Mend(t.Context()); err != nil {
		t.Fatal(err)
	}
	if spec := w.specs.of("uid-a"); !strings.Contains(spec, "/dev/nvidia0") || strings.Contains(spec, "/dev/nvidia1") {
		t.Errorf("the spec is %s", spec)
	}
	// The record says so too: what is mended later, while the card is not to be seen, is the new one.
	w.specs.clear()
	w.snapshot.Node.GPUs = nil
	if err := w.plugin(t).Mend(t.Context()); err != nil {
		t.Fatal(err)
	}
	if spec := w.specs.of("uid-a"); !strings.Contains(spec, "/dev/nvidia0") {
		t.Errorf("the spec is %s", spec)
	}
}

func TestALockThatTheDiskDoesNotGiveIsNotCalledAWait(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	if err := os.RemoveAll(w.locks); err != nil {
		t.Fatal(err)
	}
	_, err := p.Prepare(t.Context(), newClaim("a", allocated("r", gpu0)))
	if CauseOf(err) != CauseRecord || strings.Contains(err.Error(), "under way") || strings.Contains(err.Error(), "another instance") {
		t.Errorf("%s: %v", CauseOf(err), err)
	}
}

func TestStepsOfAnotherVersionAreNotForgotten(t *testing.T) {
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
	if _, err := p.Prepare(t.Context(), newClaim("a", allocated("r", gpu0))); err == nil || !strings.Contains(err.Error(), "of-a-later-version") {
		t.Errorf("prepared over a step that nobody will revert: %v", err)
	}
	if r, _, err := p.Records.Load("uid-a"); err != nil || len(r.Steps) != 2 {
		t.Errorf("the record has lost it: %+v, %v", r.Steps, err)
	}
}

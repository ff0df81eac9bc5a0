package steps

import (
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestPriorInstanceIsNotTakenForOurs(t *testing.T) {
	in := device.Instance{ID: 3, ProfileID: 19, Placement: device.Placement{Start: 2, Size: 1}}
	s := &MIGInstance{ProfileID: 19, Placement: in.Placement, Asked: true}
	if !s.Owns(in) {
		t.Error("the requested instance is not recognized")
	}
	s.Before = []priorInstance{{4, in.Placement}, {3, device.Placement{Start: 0, Size: 1}}}
	if !s.Owns(in) {
		t.Error("a reused ID proves ownership")
	}
	s.Before = append(s.Before, priorInstance{3, in.Placement})
	if s.Owns(in) {
		t.Error("a prior instance is taken for ours")
	}
}

// Reconcile may examine an MPS daemon before it recreates the partition that the daemon serves.
// Recreating resets the pass, and after that the daemon must be examined again.
func TestPassRunsWorkAgainAfterReset(t *testing.T) {
	pass := NewPass()
	n := 0
	ask := func() error { n++; return nil }
	for range 2 {
		if err := pass.once("key", ask); err != nil {
			t.Error(err)
		}
	}
	pass.Reset()
	if err := pass.once("key", ask); err != nil || n != 2 {
		t.Errorf("%v, asked %d times", err, n)
	}
}

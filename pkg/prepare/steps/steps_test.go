package steps

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestStepsSurviveTheRecord(t *testing.T) {
	partition := &MIGInstance{Device: "gpu-0000-1b-00-0-mig-19-2", ProfileID: 19, Placement: device.Placement{Start: 2, Size: 1}, Asked: true}
	spec := &ClaimSpec{Clients: []MPSClient{{Daemon: "d", Threads: 30}}}
	shared, err := NewShared("gpu-0000-1b-00-0", []string{"gpu-0000-1b-00-0"}, &MPSDaemon{})
	if err != nil {
		t.Fatal(err)
	}
	before := []Step{partition, spec, shared}
	stored, err := Encode(before)
	if err != nil {
		t.Fatal(err)
	}
	after, err := Decode(stored)
	if diff := cmp.Diff(before, after, cmpopts.IgnoreUnexported(MIGInstance{}, Shared{})); diff != "" || err != nil {
		t.Error(diff, err)
	}
}

func TestStepOfAnotherVersionIsNotDecoded(t *testing.T) {
	for name, stored := range map[string]checkpoint.Step{
		"an unknown kind":      {Kind: "of-tomorrow", Params: []byte(`{}`)},
		"unknown parameters":   {Kind: ClaimSpecKind, Params: []byte(`[]`)},
		"a shared step, alone": {Kind: MPSDaemonKind, Params: []byte(`{}`)},
	} {
		if list, err := Decode([]checkpoint.Step{stored}); err == nil || !strings.Contains(err.Error(), stored.Kind) {
			t.Errorf("%s: decoded as %v, %v", name, list, err)
		}
	}
}

func TestSplitKeyIsTheInverseOfSharedKey(t *testing.T) {
	for _, kind := range []string{TimeSliceKind, ComputeModeKind, MPSDaemonKind, MIGInstanceKind} {
		if of, got := SplitKey(SharedKey("gpu-0000-1b-00-0", kind)); of != "gpu-0000-1b-00-0" || got != kind {
			t.Errorf("%s: %q, %q", kind, of, got)
		}
	}
}

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
	pass := new(Pass)
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

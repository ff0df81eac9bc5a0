// These helpers check what claims and the plugin have left on the node.

package prepare_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// checkClean fails the test if a record, a CDI spec or another file of a claim is left on the node.
func checkClean(t *testing.T, w *world) {
	t.Helper()
	if r := w.records(); len(r) != 0 {
		t.Errorf("records left: %q", r)
	}
	if s, _ := w.specs.Claims(); len(s) != 0 {
		t.Errorf("specs left: %q", s)
	}
}

// checkRecordsMatchHardware fails the test unless the claims' records, the CDI specs and the MIG
// instances agree. The instances in "theirs", which an admin created, must be unchanged.
func checkRecordsMatchHardware(t *testing.T, w *world, h *hardware, p *plugin, theirs []device.Instance) {
	t.Helper()
	explained := map[string]int{}
	for _, name := range w.records() {
		uid, _, _ := strings.Cut(name, "_")
		if strings.HasPrefix(name, ".") || !strings.HasSuffix(name, ".json") {
			t.Errorf("%s is left over", name)
			continue
		}
		r, _, err := p.Records.Load(types.UID(uid))
		if err != nil || r.State != checkpoint.Prepared {
			t.Errorf("claim %s is %s: %v", uid, r.State, err)
			continue
		}
		if r.BootID != w.bootID {
			continue
		}
		spec := w.specs.of(r.ClaimUID)
		if spec == "" {
			t.Errorf("claim %s has no spec", uid)
		}
		list, err := steps.Decode(r.Steps)
		if err != nil {
			t.Error(err)
		}
		for _, step := range list {
			s, ok := step.(*steps.MIGInstance)
			if !ok {
				continue
			}
			there, ok := h.of(t, s.GPU).Instances[s.Instance.ID]
			if !ok || len(there.Compute) != 1 || there.Compute[0] != s.Instance.Compute[0] || there.Placement != s.Placement {
				t.Errorf("claim %s has %+v, but the GPU has %+v", uid, s.Instance, there)
			}
			if !strings.Contains(spec, fmt.Sprintf("nvidia-cap%d\"", s.Instance.Compute[0].Minor)) {
				t.Errorf("the spec does not name the instance's node: %s", spec)
			}
			explained[s.GPU]++
		}
	}
	for _, file := range w.holders() {
		if held, _, err := p.Records.Holder(strings.TrimSuffix(file, ".json")); err == nil && held.BootID == w.bootID &&
			held.Step.Kind == steps.MIGInstanceKind {
			explained[held.GPUs[0]]++
		}
	}
	if specs, _ := w.specs.Claims(); len(specs) > len(w.records()) {
		t.Errorf("specs %q, records %q", specs, w.records())
	}
	var stayed []device.Instance
	for _, gpu := range []string{gpu0, gpu1} {
		there := h.of(t, gpu).State().MIG.Instances
		ours, err := p.OwnedInstances(gpu, there)
		if err != nil || len(ours) != explained[gpu] {
			t.Errorf("%s: %d instances are explained, by %d claims' partitions: %v", gpu, len(ours), explained[gpu], err)
		}
		for _, in := range there {
			if !slices.ContainsFunc(ours, func(o device.Instance) bool { return o.ID == in.ID }) {
				stayed = append(stayed, in)
			}
		}
	}
	same := func(a, b device.Instance) bool { return steps.SameInstance(a, b) && len(a.Compute) == len(b.Compute) }
	if !slices.EqualFunc(stayed, theirs, same) {
		t.Errorf("foreign instances were %s and are %s", steps.DescribeInstances(theirs...), steps.DescribeInstances(stayed...))
	}
}

// checkSharedState fails the test unless the claims' records and the files of shared settings agree
// with the GPU settings and MPS daemons. Settings that no claim shares must have their original
// values, for example the value "found" as gpu0's time slice.
func checkSharedState(t *testing.T, w *world, h *hardware, p *plugin, found device.TimeSlice) {
	t.Helper()
	slice, mode := map[string]device.TimeSlice{gpu0: found}, map[string]device.ComputeMode{gpu0: device.ComputeDefault,
		gpu1: device.ComputeDefault}
	running := 0
	for _, file := range w.holders() {
		key, ok := strings.CutSuffix(file, ".json")
		if unfinished, is := strings.CutPrefix(file, ".tmp-"); is && slices.Contains(w.holders(), unfinished) {
			continue // the next write of the holder file replaces the unfinished one
		}
		held, _, err := p.Records.Holder(key)
		if !ok || strings.HasPrefix(key, ".") || err != nil {
			t.Errorf("%s is left: %v", file, err)
			continue
		}
		if held.BootID != w.bootID {
			continue
		}
		claims, err := p.Records.Readable()
		if err != nil {
			t.Fatal(err)
		}
		sharing := 0
		for _, r := range claims {
			if slices.ContainsFunc(r.Steps, func(s checkpoint.Step) bool { return strings.Contains(string(s.Params), strconv.Quote(key)) }) {
				sharing++
				if r.State != checkpoint.Prepared || r.BootID != w.bootID {
					t.Errorf("%s is shared by claim %s, whose record is %+v", key, r.Claim(), r)
				}
			}
		}
		if held.State != checkpoint.Applied || sharing == 0 {
			t.Errorf("%s is %s, shared by %d claims", key, held.State, sharing)
		}
		step, err := steps.StepOf(held)
		if err != nil {
			t.Error(err)
		}
		switch s := step.(type) {
		case *steps.Setting[device.TimeSlice]:
			slice[s.GPU] = s.Want
		case *steps.Setting[device.ComputeMode]:
			mode[s.GPU] = device.ComputeExclusiveProcess
		case *steps.MPSDaemon:
			running++
			if d, ok := w.daemons.running[s.ID]; !ok || !slices.Equal(d.Devices, s.UUIDs) {
				t.Errorf("%s has %q, and there is %+v", key, s.UUIDs, d)
			}
			for _, uuid := range s.UUIDs {
				if !h.serves(uuid) {
					t.Errorf("%s has %s, which is not there for it", key, uuid)
				}
			}
		case *steps.MIGInstance:
			there := h.of(t, s.GPU).State().MIG.Instances
			if _, ok := s.FindIntact(there); !ok {
				t.Errorf("%s has %s, and there is %s", key, steps.DescribeInstances(*s.Instance), steps.DescribeInstances(there...))
			}
		}
	}
	if len(w.daemons.running) != running {
		t.Errorf("the daemons are %v, want %d", w.daemons.running, running)
	}
	for _, gpu := range []string{gpu0, gpu1} {
		if s := h.of(t, gpu); s.TimeSlice != slice[gpu] || s.ComputeMode != mode[gpu] {
			t.Errorf("%s: time slice %d, not %d, compute mode %s, not %s", gpu, s.TimeSlice, slice[gpu], s.ComputeMode, mode[gpu])
		}
	}
}

// mustLeave unprepares claims, one after another. It fails the test unless the shared state agrees
// with the claims that are left, and nothing is left in the end.
func mustLeave(t *testing.T, w *world, h *hardware, p *plugin, found device.TimeSlice, claims ...*resourceapi.ResourceClaim) {
	t.Helper()
	for _, c := range claims {
		mustUnprepare(t, p, c.UID)
		checkSharedState(t, w, h, p, found)
	}
	checkClean(t, w)
	if left := w.holders(); len(left) != 0 {
		t.Errorf("holders left: %q", left)
	}
}

package cut

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/migmodel"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/models"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// twin has one GPU twice: with the simulated NVML library, through this package, and in memory.
type twin struct {
	t         *testing.T
	site      nvidiatest.Site
	card      device.Card
	simulated *Partitions
	inMemory  migmodel.Partitions
	gpu       *migmodel.GPU
}

func newTwin(t *testing.T, key string) (*twin, *model.GPU) {
	t.Helper()
	m, err := models.Read(key)
	if err != nil {
		t.Fatal(err)
	}
	s := nvidiatest.NewSiteOf(t, oneCard(t, key, m.MIG.NeedsReset.Value), layout.Container, "")
	w := &twin{t: t, site: s, card: s.Card(0), simulated: partitionsOf(s), gpu: migmodel.New(m, s.Card(0), 0)}
	w.gpu.Enabled = m.MIG.NeedsReset.Value
	w.inMemory.Call = func(_ context.Context, _ migmodel.Op, _ string, c device.Card, effect func(*migmodel.GPU) error) error {
		g, err := migmodel.Find([]*migmodel.GPU{w.gpu}, c)
		if err != nil {
			return err
		}
		return effect(g)
	}
	return w, m
}

// operations are the methods that both have.
type operations interface {
	nvidiatest.Partitions
	SetComputeMode(ctx context.Context, card device.Card, mode device.ComputeMode) error
}

// both runs one operation on both and compares result, failure code and the state of the GPU.
func (w *twin) both(what string, do func(operations) (device.Instance, error)) device.Instance {
	w.t.Helper()
	want, wantErr := do(w.simulated)
	got, gotErr := do(w.inMemory)
	if gotErr == nil && wantErr == nil {
		if diff := gocmp.Diff(withoutUUIDs(want), withoutUUIDs(got)); diff != "" {
			w.t.Errorf("%s: the model differs from the simulator:\n%s", what, diff)
		}
	}
	if a, b := failureOf(wantErr), failureOf(gotErr); a != b {
		w.t.Errorf("%s: the simulator answers %q (%v), the model %q (%v)", what, a, wantErr, b, gotErr)
	}
	before, err := w.simulated.Look(w.t.Context(), w.card)
	if err != nil {
		w.t.Fatal(err)
	}
	now, _ := w.inMemory.Look(w.t.Context(), w.card)
	before.MIG.Instances, now.MIG.Instances = withoutUUIDs(before.MIG.Instances...), withoutUUIDs(now.MIG.Instances...)
	if diff := gocmp.Diff(before, now); diff != "" {
		w.t.Fatalf("after %s the model differs from the simulator:\n%s", what, diff)
	}
	return want
}

func failureOf(err error) device.FailureCode {
	var failed interface{ FailureCode() device.FailureCode }
	if errors.As(err, &failed) {
		return failed.FailureCode()
	}
	return ""
}

// withoutUUIDs returns the GPU instances without the UUIDs of their MIG devices, which each side
// derives in its own way.
func withoutUUIDs(all ...device.Instance) []device.Instance {
	all = slices.Clone(all)
	for i := range all {
		all[i].Compute = slices.Clone(all[i].Compute)
		for j := range all[i].Compute {
			all[i].Compute[j].UUID = ""
		}
	}
	return all
}

func (w *twin) mode(on bool) {
	w.t.Helper()
	w.both("a change of the MIG mode", func(p operations) (none device.Instance, err error) {
		_, err = p.SetMode(w.t.Context(), w.card, on)
		return none, err
	})
}

func (w *twin) computeMode(mode device.ComputeMode) {
	w.t.Helper()
	w.both("compute mode "+string(mode), func(p operations) (none device.Instance, err error) {
		return none, p.SetComputeMode(w.t.Context(), w.card, mode)
	})
}

func (w *twin) create(profile, start, size uint32) device.Instance {
	w.t.Helper()
	return w.both("a new GPU instance", func(p operations) (device.Instance, error) {
		return p.CreateInstance(w.t.Context(), w.card, profile, device.Placement{Start: start, Size: size})
	})
}

func (w *twin) fill(in device.Instance) device.Instance {
	w.t.Helper()
	return w.both("a new compute instance", func(p operations) (device.Instance, error) {
		return p.CreateCompute(w.t.Context(), w.card, in.ID)
	})
}

// destroy destroys a GPU instance on both. It leaves out the UUIDs, and gives up soon.
func (w *twin) destroy(in device.Instance) {
	w.t.Helper()
	in.Compute = nil
	w.both("destroying a GPU instance", func(p operations) (none device.Instance, err error) {
		ctx, cancel := context.WithTimeout(w.t.Context(), time.Second)
		defer cancel()
		return none, p.Destroy(ctx, w.card, in)
	})
}

func (w *twin) busy(processes ...state.Process) {
	w.t.Helper()
	w.site.Change(func(_ *layout.Config, f *state.File) error {
		return errors.Join(f.ClearBusy(0), f.SetBusy(0, processes...))
	})
}

// Every profile at every placement, and everything that the driver refuses.
func TestModelInMemoryAgreesWithSimulator(t *testing.T) {
	for _, key := range []string{"h100-sxm5-80gb", "a100-sxm4-40gb", "a30-24gb", "b200-180gb"} {
		t.Run(key, func(t *testing.T) {
			w, m := newTwin(t, key)
			first := m.MIG.Profiles[0]
			size := first.Placements.Size
			w.create(first.ID, 0, size) // works only if MIG mode is on
			if w.gpu.Enabled {
				w.destroy(w.gpu.State().MIG.Instances[0])
			} else {
				w.computeMode(device.ComputeExclusiveProcess)
				w.busy(state.Process{PID: 4711})
				w.gpu.Open = []nvidia.Process{{PID: 4711}}
				w.mode(true)
				w.busy()
				w.gpu.Open = nil
			}
			w.mode(true)
			w.computeMode(device.ComputeExclusiveProcess)
			w.create(77, 0, size)
			w.create(first.ID, 0, size+1)
			w.create(first.ID, 31, size)
			for _, p := range m.MIG.Profiles {
				for _, start := range p.Placements.Starts {
					made := w.fill(w.create(p.ID, start, p.Placements.Size))
					other := made
					other.ProfileID++
					w.destroy(other)
					w.destroy(made)
				}
			}
			made := w.fill(w.create(first.ID, 0, size))
			w.fill(made)
			w.fill(device.Instance{ID: 14})
			w.create(first.ID, 0, size)
			w.mode(false)
			w.busy(state.Process{PID: 4711, InInstance: true, Instance: made.ID})
			w.gpu.Busy[made.ID] = 1
			w.destroy(made)
			w.busy()
			for _, p := range m.MIG.Profiles { // until the GPU is full
				for _, start := range p.Placements.Starts {
					w.create(p.ID, start, p.Placements.Size)
				}
			}
			for _, in := range w.gpu.State().MIG.Instances {
				w.destroy(in)
			}
			w.destroy(made)
			w.mode(false)
			w.computeMode(device.ComputeExclusiveProcess)
			w.mode(true)
		})
	}
}

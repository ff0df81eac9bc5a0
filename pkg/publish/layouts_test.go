package publish

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// records explain the instances with these IDs; card is what a look at the card shows.
type records struct {
	ours  []uint32
	card  []device.Instance
	err   error
	looks int
	// alone are the devices of prepared claims.
	alone      map[string]string
	unreadable error
}

func (r *records) Explained(_ string, instances []device.Instance) ([]device.Instance, error) {
	var ours []device.Instance
	for _, i := range instances {
		if slices.Contains(r.ours, i.ID) {
			ours = append(ours, i)
		}
	}
	return ours, nil
}

func (r *records) Foreign(context.Context, device.Card, string) (instances, foreign []device.Instance, err error) {
	r.looks++
	ours, _ := r.Explained("", r.card)
	return r.card, without(r.card, ours), r.err
}

func (r *records) HeldAlone() (map[string]string, error) { return r.alone, r.unreadable }
func (r *records) HeldShares() (map[string]bool, error)  { return nil, nil }

// half is a card of two memory slices that can be cut in halves.
func half(instances ...device.Instance) inventory.Snapshot {
	return inventory.Snapshot{Ready: true, Known: true, Node: nvidia.Node{GPUs: []nvidia.GPU{{GPU: device.GPU{
		PCIAddress: "0000:1b:00.0", UUID: "GPU-1", ProductName: "NVIDIA H100", MemoryBytes: 80 << 30,
		MIG: &device.MIG{
			Profiles:  []device.Profile{{ID: 9, Name: "3g.40gb", Slices: 3, MaxInstances: 2, MemoryBytes: 40 << 30, Size: 1, Starts: []uint32{0, 1}}},
			Instances: instances, Enabled: len(instances) > 0,
		},
	}}}}}
}

// annotated has read a Node's annotation.
func annotated(r *records, rules string) *Layouts {
	configured, _ := device.ParsePolicies("dynamic")
	l := NewLayouts(r, &cluster{}, configured)
	policies, _ := device.ParsePolicies(rules)
	l.Annotate(policies)
	return l
}

func instance(id, start uint32) device.Instance {
	return device.Instance{
		ID: id, ProfileID: 9, Placement: device.Placement{Start: start, Size: 1},
		Compute: []device.ComputeInstance{{Name: "3g.40gb", UUID: "MIG-1"}},
	}
}

func offered(t *testing.T, l *Layouts, s inventory.Snapshot) (names []string, settled bool) {
	t.Helper()
	offerings, settled, err := l.Decide(t.Context(), s, true, sliced)
	if err != nil {
		t.Fatal(err)
	}
	l.keeper.cluster.(*cluster).slices = sliced(offerings)
	for _, shape := range device.Offer(offerings) {
		names = append(names, shape.Name())
	}
	return names, settled
}

const gpuName = "gpu-0000-1b-00-0"

var everyShape = []string{gpuName, gpuName + "-mig-9-0", gpuName + "-mig-9-1"}

func TestWhatRecordsExplainLimitsNothing(t *testing.T) {
	r := &records{ours: []uint32{1}}
	l := annotated(r, "")
	if got, settled := offered(t, l, half(instance(1, 0))); !slices.Equal(got, everyShape) || !settled || r.looks != 0 {
		t.Errorf("got %v, settled %v, after %d looks", got, settled, r.looks)
	}
	if len(l.Limited()) != 0 {
		t.Error(l.Limited())
	}
}

func TestAnAdminsLayoutIsConfirmedOnceAndOfferedAsItIs(t *testing.T) {
	r := &records{card: []device.Instance{instance(1, 1)}}
	l := annotated(r, "")
	for range 3 {
		if got, settled := offered(t, l, half(instance(1, 1))); !slices.Equal(got, []string{gpuName + "-mig-9-1"}) || !settled {
			t.Fatalf("got %v, settled %v", got, settled)
		}
	}
	if r.looks != 1 {
		t.Errorf("the card was asked %d times", r.looks)
	}
	if ours, foreign, _ := l.Count(); ours["3g.40gb"] != 0 || foreign["3g.40gb"] != 1 || l.Limited()[gpuName] == "" {
		t.Error(ours, foreign, l.Limited())
	}
	// Empty again, all shapes are there again.
	if got, _ := offered(t, l, half()); !slices.Equal(got, everyShape) {
		t.Error(got)
	}
}

func TestAnInstanceThatWasOursWhenItWasSeenIsNoAdmins(t *testing.T) {
	// Since the inventory looked, the claim has ended: its record and its instance are gone.
	r := &records{}
	l := annotated(r, "")
	if got, settled := offered(t, l, half(instance(1, 0))); !slices.Equal(got, everyShape) || !settled || r.looks != 1 {
		t.Errorf("got %v, settled %v, after %d looks", got, settled, r.looks)
	}
}

func TestAGPUThatCannotBeAskedIsOfferedAsItIsAndAskedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &records{err: errors.New("it hangs")}
		l := annotated(r, "")
		if got, settled := offered(t, l, half(instance(1, 0))); !slices.Equal(got, []string{gpuName + "-mig-9-0"}) || settled {
			t.Errorf("got %v, settled %v", got, settled)
		}
		r.err, r.card = nil, nil
		offered(t, l, half(instance(1, 0)))
		<-time.After(lookInterval) // the partition consumes counters from now on
		if got, settled := offered(t, l, half(instance(1, 0))); !slices.Equal(got, everyShape) || !settled {
			t.Errorf("got %v, settled %v", got, settled)
		}
	})
}

func TestAGPUThatIsBusyStaysAsItWasOffered(t *testing.T) {
	r := &records{}
	l := annotated(r, "")
	offered(t, l, half())
	r.err = errors.New("a claim is being prepared on it")
	if got, settled := offered(t, l, half(instance(1, 0))); !slices.Equal(got, everyShape) || settled {
		t.Errorf("got %v, settled %v", got, settled)
	}
}

func TestNothingIsCutBeforeTheNodesAnnotationIsKnown(t *testing.T) {
	adopt, err := device.ParsePolicies("adopt")
	if err != nil {
		t.Fatal(err)
	}
	l := NewLayouts(&records{card: []device.Instance{instance(1, 0)}}, &cluster{}, adopt)
	if got, _ := offered(t, l, half(instance(1, 0))); !slices.Equal(got, []string{gpuName + "-mig-9-0"}) || len(l.HandedOver()) != 0 {
		t.Error(got, l.HandedOver())
	}
	if got, _ := offered(t, l, half()); !slices.Equal(got, everyShape[:1]) {
		t.Error(got)
	}
	l.Annotate(device.Policies{})
	if got, _ := offered(t, l, half()); !slices.Equal(got, everyShape) {
		t.Error(got)
	}
}

func TestPoliciesOfTheNodeGoBeforeTheConfiguration(t *testing.T) {
	configured, err := device.ParsePolicies("off")
	if err != nil {
		t.Fatal(err)
	}
	r := &records{card: []device.Instance{instance(1, 0)}}
	l := NewLayouts(r, &cluster{}, configured)
	l.Annotate(device.Policies{})
	if got, _ := offered(t, l, half()); !slices.Equal(got, everyShape[:1]) {
		t.Error(got)
	}
	adopt, err := device.ParsePolicies("GPU-1=adopt")
	if err != nil {
		t.Fatal(err)
	}
	l.Annotate(adopt)
	if got, _ := offered(t, l, half()); !slices.Equal(got, everyShape) {
		t.Error(got)
	}
	offered(t, l, half(instance(1, 0)))
	if over := l.HandedOver(); len(over) != 1 || over[0].WholeName() != gpuName {
		t.Error(over)
	}
}

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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/inventorytest"
)

// fakeRecords acts as the checkpoint records of claims and as the GPU. ours has the IDs of the MIG
// instances created for claims. onCard has the MIG instances that a query of the GPU returns.
type fakeRecords struct {
	ours         []uint32
	onCard       []device.Instance
	err          error
	foreignCalls int
	// exclusive maps the devices of prepared claims to the claims' UIDs.
	exclusive map[string]string
	readErr   error
}

func (r *fakeRecords) OwnedInstances(_ string, instances []device.Instance) ([]device.Instance, error) {
	var ours []device.Instance
	for _, i := range instances {
		if slices.Contains(r.ours, i.ID) {
			ours = append(ours, i)
		}
	}
	return ours, nil
}

func (r *fakeRecords) ForeignInstances(context.Context, device.Card, string) (instances, foreign []device.Instance, err error) {
	r.foreignCalls++
	ours, _ := r.OwnedInstances("", r.onCard)
	return r.onCard, subtract(r.onCard, ours), r.err
}

func (r *fakeRecords) AllocatedDevices() (device.Allocations, error) {
	return device.Allocations{Exclusive: r.exclusive}, r.readErr
}

// halvesWith returns a snapshot of one GPU that has two halves as its only placements, and has
// these MIG instances.
func halvesWith(instances ...device.Instance) inventory.Snapshot {
	return inventory.Snapshot{Ready: true, Known: true, Node: nvidia.Node{GPUs: []nvidia.GPU{{GPU: device.GPU{
		PCIAddress: "0000:1b:00.0", UUID: "GPU-1", ProductName: "NVIDIA H100", MemoryBytes: 80 << 30,
		MIG: &device.MIG{
			Profiles: []device.Profile{{
				ID: 9, Name: "3g.40gb", Slices: 3, MaxInstances: 2, MemoryBytes: 40 << 30, Size: 1, Starts: []uint32{0, 1},
			}},
			Instances: instances, Enabled: len(instances) > 0,
		},
	}}}}}
}

// newAnnotatedLayouts returns Layouts with the policy dynamic and a Node annotation with the given
// policies.
func newAnnotatedLayouts(r *fakeRecords, rules string) *Layouts {
	configured, _ := settings.ParseMIG("dynamic")
	annotated, _ := settings.ParseMIG(rules)
	return NewLayouts(r, &fakeCluster{}, func() (device.Policies, bool) { return configured.And(annotated), true })
}

// policyNode returns a node whose policies the test sets.
func policyNode() *nodeview.Node {
	return nodeview.New(inventorytest.New(inventory.Snapshot{}), &fakeHealth{changed: make(chan struct{})}, noReferenceDriver{}, noClaims)
}

func instance(id, start uint32) device.Instance {
	return device.Instance{
		ID: id, ProfileID: 9, Placement: device.Placement{Start: start, Size: 1},
		Compute: []device.ComputeInstance{{Name: "3g.40gb", UUID: "MIG-1"}},
	}
}

func publishOnce(t *testing.T, l *Layouts, s inventory.Snapshot) (names []string, settled bool) {
	t.Helper()
	offerings, settled, err := l.Decide(t.Context(), s, true, buildSlices)
	if err != nil {
		t.Fatal(err)
	}
	l.retainer.cluster.(*fakeCluster).slices = buildSlices(offerings)
	for _, shape := range device.Offer(offerings) {
		names = append(names, shape.Name())
	}
	return names, settled
}

const gpuName = "gpu-0000-1b-00-0"

var allShapes = []string{gpuName, gpuName + "-mig-9-0", gpuName + "-mig-9-1"}

func TestOwnInstancesDoNotLimitTheOffer(t *testing.T) {
	r := &fakeRecords{ours: []uint32{1}}
	l := newAnnotatedLayouts(r, "")
	if got, settled := publishOnce(t, l, halvesWith(instance(1, 0))); !slices.Equal(got, allShapes) || !settled || r.foreignCalls != 0 {
		t.Errorf("got %v, settled %v, after %d queries of the GPU", got, settled, r.foreignCalls)
	}
	if len(l.Limited()) != 0 {
		t.Error(l.Limited())
	}
}

func TestForeignLayoutIsConfirmedOnceAndOffered(t *testing.T) {
	r := &fakeRecords{onCard: []device.Instance{instance(1, 1)}}
	l := newAnnotatedLayouts(r, "")
	for range 3 {
		if got, settled := publishOnce(t, l, halvesWith(instance(1, 1))); !slices.Equal(got, []string{gpuName + "-mig-9-1"}) || !settled {
			t.Fatalf("got %v, settled %v", got, settled)
		}
	}
	if r.foreignCalls != 1 {
		t.Errorf("the card was read %d times", r.foreignCalls)
	}
	if ours, foreign, _ := l.Count(); ours["3g.40gb"] != 0 || foreign["3g.40gb"] != 1 || l.Limited()[gpuName] == "" {
		t.Error(ours, foreign, l.Limited())
	}
	// After the admin removed the MIG instance, the GPU must be offered whole and in all partitions
	// again.
	if got, _ := publishOnce(t, l, halvesWith()); !slices.Equal(got, allShapes) {
		t.Error(got)
	}
}

func TestInstanceRemovedSinceScanIsNotForeign(t *testing.T) {
	// The claim ended after the scan. So its checkpoint record and its MIG instance are gone, but the
	// snapshot still has the instance.
	r := &fakeRecords{}
	l := newAnnotatedLayouts(r, "")
	if got, settled := publishOnce(t, l, halvesWith(instance(1, 0))); !slices.Equal(got, allShapes) || !settled || r.foreignCalls != 1 {
		t.Errorf("got %v, settled %v, after %d queries of the GPU", got, settled, r.foreignCalls)
	}
}

func TestHungGPUIsOfferedAsScannedAndRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRecords{err: errors.New("the GPU hangs")}
		l := newAnnotatedLayouts(r, "")
		if got, settled := publishOnce(t, l, halvesWith(instance(1, 0))); !slices.Equal(got, []string{gpuName + "-mig-9-0"}) || settled {
			t.Errorf("got %v, settled %v", got, settled)
		}
		r.err, r.onCard = nil, nil
		publishOnce(t, l, halvesWith(instance(1, 0)))
		<-time.After(allocationPoll) // the partition consumes counters from now on
		if got, settled := publishOnce(t, l, halvesWith(instance(1, 0))); !slices.Equal(got, allShapes) || !settled {
			t.Errorf("got %v, settled %v", got, settled)
		}
	})
}

func TestBusyGPUKeepsItsLastLayout(t *testing.T) {
	r := &fakeRecords{}
	l := newAnnotatedLayouts(r, "")
	publishOnce(t, l, halvesWith())
	r.err = errors.New("a claim is being prepared on it")
	if got, settled := publishOnce(t, l, halvesWith(instance(1, 0))); !slices.Equal(got, allShapes) || settled {
		t.Errorf("got %v, settled %v", got, settled)
	}
}

func TestNoPartitionsBeforePoliciesAreKnown(t *testing.T) {
	adopt, err := settings.ParseMIG("adopt")
	if err != nil {
		t.Fatal(err)
	}
	configure := func(n *nodeview.Node) { n.SetConfigured(adopt) }
	annotate := func(n *nodeview.Node) { n.SetNodePolicies(device.Policies{}) }
	for name, order := range map[string][]func(*nodeview.Node){
		"the annotation comes last":    {configure, annotate},
		"the configuration comes last": {annotate, configure},
	} {
		t.Run(name, func(t *testing.T) {
			n := policyNode()
			l := NewLayouts(&fakeRecords{onCard: []device.Instance{instance(1, 0)}}, &fakeCluster{}, n.Policies)
			order[0](n)
			got, _ := publishOnce(t, l, halvesWith(instance(1, 0)))
			if !slices.Equal(got, []string{gpuName + "-mig-9-0"}) || len(l.HandedOver()) != 0 || len(l.MIGModeUnneeded()) != 0 {
				t.Error(got, l.HandedOver(), l.MIGModeUnneeded())
			}
			if got, _ := publishOnce(t, l, halvesWith()); !slices.Equal(got, allShapes[:1]) {
				t.Error(got)
			}
			order[1](n)
			if got, _ := publishOnce(t, l, halvesWith()); !slices.Equal(got, allShapes) {
				t.Error(got)
			}
		})
	}
}

func TestNodePoliciesOverrideConfiguration(t *testing.T) {
	configured, err := settings.ParseMIG("off")
	if err != nil {
		t.Fatal(err)
	}
	r := &fakeRecords{onCard: []device.Instance{instance(1, 0)}}
	n := policyNode()
	l := NewLayouts(r, &fakeCluster{}, n.Policies)
	n.SetConfigured(configured)
	n.SetNodePolicies(device.Policies{})
	if got, _ := publishOnce(t, l, halvesWith()); !slices.Equal(got, allShapes[:1]) {
		t.Error(got)
	}
	adopt, err := settings.ParseMIG("rules: [{gpus: GPU-1, policy: adopt}]")
	if err != nil {
		t.Fatal(err)
	}
	n.SetNodePolicies(adopt)
	if got, _ := publishOnce(t, l, halvesWith()); !slices.Equal(got, allShapes) {
		t.Error(got)
	}
	publishOnce(t, l, halvesWith(instance(1, 0)))
	if over := l.HandedOver(); len(over) != 1 || over[0].WholeName() != gpuName {
		t.Error(over)
	}
}

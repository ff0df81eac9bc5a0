package publish

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

func sliced(offerings []device.Offering) []resourceslice.Slice {
	return device.Slices(device.Offer(offerings), device.Driver{Version: "580.65.06", CUDAVersion: "13.0"})
}

// cluster has slices, and claims by the device that each was allocated.
type cluster struct {
	slices []resourceslice.Slice
	claims map[string]string
	shares map[string]bool
	away   error
	lists  int
}

func (c *cluster) Slices(context.Context) (all []resourceapi.ResourceSlice, _ error) {
	for _, s := range c.slices {
		all = append(all, resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Devices: s.Devices, SharedCounters: s.SharedCounters}})
	}
	return all, nil
}

func (c *cluster) Allocated(context.Context) (Holders, error) {
	c.lists++
	return Holders{Alone: maps.Clone(c.claims), Shares: maps.Clone(c.shares)}, c.away
}

// devices are those that are published.
func (c *cluster) devices() map[string]resourceapi.Device {
	all := map[string]resourceapi.Device{}
	for _, s := range c.slices {
		for _, d := range s.Devices {
			all[d.Name] = d
		}
	}
	return all
}

// two are H100s that can be cut into sevenths and halves, of which the first has these instances.
func two(instances ...device.Instance) inventory.Snapshot {
	s := inventory.Snapshot{Ready: true, Known: true}
	for i, address := range []device.PCIAddress{"0000:1b:00.0", "0000:43:00.0"} {
		g := device.GPU{
			PCIAddress: address, UUID: fmt.Sprint("GPU-", i), ProductName: "NVIDIA H100", MemoryBytes: 80 << 30,
			MIG: &device.MIG{Profiles: []device.Profile{
				{ID: 19, Name: "1g.10gb", Slices: 1, MaxInstances: 7, MemoryBytes: 10 << 30, Size: 1, Starts: []uint32{0, 1, 2, 3, 4, 5, 6}},
				{ID: 9, Name: "3g.40gb", Slices: 3, MaxInstances: 2, MemoryBytes: 40 << 30, Size: 4, Starts: []uint32{0, 4}},
			}},
		}
		if i == 0 && len(instances) > 0 {
			g.MIG.Instances, g.MIG.Enabled = instances, true
		}
		s.Node.GPUs = append(s.Node.GPUs, nvidia.GPU{GPU: g})
	}
	return s
}

const (
	otherName = "gpu-0000-43-00-0"
	small     = gpuName + "-mig-19-2"
	large     = gpuName + "-mig-9-4"
)

// node publishes into a cluster.
type node struct {
	*cluster
	*records
	layouts *Layouts
	gpus    inventory.Snapshot
}

func newNode(t *testing.T, policy string) *node {
	t.Helper()
	n := &node{cluster: &cluster{claims: map[string]string{}, shares: map[string]bool{}}, records: &records{alone: map[string]string{}}, gpus: two()}
	n.starts(t, policy)
	n.publishes(t)
	if n.lists != 1 {
		t.Errorf("%d lists on a node without slices, of which claims may hold devices", n.lists)
	}
	n.lists = 0
	return n
}

// starts starts another instance of the plugin.
func (n *node) starts(t *testing.T, policy string) {
	t.Helper()
	n.layouts = NewLayouts(n.records, n.cluster, device.Policies{})
	n.policy(t, policy)
}

func (n *node) policy(t *testing.T, policy string) {
	t.Helper()
	p, err := device.ParsePolicies(policy)
	if err != nil {
		t.Fatal(err)
	}
	n.layouts.Annotate(p)
}

// publishes decides once and writes that. No device that a claim was allocated is taken away or
// altered.
func (n *node) publishes(t *testing.T) (settled bool) {
	t.Helper()
	offerings, settled, err := n.layouts.Decide(t.Context(), n.gpus, true, sliced)
	if err != nil {
		t.Fatal(err)
	}
	n.writes(t, offerings)
	return settled
}

func (n *node) writes(t *testing.T, offerings []device.Offering) {
	t.Helper()
	before := n.devices()
	n.slices = sliced(offerings)
	keptAllocated(t, n.claims, before, n.devices())
}

// keptAllocated is the invariant: a device that a claim was allocated stays published, and consumes
// what it did.
func keptAllocated(t *testing.T, claims map[string]string, before, now map[string]resourceapi.Device) {
	t.Helper()
	for name := range claims {
		was, published := before[name]
		is, still := now[name]
		if published && (!still || !apiequality.Semantic.DeepEqual(was.ConsumesCounters, is.ConsumesCounters)) {
			t.Errorf("%s is allocated and consumed %v: published %v, it consumes %v", name, was.ConsumesCounters, still, is.ConsumesCounters)
		}
	}
}

// rounds publishes until that is settled, or for a minute.
func (n *node) rounds(t *testing.T) (settled bool) {
	t.Helper()
	for range 30 {
		if n.publishes(t) {
			return true
		}
		<-time.After(lookInterval)
	}
	return false
}

// ofCounters are the devices with what they consume.
func (c *cluster) ofCounters() map[string][]resourceapi.DeviceCounterConsumption {
	all := map[string][]resourceapi.DeviceCounterConsumption{}
	for name, d := range c.devices() {
		all[name] = d.ConsumesCounters
	}
	return all
}

func seventh(id uint32) device.Instance {
	return device.Instance{
		ID: id, ProfileID: 19, Placement: device.Placement{Start: 2, Size: 1},
		Compute: []device.ComputeInstance{{Name: "1g.10gb", UUID: "MIG-7"}},
	}
}

func TestAllocatedDevicesStayAsTheyArePublished(t *testing.T) {
	for _, change := range []struct{ device, from, to string }{
		{small, "dynamic", "static"},
		{small, "dynamic", "off"},
		{small, "dynamic", "adopt"},
		{small, "dynamic", "dynamic,GPU-0=static"},
		{small, "dynamic", "dynamic,GPU-1=static"},
		{small, "dynamic(1g.10gb)", "dynamic(3g.40gb)"},
		{small, "dynamic(1g.10gb)", "dynamic"},
		{large, "adopt", "dynamic(1g.10gb)"},
		{gpuName, "dynamic", "static"},
		{gpuName, "dynamic", "off"},
		{gpuName, "static", "dynamic"},
		{gpuName, "static", "adopt(3g.40gb)"},
		{gpuName, "off", "static,GPU-1=dynamic"},
		{gpuName, "static,GPU-1=dynamic", "static"},
	} {
		for _, prepared := range []bool{false, true} {
			for what, meanwhile := range map[string]func(*testing.T, *node){
				"in the running plugin":              func(t *testing.T, n *node) { n.policy(t, change.to) },
				"as another plugin starts":           func(t *testing.T, n *node) { n.starts(t, change.to) },
				"while the kubelet removes slices":   func(t *testing.T, n *node) { n.policy(t, change.to); n.slices = nil },
				"as an instance leads a second time": func(t *testing.T, n *node) { n.layouts.Begin(); n.policy(t, change.to) },
			} {
				t.Run(fmt.Sprintf("%s, %s to %s, prepared %v, %s", change.device, change.from, change.to, prepared, what), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						fresh := newNode(t, change.to)
						n := newNode(t, change.from)
						n.claims[change.device] = "team/held"
						if prepared {
							n.alone[change.device] = "uid"
							if change.device == small {
								n.ours, n.gpus = []uint32{1}, two(seventh(1))
							}
						}
						published := n.devices()
						meanwhile(t, n)
						settled := n.rounds(t)
						keptAllocated(t, n.claims, published, n.devices())
						free := newNode(t, change.to)
						free.ours, free.gpus = n.ours, n.gpus
						free.rounds(t)
						same := apiequality.Semantic.DeepEqual(n.ofCounters()[change.device], free.ofCounters()[change.device])
						if _, wanted := free.devices()[change.device]; settled != (same && wanted) {
							t.Errorf("settled %v, although the policy wants it published %v, and so %v", settled, wanted, same)
						}

						clear(n.claims)
						clear(n.alone)
						n.ours, n.gpus = nil, two()
						if !n.rounds(t) {
							t.Error("it is never settled when the claim has ended")
						}
						if now, want := n.ofCounters(), fresh.ofCounters(); !apiequality.Semantic.DeepEqual(now, want) {
							t.Errorf("when the claim has ended, published are %v, want %v", slices.Sorted(maps.Keys(now)), slices.Sorted(maps.Keys(want)))
						}
					})
				})
			}
		}
	}
}

func TestAHeldPartitionKeepsNeitherOtherPlacesNorOtherGPUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "dynamic")
		n.claims[small] = "team/held"
		n.policy(t, "static")
		n.rounds(t)
		if now := slices.Sorted(maps.Keys(n.devices())); !slices.Equal(now, []string{gpuName, small, otherName}) {
			t.Error(now)
		}
	})
}

func TestClaimsAreListedOnlyWhereAChangeTakesAwayOrAlters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "dynamic(1g.10gb)")
		n.claims[small], n.alone[small] = "team/held", "uid"
		n.rounds(t)
		n.policy(t, "dynamic") // offers more
		n.rounds(t)
		if n.lists != 0 {
			t.Errorf("%d lists, although nothing was taken away", n.lists)
		}
		n.policy(t, "static")
		n.rounds(t)
		// Before the slices are written, and once they are. From then on the record tells that the
		// claim holds it.
		if n.lists != 2 {
			t.Errorf("%d lists", n.lists)
		}
	})
}

func TestAClaimThatIsNotPreparedIsLookedForLessAndLessOften(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "dynamic")
		n.claims[small] = "team/pending"
		n.policy(t, "static")
		for range 10 {
			n.rounds(t)
		}
		if n.lists < 10 || n.lists > 30 {
			t.Errorf("%d lists in ten minutes", n.lists)
		}
	})
}

func TestAClaimThatIsAllocatedWhileItsDeviceIsTakenAwayGetsItBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "dynamic")
		before := n.devices()
		n.policy(t, "static")
		n.publishes(t)
		n.claims[small] = "team/quick"
		<-time.After(lookInterval)
		n.publishes(t)
		keptAllocated(t, n.claims, before, n.devices())
	})
}

func TestAChangeIsLookedAfterUntilTheAPIServerShowsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "dynamic")
		before := n.slices
		n.policy(t, "static")
		for range 10 { // nothing can be written
			if n.publishes(t) {
				t.Fatal("settled, although nothing was written")
			}
			n.slices = before
			<-time.After(lookInterval)
		}
		n.claims[small] = "team/slow"
		for range 3 {
			offerings, _, err := n.layouts.Decide(t.Context(), n.gpus, true, sliced)
			if err != nil {
				t.Fatal(err)
			}
			n.slices = sliced(offerings)
			<-time.After(lookInterval)
		}
		if _, published := n.devices()[small]; !published {
			t.Error("a device was taken away that was allocated before anything was written")
		}
	})
}

func TestNothingChangesWhileNobodyKnowsWhatClaimsHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "dynamic")
		n.away = errors.New("resourceclaims is forbidden")
		n.policy(t, "static")
		for range 3 {
			if _, settled, err := n.layouts.Decide(t.Context(), n.gpus, true, sliced); err == nil || settled {
				t.Fatalf("settled %v, %v", settled, err)
			}
		}
		n.away, n.claims[small] = nil, "team/held"
		n.rounds(t)
		if len(n.devices()) != 3 {
			t.Error(slices.Sorted(maps.Keys(n.devices())))
		}
	})
}

// What is left of an instance is a place. A part of one has none.
func TestAHeldPartOfAnInstanceThatAnAdminRemovesIsNotWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		in := seventh(1)
		in.Compute[0].Name = "1c.1g.10gb"
		part := small + "-ci-0"
		n := newNode(t, "static")
		n.gpus, n.card = two(in), []device.Instance{in}
		n.rounds(t)
		if _, published := n.devices()[part]; !published {
			t.Fatal(slices.Sorted(maps.Keys(n.devices())))
		}
		n.claims[part], n.lists = "team/held", 0
		n.gpus, n.card = two(), nil
		for range 30 {
			offerings, _, err := n.layouts.Decide(t.Context(), n.gpus, true, sliced)
			if err != nil {
				t.Fatal(err)
			}
			n.slices = sliced(offerings)
			<-time.After(lookInterval)
		}
		if n.lists > 4 {
			t.Errorf("claims were listed %d times", n.lists)
		}
	})
}

func TestUnreadableRecordsAreNoReasonToTakeAway(t *testing.T) {
	n := newNode(t, "dynamic")
	n.alone[small] = "uid"
	n.publishes(t)
	n.alone, n.unreadable = nil, errors.New("input/output error")
	n.policy(t, "static")
	if n.publishes(t) {
		t.Error("settled")
	}
	if _, published := n.devices()[small]; !published {
		t.Error("it was taken away")
	}
}

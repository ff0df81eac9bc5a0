package publish

import (
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// The kubelet removes a node's slices when it starts, and when the plugin is away for long.
func TestHeldDevicesAreHeldWhereNothingIsPublished(t *testing.T) {
	for _, prepared := range []bool{false, true} {
		for _, policy := range []string{"static", "off", "dynamic(3g.40gb)", "dynamic"} {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t, "dynamic")
				n.claims[small] = "team/held"
				if prepared {
					n.alone[small] = "uid"
				}
				n.slices = nil
				n.starts(t, policy)
				for range 10 {
					n.publishes(t)
					there := n.devices()
					if d, published := there[small]; !published || len(d.ConsumesCounters) == 0 {
						t.Fatalf("%s, prepared %v: %s is held, published %v, and consumes %v", policy, prepared, small, published, d.ConsumesCounters)
					}
					if d, published := there[gpuName]; published && len(d.ConsumesCounters) == 0 {
						t.Fatalf("%s, prepared %v: the whole is offered beside %s, without counters", policy, prepared, small)
					}
					<-time.After(lookInterval)
				}
			})
		}
	}
}

func TestAHeldWholeGPUThatIsNotPublishedIsNotOfferedAsItIsCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "static")
		n.claims[gpuName], n.alone[gpuName] = "team/held", "uid"
		n.gpus, n.card, n.slices = two(seventh(1)), []device.Instance{seventh(1)}, nil
		n.starts(t, "static")
		n.rounds(t)
		if _, published := n.devices()[small]; published {
			t.Error("a partition is offered of a GPU that a claim has as a whole")
		}
		if _, published := n.devices()[gpuName]; !published {
			t.Error("the held GPU is not published")
		}
	})
}

// A cluster that keeps no counters any more is offered nothing that overlaps with what claims hold.
func TestHeldDevicesAreHeldWhereCountersAreLost(t *testing.T) {
	for _, prepared := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, "dynamic")
			n.claims[small] = "team/held"
			if prepared {
				n.alone[small] = "uid"
			}
			for range 5 {
				offerings, _, err := n.layouts.Decide(t.Context(), n.gpus, false, sliced)
				if err != nil {
					t.Fatal(err)
				}
				n.slices = sliced(offerings)
				there := n.devices()
				if _, published := there[small]; !published {
					t.Errorf("prepared %v: %s was taken away", prepared, small)
				}
				if _, published := there[gpuName]; published {
					t.Errorf("prepared %v: the whole is offered beside %s, without counters", prepared, small)
				}
				<-time.After(lookInterval)
			}
			if there := n.devices(); len(there) != 2 || len(there[otherName].ConsumesCounters) > 0 {
				t.Error(slices.Sorted(maps.Keys(there)))
			}
		})
	}
}

// A GPU of which nothing is offered is no reason to ask for claims again and again.
func TestClaimsAreListedOnceForAGPUOfWhichNothingIsPublished(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "static")
		for i := range n.gpus.Node.GPUs {
			n.gpus.Node.GPUs[i].MIG.Enabled = true
		}
		n.slices, n.lists = nil, 0
		n.starts(t, "static")
		for range 10 {
			n.publishes(t)
			<-time.After(lookSeldom)
		}
		if n.lists != 1 {
			t.Errorf("%d lists", n.lists)
		}
	})
}

// A device that is not published takes nothing of its counters, also while a claim is allocated it.
func TestNothingElseIsOfferedOfAGPUWhileDevicesAreTakenAway(t *testing.T) {
	for _, change := range []struct{ from, to, taken, other string }{
		{"dynamic", "static", small, gpuName},
		{"dynamic", "off", small, gpuName},
		{"dynamic(1g.10gb)", "dynamic(3g.40gb)", small, gpuName + "-mig-9-0"},
	} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, change.from)
			n.policy(t, change.to)
			n.publishes(t)
			// A scheduler that had not seen the change allocates one device, and as soon as it has
			// seen it the other.
			n.claims[change.taken] = "team/quick"
			if _, published := n.devices()[change.other]; published {
				n.claims[change.other] = "team/next"
			}
			<-time.After(lookInterval)
			n.rounds(t)
			if len(n.claims) > 1 {
				t.Errorf("%s to %s: two claims have %s and %s", change.from, change.to, change.taken, change.other)
			}
			if _, published := n.devices()[change.taken]; !published {
				t.Errorf("%s to %s: %s does not come back", change.from, change.to, change.taken)
			}
			clear(n.claims)
			if !n.rounds(t) {
				t.Error("it is never settled")
			}
			if _, published := n.devices()[change.other]; !published {
				t.Errorf("%s to %s: %s is never offered", change.from, change.to, change.other)
			}
		})
	}
}

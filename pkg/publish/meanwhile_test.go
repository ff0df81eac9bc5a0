package publish

import (
	"testing"
	"testing/synctest"
	"time"
)

// A claim was allocated a GPU while its form changed, and is prepared before the cluster is looked
// at again. It has the GPU in the form that the cluster showed.
func TestADeviceThatAClaimNewlyHoldsStaysAsItWasAllocated(t *testing.T) {
	for _, change := range []struct{ from, to string }{{"static", "dynamic"}, {"dynamic", "static"}} {
		for _, written := range []bool{true, false} {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t, change.from)
				old := n.slices
				n.policy(t, change.to)
				n.publishes(t)
				if !written {
					n.slices = old
				}
				allocated := n.devices()
				n.claims[gpuName], n.alone[gpuName] = "team/quick", "uid"
				for range 3 {
					n.publishes(t)
					<-time.After(lookInterval)
				}
				keptAllocated(t, n.claims, allocated, n.devices())
			})
		}
	}
}

// The kubelet deleted the slices while no plugin ran. A claim still holds a device that the policy
// offers no more.
func TestAPluginThatFindsNoSlicesGoesByClaims(t *testing.T) {
	for _, prepared := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, "dynamic")
			before := n.devices()
			n.claims[small] = "team/pending"
			if prepared {
				n.alone[small] = "uid"
			}
			n.slices = nil
			n.starts(t, "static")
			for range 3 {
				n.publishes(t)
				keptAllocated(t, n.claims, before, n.devices())
				if _, published := n.devices()[large]; published {
					t.Errorf("%s is offered, which no claim holds", large)
				}
				<-time.After(lookInterval)
			}
			clear(n.claims)
			clear(n.alone)
			n.rounds(t)
			if _, published := n.devices()[small]; published {
				t.Errorf("%s is offered when the claim has ended", small)
			}
		})
	}
}

// A change of form was written, and a claim allocated in the new form. Then the policy is as
// before.
func TestAChangeOfFormThatIsTakenBackAltersNoDeviceOfAClaim(t *testing.T) {
	for _, change := range []struct{ from, to string }{{"static", "dynamic"}, {"dynamic", "static"}, {"dynamic(1g.10gb)", "static"}} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, change.from)
			n.policy(t, change.to)
			n.publishes(t)
			allocated := n.devices()
			n.claims[gpuName] = "team/quick"
			n.policy(t, change.from)
			for range 3 {
				n.publishes(t)
				<-time.After(lookInterval)
			}
			keptAllocated(t, n.claims, allocated, n.devices())
		})
	}
}

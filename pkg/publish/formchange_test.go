package publish

import (
	"testing"
	"testing/synctest"
	"time"
)

// The plugin changes which counters a GPU consumes. Before it reads the cluster again, a claim is
// allocated the GPU and prepared. The GPU must keep the counters that the API server showed.
func TestNewlyPreparedDeviceKeepsAllocatedForm(t *testing.T) {
	for _, change := range []struct{ from, to string }{{"static", "dynamic"}, {"dynamic", "static"}} {
		for _, written := range []bool{true, false} {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t, change.from)
				old := n.slices
				n.setPolicy(t, change.to)
				n.publish(t)
				if !written {
					n.slices = old
				}
				allocated := n.publishedDevices()
				n.claims[gpuName], n.exclusive[gpuName] = "team/quick", "uid"
				for range 3 {
					n.publish(t)
					<-time.After(allocationPoll)
				}
				checkAllocatedUnchanged(t, n.claims, allocated, n.publishedDevices())
			})
		}
	}
}

// While no plugin ran, the kubelet deleted the node's slices, and a claim still has a device that
// the new policy does not offer. The restarted plugin must publish that device until the claim
// ends.
func TestRestartWithoutSlicesRetainsAllocatedDevices(t *testing.T) {
	for _, prepared := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, "dynamic")
			before := n.publishedDevices()
			n.claims[small] = "team/pending"
			if prepared {
				n.exclusive[small] = "uid"
			}
			n.slices = nil
			n.restartPlugin(t, "static")
			for range 3 {
				n.publish(t)
				checkAllocatedUnchanged(t, n.claims, before, n.publishedDevices())
				if _, published := n.publishedDevices()[large]; published {
					t.Errorf("%s is offered without a claim", large)
				}
				<-time.After(allocationPoll)
			}
			clear(n.claims)
			clear(n.exclusive)
			n.publishUntilSettled(t)
			if _, published := n.publishedDevices()[small]; published {
				t.Errorf("%s is still offered after its claim ended", small)
			}
		})
	}
}

// The plugin published a GPU with other counters, and then a claim was allocated this GPU. When the
// old policy is set again, the GPU must keep the counters with which it was allocated.
func TestRevertedFormChangeKeepsAllocatedDevice(t *testing.T) {
	for _, change := range []struct{ from, to string }{
		{"static", "dynamic"}, {"dynamic", "static"}, {"{policy: dynamic, profiles: [1g.10gb]}", "static"},
	} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, change.from)
			n.setPolicy(t, change.to)
			n.publish(t)
			allocated := n.publishedDevices()
			n.claims[gpuName] = "team/quick"
			n.setPolicy(t, change.from)
			for range 3 {
				n.publish(t)
				<-time.After(allocationPoll)
			}
			checkAllocatedUnchanged(t, n.claims, allocated, n.publishedDevices())
		})
	}
}

// When the last partitions of the node are gone, its other GPU loses its counters, and a claim is
// allocated this GPU. When the partitions come back, the GPU must stay without counters.
func TestRevertedChangeOfAnotherGPUKeepsAllocatedDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "{policy: static, rules: [{gpus: GPU-1, policy: dynamic}]}")
		n.setPolicy(t, "static")
		for range 10 {
			n.publish(t)
			if len(n.publishedDevices()[gpuName].ConsumesCounters) == 0 {
				break
			}
			<-time.After(allocationPoll)
		}
		allocated := n.publishedDevices()
		n.claims[gpuName] = "team/quick"
		n.setPolicy(t, "{policy: static, rules: [{gpus: GPU-1, policy: dynamic}]}")
		for range 3 {
			n.publish(t)
			<-time.After(allocationPoll)
		}
		checkAllocatedUnchanged(t, n.claims, allocated, n.publishedDevices())
	})
}

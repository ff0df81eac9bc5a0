package publish

import (
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// The kubelet deletes a node's slices when the kubelet starts, and when the plugin has been gone
// for long. A restarted plugin must publish the allocated device again.
func TestAllocatedDeviceIsRetainedWithoutSlices(t *testing.T) {
	for _, prepared := range []bool{false, true} {
		for _, policy := range []string{"static", "off", "{policy: dynamic, profiles: [3g.40gb]}", "dynamic"} {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t, "dynamic")
				n.claims[small] = "team/held"
				if prepared {
					n.exclusive[small] = "uid"
				}
				n.slices = nil
				n.restartPlugin(t, policy)
				for range 10 {
					n.publish(t)
					there := n.publishedDevices()
					if d, published := there[small]; !published || len(d.ConsumesCounters) == 0 {
						t.Fatalf("%s, prepared %v: %s is held, published %v, and consumes %v", policy, prepared, small, published, d.ConsumesCounters)
					}
					if d, published := there[gpuName]; published && len(d.ConsumesCounters) == 0 {
						t.Fatalf("%s, prepared %v: the whole GPU is offered next to %s without counters", policy, prepared, small)
					}
					<-time.After(allocationPoll)
				}
			})
		}
	}
}

func TestAllocatedWholeGPUHidesItsPartitions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "static")
		n.claims[gpuName], n.exclusive[gpuName] = "team/held", "uid"
		n.gpus, n.onCard, n.slices = snapshotOfTwoGPUs(seventhInstance(1)), []device.Instance{seventhInstance(1)}, nil
		n.restartPlugin(t, "static")
		n.publishUntilSettled(t)
		if _, published := n.publishedDevices()[small]; published {
			t.Error("a partition of an allocated whole GPU is offered")
		}
		if _, published := n.publishedDevices()[gpuName]; !published {
			t.Error("the allocated GPU is not published")
		}
	})
}

// When the cluster no longer supports counters, the allocated device must stay, and the plugin must
// not offer devices that overlap it.
func TestAllocatedDeviceIsRetainedWithoutCounters(t *testing.T) {
	for _, prepared := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, "dynamic")
			n.claims[small] = "team/held"
			if prepared {
				n.exclusive[small] = "uid"
			}
			for range 5 {
				offerings, _, err := n.layouts.Decide(t.Context(), n.gpus, false, buildSlices)
				if err != nil {
					t.Fatal(err)
				}
				n.slices = buildSlices(offerings)
				there := n.publishedDevices()
				if _, published := there[small]; !published {
					t.Errorf("prepared %v: %s was removed", prepared, small)
				}
				if _, published := there[gpuName]; published {
					t.Errorf("prepared %v: the whole GPU is offered next to %s without counters", prepared, small)
				}
				<-time.After(allocationPoll)
			}
			if there := n.publishedDevices(); len(there) != 2 || len(there[otherName].ConsumesCounters) > 0 {
				t.Error(slices.Sorted(maps.Keys(there)))
			}
		})
	}
}

// A GPU that has no device to offer must not make the plugin list the claims repeatedly.
func TestClaimsListedOnceForUnpublishedGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "static")
		for i := range n.gpus.Node.GPUs {
			n.gpus.Node.GPUs[i].MIG.Enabled = true
		}
		n.slices, n.lists = nil, 0
		n.restartPlugin(t, "static")
		for range 10 {
			n.publish(t)
			<-time.After(allocationPollMax)
		}
		if n.lists != 1 {
			t.Errorf("%d lists", n.lists)
		}
	})
}

// A device that was unpublished consumes no counters, even while a claim has it. So the plugin must
// not offer an overlapping device until it has seen that no claim was allocated the device.
func TestNothingOverlapsDevicesBeingRemoved(t *testing.T) {
	for _, change := range []struct{ from, to, taken, other string }{
		{"dynamic", "static", small, gpuName},
		{"dynamic", "off", small, gpuName},
		{"{policy: dynamic, profiles: [1g.10gb]}", "{policy: dynamic, profiles: [3g.40gb]}", small, gpuName + "-mig-9-0"},
	} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, change.from)
			n.setPolicy(t, change.to)
			n.publish(t)
			// The scheduler allocates the device change.taken from the old slices, and then the device
			// change.other if the new slices offer it.
			n.claims[change.taken] = "team/quick"
			if _, published := n.publishedDevices()[change.other]; published {
				n.claims[change.other] = "team/next"
			}
			<-time.After(allocationPoll)
			n.publishUntilSettled(t)
			if len(n.claims) > 1 {
				t.Errorf("%s to %s: two claims were allocated %s and %s", change.from, change.to, change.taken, change.other)
			}
			if _, published := n.publishedDevices()[change.taken]; !published {
				t.Errorf("%s to %s: %s is not restored", change.from, change.to, change.taken)
			}
			clear(n.claims)
			if !n.publishUntilSettled(t) {
				t.Error("not settled")
			}
			if _, published := n.publishedDevices()[change.other]; !published {
				t.Errorf("%s to %s: %s is never offered", change.from, change.to, change.other)
			}
		})
	}
}

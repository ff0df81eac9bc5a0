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
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
)

func buildSlices(offerings []device.Offering) []resourceslice.Slice {
	return device.Slices(device.Offer(offerings), device.Driver{Version: "580.65.06", CUDAVersion: "13.0"}, false)
}

// fakeCluster acts as the API server. It has the published slices, and the field claims, which maps
// each allocated device to the name of its claim.
type fakeCluster struct {
	slices  []resourceslice.Slice
	claims  map[string]string
	shares  map[string]bool
	listErr error
	lists   int
}

func (c *fakeCluster) Slices(context.Context) (all []resourceapi.ResourceSlice, _ error) {
	for _, s := range c.slices {
		all = append(all, resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Devices: s.Devices, SharedCounters: s.SharedCounters}})
	}
	return all, nil
}

func (c *fakeCluster) Allocations(context.Context) (device.Allocations, error) {
	c.lists++
	return device.Allocations{Exclusive: maps.Clone(c.claims), Shared: maps.Clone(c.shares)}, c.listErr
}

// publishedDevices maps the names of the devices in the slices to the devices.
func (c *fakeCluster) publishedDevices() map[string]resourceapi.Device {
	all := map[string]resourceapi.Device{}
	for _, s := range c.slices {
		for _, d := range s.Devices {
			all[d.Name] = d
		}
	}
	return all
}

// snapshotOfTwoGPUs returns a snapshot of two H100s that can be split into sevenths and halves. The
// first GPU has the given MIG instances.
func snapshotOfTwoGPUs(instances ...device.Instance) inventory.Snapshot {
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

// node simulates a node. It publishes the devices that its Layouts offer into a fake API server.
type node struct {
	*fakeCluster
	*fakeRecords
	layouts  *Layouts
	policies device.Policies
	gpus     inventory.Snapshot
}

func newNode(t *testing.T, policy string) *node {
	t.Helper()
	n := &node{
		fakeCluster: &fakeCluster{claims: map[string]string{}, shares: map[string]bool{}},
		fakeRecords: &fakeRecords{exclusive: map[string]string{}}, gpus: snapshotOfTwoGPUs(),
	}
	n.restartPlugin(t, policy)
	n.publish(t)
	if n.lists != 1 {
		t.Errorf("%d lists at the start without slices, want 1", n.lists)
	}
	n.lists = 0
	return n
}

// restartPlugin acts like a restart of the plugin: it replaces the Layouts by new ones with this
// policy.
func (n *node) restartPlugin(t *testing.T, policy string) {
	t.Helper()
	n.layouts = NewLayouts(n.fakeRecords, n.fakeCluster, func() (device.Policies, bool) { return n.policies, true })
	n.setPolicy(t, policy)
}

func (n *node) setPolicy(t *testing.T, policy string) {
	t.Helper()
	p, err := settings.ParseMIG(policy)
	if err != nil {
		t.Fatal(err)
	}
	n.policies = p
}

// publish calls Decide once and writes the result to the fake cluster. The test fails if an
// allocated device was removed or altered.
func (n *node) publish(t *testing.T) (settled bool) {
	t.Helper()
	offerings, settled, err := n.layouts.Decide(t.Context(), n.gpus, true, buildSlices)
	if err != nil {
		t.Fatal(err)
	}
	n.write(t, offerings)
	return settled
}

func (n *node) write(t *testing.T, offerings []device.Offering) {
	t.Helper()
	before := n.publishedDevices()
	n.slices = buildSlices(offerings)
	checkAllocatedUnchanged(t, n.claims, before, n.publishedDevices())
}

// checkAllocatedUnchanged fails the test unless each allocated device that was published before is
// still published and consumes the same counters.
func checkAllocatedUnchanged(t *testing.T, claims map[string]string, before, now map[string]resourceapi.Device) {
	t.Helper()
	for name := range claims {
		was, published := before[name]
		is, still := now[name]
		if published && (!still || !apiequality.Semantic.DeepEqual(was.ConsumesCounters, is.ConsumesCounters)) {
			t.Errorf("%s is allocated and consumed %v: published %v, it consumes %v", name, was.ConsumesCounters, still, is.ConsumesCounters)
		}
	}
}

// publishUntilSettled calls publish until it returns true, for at most a minute of fake time.
func (n *node) publishUntilSettled(t *testing.T) (settled bool) {
	t.Helper()
	for range 30 {
		if n.publish(t) {
			return true
		}
		<-time.After(allocationPoll)
	}
	return false
}

// consumedCounters maps the names of the published devices to the counters that they consume.
func (c *fakeCluster) consumedCounters() map[string][]resourceapi.DeviceCounterConsumption {
	all := map[string][]resourceapi.DeviceCounterConsumption{}
	for name, d := range c.publishedDevices() {
		all[name] = d.ConsumesCounters
	}
	return all
}

func seventhInstance(id uint32) device.Instance {
	return device.Instance{
		ID: id, ProfileID: 19, Placement: device.Placement{Start: 2, Size: 1},
		Compute: []device.ComputeInstance{{Name: "1g.10gb", UUID: "MIG-7"}},
	}
}

func TestAllocatedDevicesStayPublishedUnchanged(t *testing.T) {
	for _, change := range []struct{ device, from, to string }{
		{small, "dynamic", "static"},
		{small, "dynamic", "off"},
		{small, "dynamic", "adopt"},
		{small, "dynamic", "{policy: dynamic, rules: [{gpus: GPU-0, policy: static}]}"},
		{small, "dynamic", "{policy: dynamic, rules: [{gpus: GPU-1, policy: static}]}"},
		{small, "{policy: dynamic, profiles: [1g.10gb]}", "{policy: dynamic, profiles: [3g.40gb]}"},
		{small, "{policy: dynamic, profiles: [1g.10gb]}", "dynamic"},
		{large, "adopt", "{policy: dynamic, profiles: [1g.10gb]}"},
		{gpuName, "dynamic", "static"},
		{gpuName, "dynamic", "off"},
		{gpuName, "static", "dynamic"},
		{gpuName, "static", "{policy: adopt, profiles: [3g.40gb]}"},
		{gpuName, "off", "{policy: static, rules: [{gpus: GPU-1, policy: dynamic}]}"},
		{gpuName, "{policy: static, rules: [{gpus: GPU-1, policy: dynamic}]}", "static"},
	} {
		for _, prepared := range []bool{false, true} {
			for what, meanwhile := range map[string]func(*testing.T, *node){
				"in the running plugin":              func(t *testing.T, n *node) { n.setPolicy(t, change.to) },
				"as another plugin starts":           func(t *testing.T, n *node) { n.restartPlugin(t, change.to) },
				"while the kubelet removes slices":   func(t *testing.T, n *node) { n.setPolicy(t, change.to); n.slices = nil },
				"as an instance leads a second time": func(t *testing.T, n *node) { n.layouts.Reset(); n.setPolicy(t, change.to) },
			} {
				t.Run(fmt.Sprintf("%s, %s to %s, prepared %v, %s", change.device, change.from, change.to, prepared, what), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						fresh := newNode(t, change.to)
						n := newNode(t, change.from)
						n.claims[change.device] = "team/held"
						if prepared {
							n.exclusive[change.device] = "uid"
							if change.device == small {
								n.ours, n.gpus = []uint32{1}, snapshotOfTwoGPUs(seventhInstance(1))
							}
						}
						published := n.publishedDevices()
						meanwhile(t, n)
						settled := n.publishUntilSettled(t)
						checkAllocatedUnchanged(t, n.claims, published, n.publishedDevices())
						free := newNode(t, change.to)
						free.ours, free.gpus = n.ours, n.gpus
						free.publishUntilSettled(t)
						same := apiequality.Semantic.DeepEqual(n.consumedCounters()[change.device], free.consumedCounters()[change.device])
						if _, wanted := free.publishedDevices()[change.device]; settled != (same && wanted) {
							t.Errorf("settled %v, but the policy publishes the device: %v, in the same form: %v", settled, wanted, same)
						}

						clear(n.claims)
						clear(n.exclusive)
						n.ours, n.gpus = nil, snapshotOfTwoGPUs()
						if !n.publishUntilSettled(t) {
							t.Error("not settled after the claim ended")
						}
						if now, want := n.consumedCounters(), fresh.consumedCounters(); !apiequality.Semantic.DeepEqual(now, want) {
							t.Errorf("after the claim ended: published %v, want %v", slices.Sorted(maps.Keys(now)), slices.Sorted(maps.Keys(want)))
						}
					})
				})
			}
		}
	}
}

func TestRetainedPartitionLeavesOtherPlacementsToPolicy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "dynamic")
		n.claims[small] = "team/held"
		n.setPolicy(t, "static")
		n.publishUntilSettled(t)
		if now := slices.Sorted(maps.Keys(n.publishedDevices())); !slices.Equal(now, []string{gpuName, small, otherName}) {
			t.Error(now)
		}
	})
}

func TestClaimsListedOnlyForRemovalOrChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "{policy: dynamic, profiles: [1g.10gb]}")
		n.claims[small], n.exclusive[small] = "team/held", "uid"
		n.publishUntilSettled(t)
		n.setPolicy(t, "dynamic") // this policy offers more devices
		n.publishUntilSettled(t)
		if n.lists != 0 {
			t.Errorf("%d lists, although no device was removed", n.lists)
		}
		n.setPolicy(t, "static")
		n.publishUntilSettled(t)
		// The plugin must list the claims once before it writes the slices and once after that. Later it
		// need not, because the claim's checkpoint record names the device.
		if n.lists != 2 {
			t.Errorf("%d lists", n.lists)
		}
	})
}

func TestUnpreparedClaimIsPolledWithBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "dynamic")
		n.claims[small] = "team/pending"
		n.setPolicy(t, "static")
		for range 10 {
			n.publishUntilSettled(t)
		}
		if n.lists < 10 || n.lists > 30 {
			t.Errorf("%d lists in ten minutes", n.lists)
		}
	})
}

func TestDeviceAllocatedDuringRemovalIsRestored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "dynamic")
		before := n.publishedDevices()
		n.setPolicy(t, "static")
		n.publish(t)
		n.claims[small] = "team/quick"
		<-time.After(allocationPoll)
		n.publish(t)
		checkAllocatedUnchanged(t, n.claims, before, n.publishedDevices())
	})
}

func TestChangeIsCheckedUntilAPIServerShowsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "dynamic")
		before := n.slices
		n.setPolicy(t, "static")
		for range 10 { // the publisher cannot write the slices
			if n.publish(t) {
				t.Fatal("settled, although nothing was written")
			}
			n.slices = before
			<-time.After(allocationPoll)
		}
		n.claims[small] = "team/slow"
		for range 3 {
			offerings, _, err := n.layouts.Decide(t.Context(), n.gpus, true, buildSlices)
			if err != nil {
				t.Fatal(err)
			}
			n.slices = buildSlices(offerings)
			<-time.After(allocationPoll)
		}
		if _, published := n.publishedDevices()[small]; !published {
			t.Error("a device was removed that was allocated before the write")
		}
	})
}

func TestNoChangeWhileClaimsCannotBeListed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "dynamic")
		n.listErr = errors.New("resourceclaims is forbidden")
		n.setPolicy(t, "static")
		for range 3 {
			if _, settled, err := n.layouts.Decide(t.Context(), n.gpus, true, buildSlices); err == nil || settled {
				t.Fatalf("settled %v, %v", settled, err)
			}
		}
		n.listErr, n.claims[small] = nil, "team/held"
		n.publishUntilSettled(t)
		if len(n.publishedDevices()) != 3 {
			t.Error(slices.Sorted(maps.Keys(n.publishedDevices())))
		}
	})
}

// An admin removes the compute instance that a claim has. The plugin cannot create it again, so it
// must not keep the device published and not list the claims again and again.
func TestRemovedComputeInstanceIsNotRetained(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		in := seventhInstance(1)
		in.Compute[0].Name = "1c.1g.10gb"
		part := small + "-ci-0"
		n := newNode(t, "static")
		n.gpus, n.onCard = snapshotOfTwoGPUs(in), []device.Instance{in}
		n.publishUntilSettled(t)
		if _, published := n.publishedDevices()[part]; !published {
			t.Fatal(slices.Sorted(maps.Keys(n.publishedDevices())))
		}
		n.claims[part], n.lists = "team/held", 0
		n.gpus, n.onCard = snapshotOfTwoGPUs(), nil
		for range 30 {
			offerings, _, err := n.layouts.Decide(t.Context(), n.gpus, true, buildSlices)
			if err != nil {
				t.Fatal(err)
			}
			n.slices = buildSlices(offerings)
			<-time.After(allocationPoll)
		}
		if n.lists > 4 {
			t.Errorf("claims were listed %d times", n.lists)
		}
	})
}

func TestUnreadableRecordsRemoveNoDevice(t *testing.T) {
	n := newNode(t, "dynamic")
	n.exclusive[small] = "uid"
	n.publish(t)
	n.exclusive, n.readErr = nil, errors.New("input/output error")
	n.setPolicy(t, "static")
	if n.publish(t) {
		t.Error("settled")
	}
	if _, published := n.publishedDevices()[small]; !published {
		t.Error("the device was removed")
	}
}

// The kubelet deletes a node's slices when it restarts. If the list of claims then fails once, the
// next attempt must list them again, because a claim may have a device that was not yet prepared.
func TestFailedListOfClaimsIsRepeatedForNewGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "dynamic")
		n.claims[small] = "team/held"
		n.slices = nil
		n.restartPlugin(t, "static")
		n.listErr = errors.New("timeout")
		if _, _, err := n.layouts.Decide(t.Context(), n.gpus, true, buildSlices); err == nil {
			t.Fatal("a failed list of claims is no error")
		}
		n.listErr = nil
		n.publish(t)
		if _, published := n.publishedDevices()[small]; !published {
			t.Error("the allocated device is not published")
		}
	})
}

// The API server lists slices in any order.
func TestHeldDevicesSettleInAnyOrderOfSlices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, "dynamic")
		n.restartPlugin(t, "dynamic")
		n.lists = 0
		for range 20 {
			slices.Reverse(n.slices)
			n.publish(t)
			<-time.After(2 * allocationPoll)
		}
		if n.lists > 1 {
			t.Errorf("the claims were listed %d times, although nothing changed", n.lists)
		}
	})
}

// Until NVIDIA's driver is loaded after a reboot, sysfs alone says what the node's GPUs are, and no
// virtual machine may get a GPU of which a claim was allocated a part. The kubelet has deleted the
// slices, and only the API server or a record knows of the claim.
func TestNoVirtualMachineGetsAnAllocatedGPUWithoutDriver(t *testing.T) {
	on, errs := device.PassthroughSettings{Enabled: ptr.To(true)}.Policies(nil)
	if errs != nil {
		t.Fatal(errs)
	}
	driverless := snapshotOfTwoGPUs()
	for i := range driverless.Node.GPUs {
		driverless.Node.GPUs[i].GPU = device.GPU{PCIAddress: driverless.Node.GPUs[i].PCIAddress, Passthrough: &device.Passthrough{}}
	}
	for _, name := range []string{small, gpuName, gpuName + "-share", small + "-share"} {
		for _, slicesAre := range []string{"gone", "still there"} {
			for _, prepared := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, prepared %v, slices are %s", name, prepared, slicesAre), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						n := newNode(t, "dynamic")
						n.policies = n.policies.And(on)
						parsed, _ := device.ParseName(name)
						if parsed.Share {
							n.shares[name] = false
						} else {
							n.claims[name] = "team/held"
						}
						if prepared && !parsed.Share {
							n.exclusive[name] = "uid"
						}
						if slicesAre == "gone" {
							n.slices = nil
						}
						n.gpus = driverless
						n.restartPlugin(t, "dynamic")
						n.policies = n.policies.And(on)
						check := func(when string, pause time.Duration) {
							t.Helper()
							for range 20 {
								n.publishUnlisted(t)
								counters := n.consumedCounters()
								for _, whole := range []string{gpuName, gpuName + "-vfio"} {
									offered, is := counters[whole]
									if is && whole != name && (len(offered) == 0 || len(counters[name]) == 0) { // else counters keep both apart
										t.Fatalf("%s, a claim can get %s, which consumes %v", when, whole, offered)
									}
								}
								<-time.After(pause)
							}
							if _, offered := n.consumedCounters()[otherName+"-vfio"]; !offered {
								t.Errorf("%s, no virtual machine can get the other GPU", when)
							}
						}
						check("without a driver", allocationPollMax)
						n.gpus = snapshotOfTwoGPUs()
						for i := range n.gpus.Node.GPUs {
							n.gpus.Node.GPUs[i].Passthrough = &device.Passthrough{HasDriver: true}
						}
						check("with the driver", allocationPoll)
						if _, published := n.consumedCounters()[name]; !published && !parsed.Share {
							t.Error("with the driver, the claim's device is not published")
						}
						n.gpus = driverless
						check("after the driver has gone", allocationPoll)
						clear(n.claims)
						clear(n.exclusive)
						clear(n.shares)
						if !n.publishUntilSettled(t) {
							t.Error("not settled after the claim's end")
						}
						if _, offered := n.consumedCounters()[gpuName+"-vfio"]; !offered {
							t.Error("no virtual machine can get the GPU after the claim's end")
						}
					})
				})
			}
		}
	}
}

// publishUnlisted is publish without its check: while NVML does not list the GPUs, an allocated
// device may be missing.
func (n *node) publishUnlisted(t *testing.T) {
	t.Helper()
	offerings, _, err := n.layouts.Decide(t.Context(), n.gpus, true, buildSlices)
	if err != nil {
		t.Fatal(err)
	}
	n.slices = buildSlices(offerings)
}

package schedules

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/settingstest"
)

// policyRun simulates a node whose MIG policies change while claims hold devices, without faults.
// The slices, the allocator and Prepare are real. No policy change may over-commit a GPU or make an
// allocated claim fail in Prepare (https://github.com/kubernetes/kubernetes/issues/140802).
type policyRun struct {
	*world
	dice

	plugin  *process
	layouts *publish.Layouts
	// configured are the MIG policy rules of the plugin's configuration, and annotated are those of
	// the Node's annotation. shares are the rules for sharing GPUs.
	configured, annotated string
	shares                device.ShareRules
	// configuredMachines and annotatedMachines say which GPUs are offered to virtual machines.
	configuredMachines, annotatedMachines device.PassthroughSettings
	// scheduler allocates from the published slices. It is nil while no slices are published, because
	// the kubelet has deleted them.
	scheduler *scheduler.Scheduler
	taken     *scheduler.Taken
	tenants   []*tenant
	serial    int
	// publisher is the plugin process that published the slices last.
	publisher *process
	// lastNoted is the last list of published devices that was written to the trace.
	lastNoted string
}

// tenant is an allocated claim and what its devices consume.
type tenant struct {
	*resourceapi.ResourceClaim

	// results are the allocation results, as the allocator returned them.
	results []result
	// counters says which counters each allocated device consumed when the claim was allocated.
	counters map[string]string
	prepared bool
}

var _ publish.Cluster = &policyRun{}

// policyRules are policy rules that an admin may write. No GPU model has the profile that the last
// of them names.
var policyRules = []string{
	"", "static", "dynamic", "off", "adopt", "{policy: dynamic, profiles: [1g.10gb]}",
	"{policy: dynamic, profiles: [1g.10gb, 3g.40gb]}", "{policy: adopt, profiles: [3g.40gb]}",
	"{policy: 'off', rules: [{gpus: '0000:1b:00.0', policy: dynamic}]}",
	"{policy: dynamic, rules: [{gpus: '0000:1c:00.0', policy: static}]}", "{policy: dynamic, profiles: [5g.60gb]}",
}

var shareRules = []string{
	"", "", "[{index: 1, kind: shares, count: 2}]", "[{index: 0, kind: fractions}]", "[{profile: 1g.10gb, kind: shares, count: 2}]",
	"[{index: 1, profile: 3g.40gb, kind: fractions}]",
}

// machineRules are rules of passthrough that an admin may write.
var machineRules = []device.PassthroughSettings{
	{}, {Enabled: ptr.To(true)}, {Enabled: ptr.To(false)}, {Rules: []device.PassthroughRule{{GPUs: "0000:1b:00.0", Enabled: ptr.To(true)}}},
}

const attribute = `device.attributes["gpu.nvidia.com"].`

// requestClasses are the device classes that claims request.
var requestClasses = scheduler.Classes{
	"whole": attribute + `type == "gpu"`,
	"1g":    attribute + `type == "mig" && ` + attribute + `profile == "1g.10gb"`,
	"2g":    attribute + `type == "mig" && ` + attribute + `profile == "2g.20gb"`,
	"3g":    attribute + `type == "mig" && ` + attribute + `profile == "3g.40gb"`,
	"upper": attribute + `type == "mig" && ` + attribute + `placementStart == 4`,
	"share": attribute + `type == "gpu-share"`,
	"part":  attribute + `type == "mig-share"`,
	"vm":    attribute + `type == "vfio"`,
}

// newPolicyRun returns a run on a node whose plugin is not yet started. seed determines the run.
func newPolicyRun(dir string, seed uint64) (*policyRun, error) {
	w, err := newWorld(dir, 2)
	if err != nil {
		return nil, err
	}
	w.noFaults, w.passthrough = true, true
	s := &policyRun{world: w, dice: newDice(seed), taken: scheduler.NewTaken()}
	rules := pick(s.dice, shareRules)
	if s.shares, err = settingstest.Shares(rules); err != nil {
		return nil, err
	}
	s.configured, s.configuredMachines = pick(s.dice, policyRules), pick(s.dice, machineRules)
	s.note("the MIG policy is %q, the rules for shares are %q", s.configured, rules)
	return s, nil
}

// runPolicies runs the policy changes of a seed, in a bubble of package synctest. It returns the
// violated invariants and a trace of the events.
func runPolicies(dir string, seed uint64) (violations []string, trace string, err error) {
	s, err := newPolicyRun(dir, seed)
	if err != nil {
		return nil, "", err
	}
	s.restart()
	for range 10 + s.IntN(20) {
		s.step()
		s.check()
		if len(s.violations) > 0 {
			return s.violations, s.traceText(300), nil
		}
	}
	s.end()
	s.plugin.end()
	return s.violations, s.traceText(300), nil
}

// step makes one random event happen. In 60 of 100 cases the plugin publishes its slices right
// after it, and otherwise at a later event.
func (s *policyRun) step() {
	switch n := s.IntN(100); {
	case n < 30:
		s.allocate()
	case n < 45:
		s.onTenant(s.prepareTenant)
	case n < 60:
		s.onTenant(s.unprepareTenant)
	case n < 68:
		s.annotate(pick(s.dice, policyRules), pick(s.dice, machineRules))
	case n < 74:
		s.configured, s.configuredMachines = pick(s.dice, policyRules), pick(s.dice, machineRules)
		s.note("the configuration says %q", s.configured)
		s.restart()
	case n < 78:
		s.restart()
	case n < 82:
		s.note("the kubelet deletes the ResourceSlices")
		s.scheduler = nil
	case n < 86:
		s.adminPartitions(pick(s.dice, s.gpus))
	case n < 90:
		s.adminRemoves(pick(s.dice, s.gpus))
	case n < 92:
		s.adminDisablesMIG(pick(s.dice, s.gpus))
	case n < 95:
		s.reconcile()
	default:
		wait(context.Background(), time.Duration(s.IntN(60))*time.Second)
	}
	if s.chance(60) {
		s.check()
		s.publish()
	}
}

// restart replaces the plugin with a new instance, which reads the present configuration.
func (s *policyRun) restart() {
	if s.plugin != nil {
		s.plugin.end()
	}
	s.plugin = s.newProcess()
	s.note("plugin %d starts", s.plugin.id)
	if err := s.plugin.open(); err != nil {
		s.violates("the plugin does not start: %v", err)
		return
	}
	if err := s.plugin.Reconcile(s.plugin.ctx); err != nil {
		s.violates("the plugin does not recover: %v", err)
	}
	s.layouts = publish.NewLayouts(s.plugin, s, func() (device.Policies, bool) {
		return s.policies(s.configured, s.configuredMachines).And(s.policies(s.annotated, s.annotatedMachines)), true
	})
	s.layouts.Reset()
}

// annotate changes the Node's annotations.
func (s *policyRun) annotate(rules string, machines device.PassthroughSettings) {
	s.annotated, s.annotatedMachines = rules, machines
	s.note("the Node's annotations say %q, and for virtual machines %+v", rules, machines)
}

func (s *policyRun) policies(rules string, machines device.PassthroughSettings) device.Policies {
	p, err := settings.ParseMIG(rules)
	if err != nil {
		s.violates("parse the policy rules %q: %v", rules, err)
	}
	m, _ := machines.Policies(nil)
	return p.And(m)
}

// scan is the node's, with the GPUs that virtual machines have, as package nodeview adds them.
func (s *policyRun) scan() {
	s.world.scan()
	node := &s.snapshot.Node
	for _, away := range node.Passthrough {
		g, mig := s.gpu(away.WholeName()), &device.MIG{Profiles: profiles}
		away.UUID, away.Minor, away.MemoryBytes, away.MIG, away.Passthrough = g.UUID, g.Minor, gpuMemory, mig, &device.Passthrough{}
		node.GPUs = append(node.GPUs, nvidia.GPU{GPU: away})
	}
	node.Passthrough = nil
	slices.SortFunc(node.GPUs, func(a, b nvidia.GPU) int { return strings.Compare(string(a.PCIAddress), string(b.PCIAddress)) })
}

// publish makes the plugin publish its slices. In half of the cases the plugin then reconciles.
func (s *policyRun) publish() {
	s.scan()
	offerings, _, err := s.layouts.Decide(s.plugin.ctx, s.snapshot, true, s.makeSlices)
	if err != nil {
		s.violates("decide the layouts: %v", err)
		return
	}
	unknown := s.scheduler == nil && s.publisher != s.plugin
	s.scheduler, s.publisher = scheduler.New(driverName, s.makeSlices(offerings), requestClasses), s.plugin
	if unknown {
		s.publishAnew()
	}
	if now := strings.Join(s.names(), " "); now != s.lastNoted {
		s.lastNoted = now
		s.note("published: %s", now)
	}
	s.check()
	if s.chance(50) {
		s.reconcile()
	}
}

// publishAnew replaces the counters that checkStaysPublished expects with those that were just
// published. A new plugin that found no slices in the API server cannot know which counters were
// published earlier.
func (s *policyRun) publishAnew() {
	counters := s.counters()
	for _, t := range s.tenants {
		for name := range t.counters {
			t.counters[name] = counters[name]
		}
	}
}

// makeSlices makes ResourceSlices from the devices and counters in offerings, as package driver
// does.
func (s *policyRun) makeSlices(offerings []device.Offering) []resourceslice.Slice {
	offerings = slices.Clone(offerings)
	for i := range offerings {
		offerings[i].Shares = s.shares
	}
	return device.Slices(device.Offer(offerings), device.Driver{Version: "580.65.06", CUDAVersion: "13.0"}, false)
}

// Slices returns the published slices, as the API server would.
func (s *policyRun) Slices(context.Context) ([]resourceapi.ResourceSlice, error) {
	var all []resourceapi.ResourceSlice
	if s.scheduler != nil {
		for _, slice := range s.scheduler.Slices {
			all = append(all, *slice)
		}
	}
	return all, nil
}

// Allocations returns the devices of all claims, prepared or not.
func (s *policyRun) Allocations(context.Context) (device.Allocations, error) {
	all := device.Allocations{Exclusive: map[string]string{}, Shared: map[string]bool{}}
	for _, t := range s.tenants {
		for _, r := range t.held() {
			if r.ShareID != nil {
				all.Shared[r.Device] = isLimited(r)
			} else {
				all.Exclusive[r.Device] = t.Name
			}
		}
	}
	return all, nil
}

// held returns the claim's devices. It leaves out those with admin access, because they take
// nothing from other claims.
func (t *tenant) held() []result {
	return slices.DeleteFunc(slices.Clone(t.results), func(r result) bool { return ptr.Deref(r.AdminAccess, false) })
}

// allocate creates a claim and lets the scheduler allocate devices to it.
func (s *policyRun) allocate() {
	if s.scheduler == nil {
		return
	}
	spec := resourceapi.DeviceClaim{}
	for i := range 1 + s.IntN(2) {
		class := pick(s.dice, []string{"whole", "whole", "1g", "1g", "2g", "3g", "upper", "vm"})
		// A share with limited memory and compute must be the claim's only device, because MPS shows the
		// claim's processes no other GPU.
		if i == 0 && s.chance(20) {
			class = pick(s.dice, []string{"share", "part"})
		}
		asks := &resourceapi.ExactDeviceRequest{
			DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
		}
		if class == "whole" && s.chance(10) {
			asks.AdminAccess = ptr.To(true)
		}
		if class == "share" || class == "part" {
			asks.Capacity = s.capacity(class)
		}
		spec.Requests = append(spec.Requests, resourceapi.DeviceRequest{Name: fmt.Sprintf("r%d", i), Exactly: asks})
		if class == "share" || class == "part" {
			break
		}
	}
	got, err := s.scheduler.Allocate(s.plugin.ctx, s.taken, spec)
	if err != nil {
		s.violates("the allocator fails: %v", err)
	}
	if len(got) == 0 {
		return
	}
	s.serial++
	t := &tenant{results: got, counters: map[string]string{}}
	results := slices.Clone(got)
	var devices []string
	for i := range results {
		results[i].Pool = pool
		devices = append(devices, results[i].Device)
	}
	t.ResourceClaim = &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("t%d", s.serial), UID: types.UID(fmt.Sprintf("uid-t%d", s.serial))},
		Status: resourceapi.ResourceClaimStatus{
			Allocation:  &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod", UID: "uid-pod"}},
		},
	}
	counters := s.counters()
	for _, r := range t.held() {
		t.counters[r.Device] = counters[r.Device]
	}
	s.tenants = append(s.tenants, t)
	s.note("claim %s is allocated %s", t.Name, strings.Join(devices, " "))
	if s.chance(60) {
		s.prepareTenant(t)
	}
}

// capacity returns the amount of memory that a claim for a share requests. It returns nil if the
// published shares of that device class have no limits.
func (s *policyRun) capacity(class string) *resourceapi.CapacityRequirements {
	for _, slice := range s.scheduler.Slices {
		for _, d := range slice.Spec.Devices {
			kind := d.Attributes["type"].StringValue
			_, limited := d.Capacity[device.CapacityCores]
			if limited && kind != nil && (*kind == "gpu-share") == (class == "share") {
				return &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
					device.CapacityMemory: resource.MustParse("8Gi"),
				}}
			}
		}
	}
	return nil
}

func (s *policyRun) onTenant(do func(*tenant)) {
	if len(s.tenants) > 0 {
		do(pick(s.dice, s.tenants))
	}
}

// prepareTenant makes the plugin prepare claim t. It adds a violation if that fails, because the
// run injects no faults, and if a claim with admin access gets a GPU that a virtual machine has.
func (s *policyRun) prepareTenant(t *tenant) {
	s.scan()
	s.note("claim %s is prepared", t.Name)
	_, err := s.plugin.Prepare(s.plugin.ctx, t.ResourceClaim)
	if s.adminWaits(t) {
		if err == nil {
			s.violates("Prepare of claim %s succeeded, but a virtual machine has its GPU", t.Name)
		}
		return
	}
	if err != nil {
		s.violates("claim %s is allocated but cannot be prepared: %v", t.Name, err)
		return
	}
	t.prepared = true
	if err := s.usable(t.ResourceClaim); err != nil {
		s.violates("Prepare of claim %s succeeded, but its containers lack something: %v", t.Name, err)
	}
}

// adminWaits reports whether a virtual machine has a GPU that the claim uses with admin access.
func (s *policyRun) adminWaits(t *tenant) bool {
	return slices.ContainsFunc(t.results, func(r result) bool {
		name, _ := device.ParseName(r.Device)
		return ptr.Deref(r.AdminAccess, false) && s.gpu(name.GPU).isAway()
	})
}

// unprepareTenant makes the plugin unprepare claim t, and frees the claim's devices.
func (s *policyRun) unprepareTenant(t *tenant) {
	s.note("claim %s ends", t.Name)
	if err := s.plugin.Unprepare(s.plugin.ctx, t.UID); err != nil {
		s.violates("claim %s cannot be unprepared: %v", t.Name, err)
	}
	s.taken.Free(t.results...)
	s.tenants = slices.DeleteFunc(s.tenants, func(o *tenant) bool { return o == t })
}

// reconcile runs the plugin's periodic work. The plugin compares checkpoint records with the
// hardware, takes over GPUs that admins hand to it, and disables MIG modes that no claim and no
// admin needs.
func (s *policyRun) reconcile() {
	s.scan()
	s.note("the plugin reconciles")
	if err := s.plugin.Reconcile(s.plugin.ctx); err != nil {
		s.violates("reconcile: %v", err)
	}
	for _, g := range s.layouts.HandedOver() {
		card := s.gpu(g.WholeName())
		adminInstances := maps.Clone(card.adminInstances)
		clear(card.adminInstances) // Adopt may remove these instances
		allocated := func() (device.Allocations, error) { return s.Allocations(s.plugin.ctx) }
		if err := s.plugin.Adopt(s.plugin.ctx, g, allocated); err != nil {
			s.violates("adopt %s: %v", g.WholeName(), err)
		}
		for id, in := range adminInstances {
			if _, there := card.Instances[id]; there {
				card.adminInstances[id] = in
			}
		}
	}
	for _, g := range s.layouts.MIGModeUnneeded() {
		if off, err := s.plugin.DisableUnusedMIGMode(s.plugin.ctx, g); err != nil {
			s.violates("disable the MIG mode of %s: %v", g.WholeName(), err)
		} else if off {
			s.note("the plugin disables the MIG mode of %s", g.WholeName())
		}
	}
	s.scan()
}

// adminPartitions simulates an admin who creates a MIG instance where no claim holds a device.
func (s *policyRun) adminPartitions(g *gpu) {
	start := pick(s.dice, []uint32{0, 2, 4})
	partition := device.Name{GPU: g.name(), Partition: &device.PartitionName{ProfileID: adminProfile, Start: start}}
	for _, t := range s.tenants {
		if slices.ContainsFunc(t.held(), func(r result) bool { return s.excludes(partition.String(), r.Device) }) {
			return
		}
	}
	if g.adminCreates(start) {
		s.note("an admin creates a MIG instance at slice %d of %s", start, g.name())
		s.publish() // before the scheduler allocates a device from the old slices
	}
}

// adminRemoves simulates an admin who destroys one of their MIG instances that no claim holds.
func (s *policyRun) adminRemoves(g *gpu) {
	for id, in := range g.adminInstances {
		name := device.Name{GPU: g.name(), Partition: &device.PartitionName{ProfileID: in.ProfileID, Start: in.Placement.Start}}.String()
		held := slices.ContainsFunc(s.tenants, func(t *tenant) bool {
			return slices.ContainsFunc(t.held(), func(r result) bool {
				return strings.TrimSuffix(r.Device, "-share") == name
			})
		})
		if !held {
			s.note("an admin removes MIG instance %d of %s", id, g.name())
			delete(g.adminInstances, id)
			delete(g.Instances, id)
			s.publish()
			return
		}
	}
}

// adminDisablesMIG simulates an admin who disables the MIG mode of a GPU that no claim uses.
func (s *policyRun) adminDisablesMIG(g *gpu) {
	needed := slices.ContainsFunc(s.tenants, func(t *tenant) bool {
		return slices.ContainsFunc(t.held(), func(r result) bool {
			n, _ := device.ParseName(r.Device)
			return n.GPU == g.name()
		})
	})
	if g.Enabled && len(g.Instances) == 0 && !needed {
		s.note("an admin disables the MIG mode of %s", g.name())
		g.Enabled, g.modeIsOurs = false, false
	}
}

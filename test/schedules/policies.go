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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

// sequence is a node whose policies change while claims hold devices, made of a seed. What is
// published, the allocator and the transaction are the real ones. Nothing fails: what is tested is
// that no change of a policy over-commits a GPU or strands a claim
// (https://github.com/kubernetes/kubernetes/issues/140802).
type sequence struct {
	*world
	dice

	plugin  *process
	layouts *publish.Layouts
	// configured and annotated are the rules in force, shares those of the shares.
	configured, annotated string
	shares                device.ShareRules
	// scheduler has what is published. It has nothing while the kubelet has deleted the slices.
	scheduler *scheduler.Scheduler
	taken     *scheduler.Taken
	tenants   []*tenant
	serial    int
	// publisher is the plugin that published last.
	publisher *process
	// told is what was published when the story last said so.
	told string
}

// tenant is a claim that was allocated.
type tenant struct {
	*resourceapi.ResourceClaim

	// results are as the allocator knows them.
	results []result
	// forms are the counters that each device consumed when it was last published.
	forms    map[string]string
	prepared bool
}

var _ publish.Cluster = &sequence{}

// policyRules are what an admin may write. No model has the last one's profile.
var policyRules = []string{
	"", "static", "dynamic", "off", "adopt", "dynamic(1g.10gb)", "dynamic(1g.10gb,3g.40gb)", "adopt(3g.40gb)",
	"off,0000:1b:00.0=dynamic", "dynamic,0000:1c:00.0=static", "dynamic(5g.60gb)",
}

var shareRules = []string{"", "", "#1=shares:2", "#0=fractions", "*/1g.10gb=shares:2", "#1/3g.40gb=fractions"}

const attribute = `device.attributes["gpu.nvidia.com"].`

// wishes are what claims ask for.
var wishes = scheduler.Classes{
	"whole": attribute + `type == "gpu"`,
	"1g":    attribute + `type == "mig" && ` + attribute + `profile == "1g.10gb"`,
	"2g":    attribute + `type == "mig" && ` + attribute + `profile == "2g.20gb"`,
	"3g":    attribute + `type == "mig" && ` + attribute + `profile == "3g.40gb"`,
	"upper": attribute + `type == "mig" && ` + attribute + `placementStart == 4`,
	"share": attribute + `type == "gpu-share"`,
	"part":  attribute + `type == "mig-share"`,
}

// newSequence is a node on which a plugin has just been installed.
func newSequence(dir string, seed uint64) (*sequence, error) {
	w, err := newWorld(dir, 2)
	if err != nil {
		return nil, err
	}
	w.calm = true
	s := &sequence{world: w, dice: newDice(seed), taken: scheduler.NewTaken()}
	rules := pick(s.dice, shareRules)
	if s.shares, err = device.ParseShares(rules); err != nil {
		return nil, err
	}
	s.configured = pick(s.dice, policyRules)
	s.note("the policy is %q, the shares are %q", s.configured, rules)
	return s, nil
}

// runPolicies tells the sequence of a seed, in a bubble of package synctest. It returns what did
// not hold.
func runPolicies(dir string, seed uint64) (broken []string, story string, err error) {
	s, err := newSequence(dir, seed)
	if err != nil {
		return nil, "", err
	}
	s.restart()
	for range 10 + s.IntN(20) {
		s.step()
		s.check()
		if len(s.broken) > 0 {
			return s.broken, s.story(300), nil
		}
	}
	s.end()
	s.plugin.end()
	return s.broken, s.story(300), nil
}

// step is one act, which is noticed at once or later.
func (s *sequence) step() {
	switch n := s.IntN(100); {
	case n < 30:
		s.allocate()
	case n < 45:
		s.onTenant(s.prepareTenant)
	case n < 60:
		s.onTenant(s.leave)
	case n < 68:
		s.annotated = pick(s.dice, policyRules)
		s.note("the Node's annotation says %q", s.annotated)
		s.follow()
	case n < 74:
		s.configured = pick(s.dice, policyRules)
		s.note("the configuration says %q", s.configured)
		s.restart()
	case n < 78:
		s.restart()
	case n < 82:
		s.note("the kubelet deletes the slices")
		s.scheduler = nil
	case n < 86:
		s.adminCuts(pick(s.dice, s.gpus))
	case n < 90:
		s.adminRemoves(pick(s.dice, s.gpus))
	case n < 92:
		s.adminTurnsModeOff(pick(s.dice, s.gpus))
	case n < 95:
		s.compareAll()
	default:
		wait(context.Background(), time.Duration(s.IntN(60))*time.Second)
	}
	if s.chance(60) {
		s.check()
		s.publish()
	}
}

// restart is another instance of the plugin in the place of the one before, with the configuration.
func (s *sequence) restart() {
	if s.plugin != nil {
		s.plugin.end()
	}
	s.plugin = s.newProcess()
	s.note("plugin %d starts", s.plugin.id)
	if err := s.plugin.open(); err != nil {
		s.breaks("the plugin does not start: %v", err)
		return
	}
	if err := s.plugin.Recover(s.plugin.ctx); err != nil {
		s.breaks("the plugin does not recover: %v", err)
	}
	s.layouts = publish.NewLayouts(s.plugin, s, s.policies(s.configured))
	s.layouts.Begin()
	s.follow()
}

func (s *sequence) follow() { s.layouts.Annotate(s.policies(s.annotated)) }

func (s *sequence) policies(rules string) device.Policies {
	p, err := device.ParsePolicies(rules)
	if err != nil {
		s.breaks("the rules %q: %v", rules, err)
	}
	return p
}

// publish is a publication, after which the plugin compares records and hardware.
func (s *sequence) publish() {
	s.scan()
	offerings, _, err := s.layouts.Decide(s.plugin.ctx, s.snapshot, true, s.cut)
	if err != nil {
		s.breaks("what is to be published is not decided: %v", err)
		return
	}
	unknown := s.scheduler == nil && s.publisher != s.plugin
	s.scheduler, s.publisher = scheduler.New(driverName, s.cut(offerings), wishes), s.plugin
	if unknown {
		s.publishAnew()
	}
	if now := strings.Join(s.names(), " "); now != s.told {
		s.told = now
		s.note("published: %s", now)
	}
	s.check()
	if s.chance(50) {
		s.compareAll()
	}
}

// publishAnew is a publication of a plugin that found no slices: nobody knows in which form devices
// were published before.
func (s *sequence) publishAnew() {
	forms := s.forms()
	for _, t := range s.tenants {
		for name := range t.forms {
			t.forms[name] = forms[name]
		}
	}
}

// cut makes slices as package driver does.
func (s *sequence) cut(offerings []device.Offering) []resourceslice.Slice {
	offerings = slices.Clone(offerings)
	for i := range offerings {
		offerings[i].Shares = s.shares
	}
	return device.Slices(device.Offer(offerings), device.Driver{Version: "580.65.06", CUDAVersion: "13.0"})
}

// Slices are those that are published.
func (s *sequence) Slices(context.Context) ([]resourceapi.ResourceSlice, error) {
	var all []resourceapi.ResourceSlice
	if s.scheduler != nil {
		for _, slice := range s.scheduler.Slices {
			all = append(all, *slice)
		}
	}
	return all, nil
}

// Allocated are the devices of all claims, prepared or not.
func (s *sequence) Allocated(context.Context) (publish.Holders, error) {
	all := publish.Holders{Alone: map[string]string{}, Shares: map[string]bool{}}
	for _, t := range s.tenants {
		for _, r := range t.held() {
			if r.ShareID != nil {
				all.Shares[r.Device] = isLimited(r)
			} else {
				all.Alone[r.Device] = t.Name
			}
		}
	}
	return all, nil
}

// held are the devices that the claim keeps others from. One that it only looks at is none.
func (t *tenant) held() []result {
	return slices.DeleteFunc(slices.Clone(t.results), func(r result) bool { return ptr.Deref(r.AdminAccess, false) })
}

// allocate has the scheduler give something to a claim.
func (s *sequence) allocate() {
	if s.scheduler == nil {
		return
	}
	spec := resourceapi.DeviceClaim{}
	for i := range 1 + s.IntN(2) {
		class := pick(s.dice, []string{"whole", "whole", "1g", "1g", "2g", "3g", "upper"})
		if i == 0 && s.chance(20) { // alone: a fraction lets its claim's processes see nothing else
			class = pick(s.dice, []string{"share", "part"})
		}
		asks := &resourceapi.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1}
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
		s.breaks("the allocator fails: %v", err)
	}
	if len(got) == 0 {
		return
	}
	s.serial++
	t := &tenant{results: got, forms: map[string]string{}}
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
	forms := s.forms()
	for _, r := range t.held() {
		t.forms[r.Device] = forms[r.Device]
	}
	s.tenants = append(s.tenants, t)
	s.note("claim %s is allocated %s", t.Name, strings.Join(devices, " "))
	if s.chance(60) {
		s.prepareTenant(t)
	}
}

// capacity is asked of fractions only.
func (s *sequence) capacity(class string) *resourceapi.CapacityRequirements {
	for _, slice := range s.scheduler.Slices {
		for _, d := range slice.Spec.Devices {
			kind := d.Attributes["type"].StringValue
			_, limited := d.Capacity[device.CapacityCores]
			if limited && kind != nil && (*kind == "gpu-share") == (class == "share") {
				return &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{device.CapacityMemory: resource.MustParse("8Gi")}}
			}
		}
	}
	return nil
}

func (s *sequence) onTenant(do func(*tenant)) {
	if len(s.tenants) > 0 {
		do(pick(s.dice, s.tenants))
	}
}

// prepareTenant is the kubelet's call. Nothing is broken on the node, so it must succeed.
func (s *sequence) prepareTenant(t *tenant) {
	s.scan()
	s.note("claim %s is prepared", t.Name)
	if _, err := s.plugin.Prepare(s.plugin.ctx, t.ResourceClaim); err != nil {
		s.breaks("claim %s is stranded: %v", t.Name, err)
		return
	}
	t.prepared = true
	if err := s.promised(t.ResourceClaim); err != nil {
		s.breaks("claim %s is prepared: %v", t.Name, err)
	}
}

// leave gives a claim back, and frees its devices.
func (s *sequence) leave(t *tenant) {
	s.note("claim %s ends", t.Name)
	if err := s.plugin.Unprepare(s.plugin.ctx, t.UID); err != nil {
		s.breaks("claim %s cannot be given back: %v", t.Name, err)
	}
	s.taken.Free(t.results...)
	s.tenants = slices.DeleteFunc(s.tenants, func(o *tenant) bool { return o == t })
}

// compareAll is what the plugin does every now and then: it compares records and hardware, takes
// over what admins hand over, and turns off the MIG modes that nothing needs.
func (s *sequence) compareAll() {
	s.scan()
	s.note("the plugin compares records and hardware")
	if err := s.plugin.Reconcile(s.plugin.ctx); err != nil {
		s.breaks("records and hardware do not agree: %v", err)
	}
	for _, g := range s.layouts.HandedOver() {
		card := s.gpu(g.WholeName())
		theirs := maps.Clone(card.theirs)
		clear(card.theirs) // the plugin may remove them
		if err := s.plugin.Adopt(s.plugin.ctx, g.Card(), g.WholeName()); err != nil {
			s.breaks("%s is not taken over: %v", g.WholeName(), err)
		}
		for id, in := range theirs {
			if _, there := card.instances[id]; there {
				card.theirs[id] = in
			}
		}
	}
	for _, g := range s.layouts.Uncut() {
		if off, err := s.plugin.ModeOff(s.plugin.ctx, g); err != nil {
			s.breaks("the MIG mode of %s is not turned off: %v", g.WholeName(), err)
		} else if off {
			s.note("the plugin turns off the MIG mode of %s", g.WholeName())
		}
	}
	s.scan()
}

// adminCuts is an admin who cuts a GPU where no claim holds anything.
func (s *sequence) adminCuts(g *gpu) {
	start := pick(s.dice, []uint32{0, 2, 4})
	place := device.Name{GPU: g.name(), Partition: &device.PartitionName{ProfileID: theirProfile, Start: start}}
	for _, t := range s.tenants {
		if slices.ContainsFunc(t.held(), func(r result) bool { return s.excludes(place.String(), r.Device) }) {
			return
		}
	}
	if g.someoneElse(start) {
		s.note("an admin cuts %s at %d", g.name(), start)
		s.publish() // before anything is allocated that was published until now
	}
}

// adminRemoves is an admin who removes an instance that no claim holds.
func (s *sequence) adminRemoves(g *gpu) {
	for id, in := range g.theirs {
		name := device.Name{GPU: g.name(), Partition: &device.PartitionName{ProfileID: in.ProfileID, Start: in.Placement.Start}}.String()
		held := slices.ContainsFunc(s.tenants, func(t *tenant) bool {
			return slices.ContainsFunc(t.held(), func(r result) bool { return strings.TrimSuffix(r.Device, "-share") == name })
		})
		if !held {
			s.note("an admin removes instance %d of %s", id, g.name())
			delete(g.theirs, id)
			delete(g.instances, id)
			s.publish()
			return
		}
	}
}

// adminTurnsModeOff is an admin who turns off a mode that no claim needs.
func (s *sequence) adminTurnsModeOff(g *gpu) {
	needed := slices.ContainsFunc(s.tenants, func(t *tenant) bool {
		return slices.ContainsFunc(t.held(), func(r result) bool { n, _ := device.ParseName(r.Device); return n.GPU == g.name() })
	})
	if g.on && len(g.instances) == 0 && !needed {
		s.note("an admin turns off the MIG mode of %s", g.name())
		g.on, g.ours = false, false
	}
}

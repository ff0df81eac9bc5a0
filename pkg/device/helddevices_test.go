package device

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

// fleet simulates a node over time: the MIG instances of its GPUs, the policies and share rules,
// and the devices that claims have.
type fleet struct {
	t        *testing.T
	random   *rand.Rand
	gpus     []GPU
	policies []Policy
	shares   ShareRules
	// held maps each device that a claim has to how it was published when the claim was allocated.
	held map[string]publishedDevice
	made map[string]bool // MIG instances created for claims, by the GPU's name and the instance's ID
	next uint32          // ID of the next MIG instance
	log  []string
}

// publishedDevice is how a device was published when a claim got it: the counters that it consumes,
// their totals, and whether MPS limits its shares.
type publishedDevice struct {
	consumes []resourceapi.DeviceCounterConsumption
	totals   map[string]int64 // of the counters that the device consumes
	fraction bool
}

func newFleet(t *testing.T, random *rand.Rand, models map[string]*model.GPU) *fleet {
	keys := slices.Sorted(maps.Keys(models))
	var chosen []string
	for range 1 + random.IntN(3) {
		chosen = append(chosen, keys[random.IntN(len(keys))])
	}
	f := &fleet{t: t, random: random, gpus: nodeOf(models, chosen...), held: map[string]publishedDevice{}, made: map[string]bool{}, next: 1}
	f.log = append(f.log, fmt.Sprint(chosen))
	f.policies = make([]Policy, len(f.gpus))
	for i := range f.gpus {
		f.gpus[i].Passthrough = &Passthrough{}
		if m := f.gpus[i].MIG; m != nil && m.ModeFixed {
			m.Enabled = random.IntN(2) == 0
			m.Pending = m.Enabled
		}
		f.policy(i)
	}
	f.rules()
	return f
}

func (f *fleet) offerings() []Offering {
	held, shares := map[string]bool{}, map[string]bool{}
	for name, d := range f.held {
		if strings.HasSuffix(name, "-share") {
			shares[name] = d.fraction
		} else {
			held[name] = len(d.consumes) > 0
		}
	}
	var all []Offering
	for i, g := range f.gpus {
		var owned []Instance
		if g.MIG != nil {
			for _, in := range g.MIG.Instances {
				if f.made[fmt.Sprint(g.WholeName(), in.ID)] {
					owned = append(owned, in)
				}
			}
		}
		layout, _ := Decide(g, owned, f.policies[i], true)
		all = append(all, Offering{GPU: g, Layout: layout, Shares: f.shares, Held: held, HeldShares: shares})
	}
	return all
}

func (f *fleet) policy(i int) {
	f.policies[i] = Policy{
		Mode:        []PolicyMode{PolicyStatic, PolicyDynamic, PolicyDynamic, PolicyOff, PolicyAdopt}[f.random.IntN(5)],
		Passthrough: f.random.IntN(3) == 0,
	}
	if m := f.gpus[i].MIG; m != nil && f.policies[i].CreatesInstances() && f.random.IntN(2) == 0 {
		f.policies[i].Profiles = []string{m.Profiles[f.random.IntN(len(m.Profiles))].Name}
	}
	f.log = append(f.log, fmt.Sprintf("GPU %d is %s, passthrough %t", i, f.policies[i], f.policies[i].Passthrough))
}

func (f *fleet) rules() {
	rules := []string{
		"", "", "", "[{kind: fractions}]", "[{kind: shares, count: 2}]", "[{index: 0, kind: shares, count: 3}]",
		"[{profile: '1g*', kind: shares, count: 2}]", "[{kind: fractions}, {profile: '*', kind: fractions}]",
		"[{profile: '1c*', kind: shares, count: 2}]",
	}[f.random.IntN(9)]
	f.shares = shareRules(f.t, rules)
	f.log = append(f.log, fmt.Sprintf("shares are %q", rules))
}

// step makes one random event happen on the simulated node, such as a new claim, an ended claim or
// a new policy.
func (f *fleet) step(free []string, devices map[string]resourceapi.Device, l ledger) {
	i := f.random.IntN(len(f.gpus))
	switch f.random.IntN(9) {
	case 0, 1, 2:
		if len(free) > 0 {
			f.allocate(devices[free[f.random.IntN(len(free))]], l)
		}
	case 3:
		f.release()
	case 4, 5:
		f.policy(i)
	case 6:
		f.rules()
	case 7:
		f.createForClaim()
	default:
		f.admin(i)
	}
}

func (f *fleet) allocate(d resourceapi.Device, l ledger) {
	p := publishedDevice{consumes: d.ConsumesCounters, totals: l.totals(d.Name)}
	_, p.fraction = d.Capacity[CapacityMemory]
	f.held[d.Name] = p
	f.log = append(f.log, fmt.Sprintf("a claim got %s (%d)", d.Name, len(d.ConsumesCounters)))
}

// release ends all claims on a random device, and removes the MIG instance that was created for
// them.
func (f *fleet) release() {
	name := f.pick()
	if name == "" {
		return
	}
	delete(f.held, name)
	n, _ := ParseName(name)
	if i := slices.IndexFunc(f.gpus, func(g GPU) bool { return g.WholeName() == n.GPU }); n.Partition != nil {
		f.set(i, slices.DeleteFunc(slices.Clone(f.gpus[i].MIG.Instances), func(in Instance) bool {
			_, is := in.Part(*n.Partition)
			return is && f.made[fmt.Sprint(n.GPU, in.ID)]
		}))
	}
	f.log = append(f.log, "released: "+name)
}

// pick returns the name of a random device that a claim has, or "" if there is none.
func (f *fleet) pick() string {
	if len(f.held) == 0 {
		return ""
	}
	return slices.Sorted(maps.Keys(f.held))[f.random.IntN(len(f.held))]
}

// set replaces the MIG instances of the GPU with index i. If none are left and the GPU can leave
// MIG mode without a reset, it leaves MIG mode in half of the cases.
func (f *fleet) set(i int, instances []Instance) {
	m := *f.gpus[i].MIG
	m.Instances = instances
	if !m.ModeFixed {
		m.Enabled = len(instances) > 0 || m.Enabled && f.random.IntN(2) == 0
		m.Pending = m.Enabled
	}
	f.gpus[i].MIG = &m
}

// createForClaim creates the MIG instance of a random partition that a claim has, if the placement
// is free.
func (f *fleet) createForClaim() {
	n, ok := ParseName(f.pick())
	if !ok || n.Partition == nil || n.Partition.Compute != nil {
		return
	}
	i := slices.IndexFunc(f.gpus, func(g GPU) bool { return g.WholeName() == n.GPU })
	if p, known := f.gpus[i].Profile(n.Partition.ProfileID); known && f.createInstance(i, p, n.Partition.Start, 1) {
		f.made[fmt.Sprint(n.GPU, f.next-1)] = true
		f.log = append(f.log, fmt.Sprintf("created for a claim: %s", n))
	}
}

// admin does what an admin may do to the GPU with index i: create a MIG instance, remove idle MIG
// instances, or reboot the node, which removes all MIG instances.
func (f *fleet) admin(i int) {
	g := f.gpus[i]
	if g.MIG == nil {
		return
	}
	switch f.random.IntN(6) {
	case 0:
		f.set(i, nil)
		f.log = append(f.log, fmt.Sprintf("all instances of GPU %d are gone", i))
	case 1, 2:
		f.set(i, slices.DeleteFunc(slices.Clone(g.MIG.Instances), func(in Instance) bool {
			return !f.made[fmt.Sprint(g.WholeName(), in.ID)] && !f.isHeld(g, in)
		}))
		f.log = append(f.log, fmt.Sprintf("idle instances of GPU %d are gone", i))
	default:
		whole := Name{GPU: g.WholeName()}
		_, alone := f.held[whole.String()]
		whole.Share = true
		_, shared := f.held[whole.String()]
		_, bound := f.held[VFIO{gpu: g}.Name()]
		p := g.MIG.Profiles[f.random.IntN(len(g.MIG.Profiles))]
		start, parts := p.Starts[f.random.IntN(len(p.Starts))], 1
		if f.random.IntN(3) == 0 {
			parts = int(p.Slices)
		}
		if !alone && !shared && !bound && (!g.MIG.ModeFixed || g.MIG.Enabled) && f.createInstance(i, p, start, parts) {
			f.log = append(f.log, fmt.Sprintf("an admin created an instance on GPU %d: %s at %d with %d compute instances", i, p.Name, start, parts))
		}
	}
}

func (f *fleet) isHeld(g GPU, in Instance) bool {
	for _, p := range migDevices(g, in, counterSetOf(g)) {
		_, alone := f.held[p.Name()]
		_, shared := f.held[p.Name()+"-share"]
		if alone || shared {
			return true
		}
	}
	return false
}

// createInstance creates a MIG instance with the given number of compute instances on the GPU with
// index i. It returns false if the placement is not free.
func (f *fleet) createInstance(i int, p Profile, start uint32, parts int) bool {
	g := f.gpus[i]
	name := Name{GPU: g.WholeName(), Partition: &PartitionName{ProfileID: p.ID, Start: start}}
	for _, in := range g.MIG.Instances {
		if Conflict(name, Name{GPU: g.WholeName(), Partition: &PartitionName{ProfileID: in.ProfileID, Start: in.Placement.Start}}, g) {
			return false
		}
	}
	in := Instance{ID: f.next, ProfileID: p.ID, Placement: Placement{start, p.Size}}
	f.next++
	for c := range parts {
		compute := ComputeInstance{ID: uint32(c), Name: p.Name, Placement: Placement{uint32(c), p.Slices},
			UUID: fmt.Sprintf("MIG-%d-%d", in.ID, c)}
		if parts > 1 {
			compute.Name, compute.Placement.Size = "1c."+p.Name, 1
		}
		in.Compute = append(in.Compute, compute)
	}
	f.set(i, append(slices.Clone(g.MIG.Instances), in))
	return true
}

// gone reports whether n names a compute instance that no longer exists. Such a device cannot stay
// published, because the node knows nothing about its hardware any more.
func (f *fleet) gone(n Name) bool {
	if n.Partition == nil || n.Partition.Compute == nil {
		return false
	}
	g := f.gpus[slices.IndexFunc(f.gpus, func(g GPU) bool { return g.WholeName() == n.GPU })]
	_, known := g.partition(*n.Partition, counterSetOf(g))
	return !known
}

// publish offers the GPUs, and fails the test if a device that a claim has is not published as
// before. The result free has the devices that can still be allocated.
func (f *fleet) publish() (free []string, devices map[string]resourceapi.Device, l ledger) {
	f.t.Helper()
	offerings := f.offerings()
	m := machine{f.t, offerings, scheduler.New(driverName, Slices(Offer(offerings), Driver{Version: "580.65.06"}, false), nil)}
	checkAPILimits(f.t, m)
	l, devices = newLedger(m.Scheduler), map[string]resourceapi.Device{}
	for _, s := range m.Slices {
		for _, d := range s.Spec.Devices {
			devices[d.Name] = d
		}
	}
	for _, name := range slices.Sorted(maps.Keys(f.held)) {
		before := f.held[name]
		d, there := devices[name]
		n, _ := ParseName(name)
		if !there && f.gone(n) {
			continue
		}
		if diff := cmp.Diff(before.consumes, d.ConsumesCounters); !there || diff != "" {
			f.t.Errorf("held device %s: published %v, difference in consumption: %s", name, there, diff)
			continue
		}
		if diff := cmp.Diff(before.totals, l.totals(name)); diff != "" {
			f.t.Errorf("totals of the counters that %s consumes changed: %s", name, diff)
		}
		if ok, by := l.covers(name); !ok {
			f.t.Errorf("the counters have not enough %v for held device %s", by, name)
		}
		l.add(name, 1)
	}
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		if _, taken := f.held[name]; taken {
			continue
		}
		if ok, _ := l.covers(name); !ok {
			continue
		}
		free = append(free, name)
		f.checkNoConflict(name)
	}
	f.checkCountersAllOrNone(devices)
	return free, devices, l
}

func (f *fleet) checkNoConflict(name string) {
	n, _ := ParseName(name)
	g := f.gpus[slices.IndexFunc(f.gpus, func(g GPU) bool { return g.WholeName() == n.GPU })]
	for other := range f.held {
		if o, _ := ParseName(other); Conflict(n, o, g) {
			f.t.Errorf("%s can be allocated but conflicts with held device %s", name, other)
		}
	}
}

// checkCountersAllOrNone fails the test unless all devices of the node consume counters if any
// devices overlap, and none do otherwise. Devices that claims have may be published as they were
// when they were allocated.
func (f *fleet) checkCountersAllOrNone(devices map[string]resourceapi.Device) {
	overlap, wanted, placed := false, false, map[string]bool{}
	for _, o := range f.offerings() {
		wanted = wanted || o.Placements || o.Whole && o.VFIO
	}
	for _, s := range Offer(f.offerings()) {
		p, is := s.(Partition)
		placed[s.Name()] = is && p.uuid == ""
		if _, is := s.(VFIO); is {
			_, placed[s.Name()] = devices[s.GPU().WholeName()]
		}
	}
	for name, d := range devices {
		_, held := f.held[name]
		overlap = overlap || ptr.Deref(d.AllowMultipleAllocations, false) || placed[name] && !held
	}
	for name, d := range devices {
		held, is := f.held[name]
		if overlap && len(d.ConsumesCounters) == 0 && (!is || len(held.consumes) > 0) {
			f.t.Errorf("devices of the node overlap, but %s has no counters", name)
		}
		n, _ := ParseName(name)
		if !overlap && !wanted && !is && len(d.ConsumesCounters) > 0 && !f.holdsCounted(n.GPU) {
			f.t.Errorf("nothing overlaps, but %s has counters", name)
		}
	}
}

// holdsCounted reports whether a claim has a device that was published with counters, and that is
// on this GPU or is a partition of any GPU.
func (f *fleet) holdsCounted(gpu string) bool {
	for name, d := range f.held {
		if n, _ := ParseName(name); len(d.consumes) > 0 && (n.GPU == gpu || n.Partition != nil) {
			return true
		}
	}
	return false
}

// totals returns the total amount of each counter that the device consumes.
func (l ledger) totals(device string) map[string]int64 {
	totals := map[string]int64{}
	for _, c := range l.cost[device] {
		for name := range c.Counters {
			totals[c.CounterSet+"/"+name] = l.total[c.CounterSet][name]
		}
	}
	return totals
}

// Policies, share rules and MIG layouts change at random while claims have devices. Such a device
// must stay published with the same consumption of counters, and no device that conflicts with it
// may be allocated (https://github.com/kubernetes/kubernetes/issues/140802).
func TestHeldDevicesStayAsPublished(t *testing.T) {
	const fleets, steps = 120, 25
	models := readModels(t)
	held, kept, uncounted, passed := 0, 0, 0, 0
	for seed := range uint64(fleets) {
		f := newFleet(t, rand.New(rand.NewPCG(seed, 5)), models)
		for range steps {
			free, devices, l := f.publish()
			if t.Failed() {
				t.Fatalf("seed %d: %s", seed, strings.Join(f.log, "\n"))
			}
			unheld := *f
			unheld.held = nil
			offered := map[string]bool{}
			for _, s := range Offer(unheld.offerings()) {
				offered[s.Name()] = true
			}
			for name, d := range f.held {
				held++
				if len(d.consumes) == 0 {
					uncounted++
				}
				if n, _ := ParseName(name); n.Passthrough {
					passed++
				}
				if !offered[name] {
					kept++
				}
			}
			f.step(free, devices, l)
		}
	}
	t.Logf("%d held devices, %d of them without counters, %d of them no longer offered, %d for virtual machines",
		held, uncounted, kept, passed)
	if held < 2000 || uncounted < 400 || kept < 300 || passed < 200 {
		t.Error("too few cases to prove anything")
	}
}

package neighbours

import (
	"maps"
	"math"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

// utilization computes a pool's utilization as the Cluster Autoscaler does. A counter set counts as
// much as its most used counter, and a device without counters counts as used or unused. The
// utilization is the average of both kinds. If the allocated devices are all of one kind, only that
// kind counts.
//
// https://github.com/kubernetes/autoscaler/blob/0046c5d1066a1c5fa4246ff621c088c675b0ca82/cluster-autoscaler/simulator/dynamicresources/utils/utilization.go
func utilization(pool []resourceslice.Slice, allocated []string) float64 {
	total, used := map[string]map[string]float64{}, map[string]map[string]float64{}
	sets := map[string]bool{}
	plain, plainUsed := 0.0, 0.0
	for _, s := range pool {
		for _, set := range s.SharedCounters {
			total[set.Name], used[set.Name] = map[string]float64{}, map[string]float64{}
			for name, c := range set.Counters {
				total[set.Name][name] = c.Value.AsApproximateFloat64()
			}
		}
		for _, d := range s.Devices {
			held := slices.Contains(allocated, d.Name)
			if len(d.ConsumesCounters) == 0 {
				plain++
				if held {
					plainUsed++
				}
			}
			for _, c := range d.ConsumesCounters {
				sets[c.CounterSet] = true
				for name, n := range c.Counters {
					if held {
						used[c.CounterSet][name] += n.Value.AsApproximateFloat64()
					}
				}
			}
		}
	}
	counted := 0.0
	for set := range sets {
		highest := 0.0
		for name, n := range total[set] {
			if n > 0 {
				highest = max(highest, used[set][name]/n)
			}
		}
		counted += highest
	}
	switch {
	case plainUsed == float64(len(allocated)):
		return plainUsed / max(plain, 1)
	case plainUsed == 0:
		return counted / float64(len(sets))
	default:
		return (counted + plainUsed) / (float64(len(sets)) + plain)
	}
}

// The Cluster Autoscaler may remove a node with a utilization of at most 0.5. So a fully allocated
// node must have a high utilization.
func TestClusterAutoscalerSeesUtilization(t *testing.T) {
	for _, c := range []struct {
		name, model, policies string
		mig                   bool // whether GPUs whose MIG mode only a reset changes are in MIG mode
		class                 string
		n                     int
		least, most           float64
	}{
		{"eight of eight", h100, "dynamic", false, isGPU, 8, 1, 1},
		{"seven of eight", h100, "dynamic", false, isGPU, 7, 0.8, 0.9},
		{"none", h100, "dynamic", false, isGPU, 0, 0, 0},
		{"half of each GPU", h100, "dynamic", false, isHalf, 8, 0.4, 0.6},
		{"every small partition", h100, "{policy: dynamic, profiles: [1g.10gb]}", false, isSmall, 56, 0.8, 1},
		{"half of the small partitions", h100, "{policy: dynamic, profiles: [1g.10gb]}", false, isSmall, 28, 0.4, 0.6},
		{"every small partition of A100", a100, "dynamic", true, isSmall, 56, 0.8, 1},
		{"half of each A100", a100, "dynamic", true, isHalf, 8, 0.4, 0.6},
		{"static, eight of eight", h100, "static", false, isGPU, 8, 1, 1},
		{"static, seven of eight", h100, "static", false, isGPU, 7, 0.875, 0.875},
		{"static, eight A100 of eight", a100, "static", false, isGPU, 8, 1, 1},
		{"one dynamic, eight of eight", h100, "{policy: static, rules: [{gpus: '0000:20:00.0', policy: dynamic}]}", false, isGPU, 8, 1, 1},
		{"one dynamic, seven of eight", h100, "{policy: static, rules: [{gpus: '0000:20:00.0', policy: dynamic}]}", false, isGPU, 7, 0.8, 0.9},
		{"one static, half of the others", h100, "{policy: dynamic, rules: [{gpus: '0000:20:00.0', policy: static}]}", false, isHalf, 14, 0.8, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			gpus := cards(t, c.model, 8, 0)
			if c.mig {
				gpus = inMIGMode(gpus)
			}
			pool := published(t, c.policies, gpus)
			held := allocate(t, newScheduler(pool), scheduler.NewTaken(), c.class, c.n)
			if len(held) != c.n {
				t.Fatalf("allocated %d of %d", len(held), c.n)
			}
			const epsilon = 1e-9
			if got := utilization(pool, held); got < c.least-epsilon || got > c.most+epsilon || math.IsNaN(got) {
				t.Errorf("utilization with %d devices is %.3f, want %.3f to %.3f", c.n, got, c.least, c.most)
			}
		})
	}
}

// While only devices with counters are allocated, the Cluster Autoscaler ignores GPUs without
// counters, and vice versa. So either all devices of a node or none may consume counters.
func TestAllGPUsOrNoneHaveCounters(t *testing.T) {
	for policies, want := range map[string]bool{
		"": false, "static": false, "off": false,
		"{policy: static, rules: [{gpus: '0000:27:00.0', policy: dynamic}]}":                   false,
		"{policy: static, rules: [{gpus: '0000:26:00.0', policy: dynamic}]}":                   true,
		"{policy: 'off', rules: [{gpus: '0000:20:00.0', policy: adopt, profiles: [1g.10gb]}]}": true, "dynamic": true,
	} { // the last GPU has no MIG mode
		gpus := append(cards(t, h100, 7, 0), cards(t, "l40s-48gb", 8, 0)[7])
		sets, consumed := map[string]bool{}, map[string]bool{}
		for _, s := range published(t, policies, gpus) {
			for _, set := range s.SharedCounters {
				sets[set.Name] = true
			}
			for _, d := range s.Devices {
				if counted := len(d.ConsumesCounters) > 0; counted != want {
					t.Errorf("%q: %s consumes counters: %v", policies, d.Name, counted)
				}
				for _, c := range d.ConsumesCounters {
					consumed[c.CounterSet] = true
				}
			}
		}
		if n := len(sets); want && n != 8 || !want && n != 0 {
			t.Errorf("%q: %d GPUs have counters", policies, n)
		}
		if diff := cmp.Diff(sets, consumed); diff != "" {
			t.Errorf("%q: published and consumed sets: %s", policies, diff)
		}
	}
}

// Kueue charges a quota by a counter that the admin names: memory, in Kueue's example for NVIDIA
// GPUs. It rejects a workload if a matching device lacks that counter, so every device must have
// it. Without counters Kueue counts devices. https://github.com/kubernetes-sigs/kueue/pull/10283
func TestKueueFindsMemoryInEveryDevice(t *testing.T) {
	for _, key := range []string{h100, a100} {
		const counter = "memory"
		pool := published(t, "dynamic", inMIGMode(cards(t, key, 8, 0)))
		totals, small := map[string]int64{}, map[string]int64{}
		for _, s := range pool {
			for _, set := range s.SharedCounters {
				c := set.Counters[counter]
				totals[set.Name] = c.Value.Value()
				if c.Value.Format != "BinarySI" {
					t.Errorf("%s: memory of %s is %s", key, set.Name, c.Value.String())
				}
			}
			for _, d := range s.Devices {
				if len(d.ConsumesCounters) != 1 {
					t.Fatalf("%s: %s consumes %v", key, d.Name, d.ConsumesCounters)
				}
				c, has := d.ConsumesCounters[0].Counters[counter]
				capacity := d.Capacity[counter].Value
				if !has || c.Value.Cmp(capacity) != 0 {
					t.Errorf("%s: %s is charged %s, and has %s", key, d.Name, c.Value.String(), capacity.String())
				}
				if *d.Attributes["type"].StringValue == "gpu" && c.Value.Value() != totals[d.Name] {
					t.Errorf("%s: %s takes %s of %d", key, d.Name, c.Value.String(), totals[d.Name])
				}
				if p := d.Attributes["profile"].StringValue; p != nil && *p == "1g.10gb" {
					small[d.ConsumesCounters[0].CounterSet] = 7 * c.Value.Value()
				}
			}
		}
		for set, seven := range small {
			if seven <= 0 || seven > totals[set] {
				t.Errorf("%s: seven small partitions take %d of %d", key, seven, totals[set])
			}
		}
		if len(totals) != 8 || len(small) != 8 {
			t.Errorf("%s: %d sets, %d GPUs with small partitions", key, len(totals), len(small))
		}
		devices := 0
		for _, s := range published(t, "static", cards(t, key, 8, 0)) {
			devices += len(s.Devices)
			if len(s.SharedCounters) > 0 {
				t.Errorf("%s: slices have counters under static", key)
			}
		}
		if devices != 8 {
			t.Errorf("%s: under static Kueue counts %d devices", key, devices)
		}
	}
}

// The KAI scheduler up to 0.17 disables partitionable devices in the allocator, which then skips
// every device that consumes counters. So it must get whole GPUs under every policy but dynamic.
// https://github.com/NVIDIA/KAI-Scheduler/issues/2100
func TestKAIAllocatesWholeGPUsUnderStatic(t *testing.T) {
	for policies, want := range map[string]int{"": 8, "static": 8, "off": 8, "dynamic": 0} {
		s := newScheduler(published(t, policies, cards(t, h100, 8, 0)))
		s.Features.PartitionableDevices = false
		if got := allocate(t, s, scheduler.NewTaken(), isGPU, 9); len(got) != want {
			t.Errorf("%q: allocated %d whole GPUs, want %d", policies, len(got), want)
		}
	}
}

// The Cluster Autoscaler makes the template of a node group from one of the group's nodes. So nodes
// of one GPU model and one policy must have the same counter sets.
// https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/docs/dra_support.md
func TestNodesOfAGroupHaveEqualCounterSets(t *testing.T) {
	sets := func(policies string, node int) map[string]map[string]resourceapi.Counter {
		all := map[string]map[string]resourceapi.Counter{}
		for _, s := range published(t, policies, inMIGMode(cards(t, h100, 8, node))) {
			for _, set := range s.SharedCounters {
				all[set.Name] = maps.Clone(set.Counters)
			}
		}
		return all
	}
	for policies, want := range map[string]int{
		"static": 0, "dynamic": 8, "{policy: dynamic, profiles: [1g.10gb]}": 8,
		"{policy: static, rules: [{gpus: '0000:20:00.0', policy: dynamic}]}": 8,
	} {
		first := sets(policies, 1)
		if diff := cmp.Diff(first, sets(policies, 2)); diff != "" || len(first) != want {
			t.Errorf("%q: %d sets; %s", policies, len(first), diff)
		}
	}
}

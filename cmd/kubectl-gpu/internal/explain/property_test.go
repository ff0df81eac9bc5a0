package explain

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fleettest"
)

var (
	clusters = flag.Int("clusters", 25, "number of random clusters")
	seed     = flag.Uint64("seed", 1, "the first seed: a seed always gives the same cluster")
)

func snapshotOf(c *fleettest.Cluster) *fleet.Snapshot {
	return &fleet.Snapshot{
		Version: "v1.37.0", Nodes: c.Nodes, Slices: c.Slices, Claims: c.Claims, Classes: c.Classes, Pods: c.Pods,
	}
}

// Applying a remedy makes the claim fit, and no part of a remedy can be left out. The changes are
// made in the objects, as a user would, and everything is read anew.
func TestRemediesMakeClaimsFit(t *testing.T) {
	if testing.Short() {
		*clusters = min(*clusters, 10)
	}
	waiting, remedies, parts := 0, 0, 0
	for n := range uint64(*clusters) {
		r := rand.New(rand.NewPCG(*seed+n, 0))
		s := randomCluster(r)
		report, err := New(s).Pod(t.Context(), fleettest.Namespace, "p")
		if err != nil {
			t.Fatalf("seed %d: %v", *seed+n, err)
		}
		fitting := slices.ContainsFunc(report.Nodes, func(n Node) bool { return n.Fits })
		if expected := fitting && len(report.Reasons) == 0; expected != (report.State == Fits) {
			t.Errorf("seed %d: state %s, but a node fits: %v", *seed+n, report.State, fitting)
		}
		if report.State != Waits && report.State != Blocked {
			continue
		}
		waiting++
		for _, node := range report.Nodes {
			if !node.Fits && len(node.Reasons) == 0 {
				t.Errorf("seed %d: node %s has no reason", *seed+n, node.Name)
			}
		}
		for _, remedy := range report.Remedies {
			remedies++
			if !fitsAfter(t.Context(), s, remedy.Node, remedy.Changes) {
				t.Errorf("seed %d: %s does not make it fit", *seed+n, text(remedy))
			}
			for i := range remedy.Changes {
				parts++
				if fitsAfter(t.Context(), s, remedy.Node, slices.Delete(slices.Clone(remedy.Changes), i, i+1)) {
					t.Errorf("seed %d: %s fits without %s", *seed+n, text(remedy), remedy.Changes[i].Sentence)
				}
			}
		}
		if report.State == Waits && len(report.Remedies) == 0 && movable(s, report) {
			t.Errorf("seed %d: no remedy, but the empty node fits", *seed+n)
		}
	}
	t.Logf("%d clusters, %d waiting, %d remedies with %d parts", *clusters, waiting, remedies, parts)
	if waiting < *clusters/4 || remedies < waiting/2 {
		t.Errorf("only %d of %d clusters have a waiting claim, with %d remedies", waiting, *clusters, remedies)
	}
}

func text(r Remedy) string {
	var all []string
	for _, c := range r.Changes {
		all = append(all, c.Sentence)
	}
	return r.Node + ": " + strings.Join(all, ", and ")
}

// movable reports whether the claim fits on a node that has no claims and no taints at all.
func movable(s *fleet.Snapshot, report *Report) bool {
	empty := *s
	empty.Claims = slices.DeleteFunc(slices.Clone(s.Claims), func(c *resourceapi.ResourceClaim) bool { return c.Name != "want" })
	e := New(&empty)
	for _, n := range report.Nodes {
		if !n.closed && e.fits(context.Background(), report.question, n.node, scenario{claims: report.question.open}) {
			return true
		}
	}
	return false
}

// fitsAfter makes the changes in a copy of the snapshot and reports whether the node fits.
func fitsAfter(ctx context.Context, s *fleet.Snapshot, node string, changes []Change) bool {
	changed := *s
	changed.Claims, changed.Nodes, changed.Pods = slices.Clone(s.Claims), slices.Clone(s.Nodes), slices.Clone(s.Pods)
	for _, c := range changes {
		switch c.Kind {
		case Free:
			changed.Claims = slices.DeleteFunc(changed.Claims, func(o *resourceapi.ResourceClaim) bool { return key(o) == c.Claim })
		case OpenNode:
			for i, n := range changed.Nodes {
				if n.Name == node {
					changed.Nodes[i] = n.DeepCopy()
					changed.Nodes[i].Spec.Unschedulable = false
				}
			}
		default:
			for i, o := range changed.Claims {
				if key(o) == c.Claim {
					changed.Claims[i] = o.DeepCopy()
					c.ApplyTo(&changed.Claims[i].Spec.Devices)
				}
			}
		}
	}
	report, err := New(&changed).Pod(ctx, fleettest.Namespace, "p")
	return err == nil && report.State == Fits && slices.ContainsFunc(report.Nodes, func(n Node) bool { return n.Name == node && n.Fits })
}

var profiles = map[string][]string{
	fleettest.H100: {"1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"},
	fleettest.A30:  {"1g.6gb", "2g.12gb", "4g.24gb"},
}

// randomCluster returns one to three nodes, filled at random by the allocator, and the Pod p, whose
// claim "want" is not allocated.
func randomCluster(r *rand.Rand) *fleet.Snapshot {
	c := fleettest.New()
	for i := range 1 + r.IntN(3) {
		key := []string{fleettest.H100, fleettest.H100, fleettest.A30}[r.IntN(3)]
		policy := []string{"static", "dynamic"}[r.IntN(2)]
		shares := []string{"", "", "[{kind: fractions}]", "[{kind: shares, count: 3}]"}[r.IntN(4)]
		name := fmt.Sprintf("n%d", i)
		node := c.Node(name, key, 1+r.IntN(3), policy, shares)
		node.Spec.Unschedulable = r.IntN(8) == 0
		for r.IntN(3) == 0 {
			slice := c.Slices[len(c.Slices)-1]
			d := slice.Spec.Devices[r.IntN(len(slice.Spec.Devices))]
			c.Taint(name, d.Name, "gpu.nvidia.com/xid", fmt.Sprint(r.IntN(100)), resourceapi.DeviceTaintEffectNoSchedule)
		}
	}
	for i := range r.IntN(25) {
		claim := c.Claim(fmt.Sprintf("held-%d", i), randomRequest(r, "gpu"))
		place(c, claim, c.Nodes[r.IntN(len(c.Nodes))])
	}
	want := c.Claim("want", randomRequest(r, "gpu"))
	if r.IntN(3) == 0 {
		want.Spec.Devices.Requests = append(want.Spec.Devices.Requests, randomRequest(r, "more"))
	}
	if r.IntN(4) == 0 {
		name := []resourceapi.FullyQualifiedName{"resource.kubernetes.io/pcieRoot", "gpu.nvidia.com/parentUUID"}[r.IntN(2)]
		want.Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: &name}}
	}
	c.Pod("p", "want")
	return snapshotOf(c)
}

func randomRequest(r *rand.Rand, name string) resourceapi.DeviceRequest {
	all := profiles[fleettest.H100]
	if r.IntN(3) == 0 {
		all = profiles[fleettest.A30]
	}
	profile := all[r.IntN(len(all))]
	request := fleettest.Request(name, "gpu.nvidia.com", 1+int64(r.IntN(4)/2))
	switch r.IntN(5) {
	case 0, 1:
		request = fleettest.Request(name, "mig.nvidia.com", 1+int64(r.IntN(4)/2), fleettest.IsProfile(profile))
	case 2:
		request = fleettest.Request(name, "shared.gpu.nvidia.com", 1)
		if r.IntN(2) == 0 {
			request.Exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
				Expression: "device.attributes['gpu.nvidia.com'].sharing == 'MPS'",
			}}}
			request.Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
				"memory": resource.MustParse(fmt.Sprintf("%dGi", 1+r.IntN(60))),
			}}
		}
	case 3:
		if r.IntN(3) == 0 {
			request.Exactly.AllocationMode, request.Exactly.Count = resourceapi.DeviceAllocationModeAll, 0
		} else if r.IntN(3) == 0 {
			first := fleettest.Alternative("first", "gpu.nvidia.com", 1)
			request = resourceapi.DeviceRequest{Name: name, FirstAvailable: []resourceapi.DeviceSubRequest{
				first, fleettest.Alternative("second", "mig.nvidia.com", 1, fleettest.IsProfile(profile)),
			}}
		}
	}
	return request
}

// place allocates the claim on the node, if it fits there.
func place(c *fleettest.Cluster, claim *resourceapi.ResourceClaim, node *corev1.Node) {
	results, err := New(snapshotOf(c)).allocate(context.Background(), node, scenario{claims: []*resourceapi.ResourceClaim{claim}})
	if err != nil || len(results) == 0 {
		c.Claims = c.Claims[:len(c.Claims)-1]
		return
	}
	claim.Status.Allocation = ptr.To(results[0])
}

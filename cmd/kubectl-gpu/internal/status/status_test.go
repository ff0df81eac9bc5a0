package status_test

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/status"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fleettest"
)

const id1g, id3g = 19, 9 // profile IDs of an H100

func fleetOf(c *fleettest.Cluster) *fleet.Snapshot {
	return &fleet.Snapshot{Nodes: c.Nodes, Slices: c.Slices, Claims: c.Claims, Classes: c.Classes, Pods: c.Pods}
}

func text(s *fleet.Snapshot, node string, detail bool) string {
	var b strings.Builder
	status.Of(s, node).Text(&b, detail)
	return b.String()
}

func TestNodeIsDrawn(t *testing.T) {
	c := fleettest.New()
	c.Node("n1", fleettest.H100, 3, "dynamic", "")
	c.Held("half", "n1", fleettest.Device(0, id3g, 0))
	c.Held("tiny", "n1", fleettest.Device(0, id1g, 6))
	c.Held("whole", "n1", fleettest.Device(1))
	c.Pods = c.Pods[1:] // the claim half has no Pod
	c.Taint("n1", fleettest.Device(2), "gpu.nvidia.com/xid", "79", resourceapi.DeviceTaintEffectNoSchedule)
	want := `n1
  gpu-0000-10-00-0  [aaaa..b.]  NVIDIA H100 80GB HBM3, free: 2g.20gb
      a  3g.40gb: team-a/half, which no Pod uses
      b  1g.10gb: team-a/tiny
  gpu-0000-11-00-0  [aaaaaaaa]  NVIDIA H100 80GB HBM3, free: -
      a  GPU: team-a/whole
  gpu-0000-12-00-0  [........]  NVIDIA H100 80GB HBM3, free: 7g.80gb
      taint gpu.nvidia.com/xid=79:NoSchedule

Nodes without a free GPU, and the claims to move for one
  n1, gpu-0000-10-00-0: team-a/half, team-a/tiny
`
	if got := text(fleetOf(c), "n1", true); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestSharersAreListed(t *testing.T) {
	c := fleettest.New()
	c.Node("n1", fleettest.H100, 1, "static", "[{kind: fractions}]")
	c.HeldShare("a", "n1", fleettest.Device(0)+"-share", "memory=10Gi")
	c.HeldShare("b", "n1", fleettest.Device(0)+"-share", "memory=10Gi")
	got := text(fleetOf(c), "", true)
	for _, want := range []string{
		"[bbbbbbbb]", "a  share of GPU with memory 10Gi: team-a/a", "b  share of GPU with memory 10Gi: team-a/b",
		"free: share of GPU with cores 100, memory 59776Mi\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("lacks %q:\n%s", want, got)
		}
	}
}

func TestSharesThatAreUsedUp(t *testing.T) {
	c := fleettest.New()
	c.Node("n1", fleettest.H100, 1, "static", "[{kind: shares, count: 2}]")
	c.HeldShare("a", "n1", fleettest.Device(0)+"-share", "shares=1")
	if got := text(fleetOf(c), "", true); !strings.Contains(got, "free: share of GPU with shares 1\n") {
		t.Errorf("one share is left:\n%s", got)
	}
	c.HeldShare("b", "n1", fleettest.Device(0)+"-share", "shares=1")
	if got := text(fleetOf(c), "", true); !strings.Contains(got, "free: -\n") {
		t.Errorf("no share is left:\n%s", got)
	}
}

// A GPU for virtual machines counts as a whole one.
func TestGPUForVirtualMachines(t *testing.T) {
	c := fleettest.New()
	c.Node("n1", fleettest.H100, 2, "static", "")
	for i := range c.Slices[0].Spec.Devices {
		c.Slices[0].Spec.Devices[i].Attributes["type"] = resourceapi.DeviceAttribute{StringValue: ptr.To("vfio")}
	}
	c.Held("vm", "n1", fleettest.Device(0))
	got := text(fleetOf(c), "n1", true)
	for _, want := range []string{"a  GPU for a virtual machine: team-a/vm", "free: GPU for a virtual machine"} {
		if !strings.Contains(got, want) {
			t.Errorf("lacks %q:\n%s", want, got)
		}
	}
	if r := status.Of(fleetOf(c), ""); r.Nodes[0].Free != 1 {
		t.Errorf("%d GPUs are free, want 1", r.Nodes[0].Free)
	}
}

// Without the right to read Pods, a claim's reservation shows its users.
func TestUsersOfClaimsWithoutPods(t *testing.T) {
	c := fleettest.New()
	c.Node("n1", fleettest.H100, 1, "static", "")
	c.Held("train", "n1", fleettest.Device(0))
	s := fleetOf(c)
	s.Pods, s.Missing = nil, []string{"Pods: forbidden"}
	if got := text(s, "n1", true); !strings.Contains(got, "a  GPU: team-a/train\n") {
		t.Errorf("got\n%s", got)
	}
}

func TestTableOfNodes(t *testing.T) {
	c := fleettest.New()
	c.Node("n1", fleettest.H100, 2, "static", "").Spec.Unschedulable = true
	c.Node("n2", fleettest.L40S, 1, "static", "")
	c.PlainNode("cpu")
	c.Held("train", "n1", fleettest.Device(0))
	want := `NODE   GPUS   FREE   CLAIMS   TAINTED   LARGEST FREE   NOTE
n1     2      1      1        0         GPU            cordoned
n2     1      1      0        0         GPU
`
	if got := strings.ReplaceAll(text(fleetOf(c), "", false), "GPU            \n", "GPU\n"); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if got := text(&fleet.Snapshot{}, "", false); !strings.Contains(got, "kubectl gpu doctor") {
		t.Errorf("an empty fleet: %s", got)
	}
}

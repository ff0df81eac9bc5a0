package driver

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

func (n *node) baseSpec(t *testing.T) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(n.cfg.CDIRoot, "k8s.gpu.nvidia.com-base.json"))
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// installed returns the scan of a node whose driver has this version. Containers get it in their
// environment.
func installed(version string) func() (nvidia.Node, error) {
	return func() (nvidia.Node, error) {
		all, err := twoGPUs()
		all.Driver.Version, all.Common.Env = version, []string{"DRIVER=" + version}
		return all, err
	}
}

// Containers of running Pods restart with the base spec that is on disk. While NVIDIA's driver is
// away, no scan can make a better one, also if the node has GPUs that virtual machines can use.
func TestBaseSpecStaysWhileTheDriverIsAway(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	n.run(t)
	n.register(t)
	if msg := n.prepare(t, n.claim(t, "runs", firstGPU)).GetError(); msg != "" {
		t.Fatal(msg)
	}
	good := n.baseSpec(t)
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	n.setHardware("away", func() (nvidia.Node, error) {
		return nvidia.Node{}, &nvidia.NotReadyError{Reason: "no driver", Passthrough: []device.GPU{{
			PCIAddress: "0000:43:00.0", Passthrough: &device.Passthrough{BoundByAdmin: true, HasDriver: true},
		}}}
	})
	n.editNode(t, nil, map[string]string{passthroughAnnotation: "true"})
	n.startPlugin(t)
	eventually(t, "the node has a GPU for virtual machines", func() bool {
		return n.driver.node.View().Inventory.Ready
	})
	n.driver.host.Check(t.Context())
	n.driver.reconciler.Wake()
	if now := n.baseSpec(t); now != good {
		t.Errorf("the base spec is %s, want %s", now, good)
	}
	n.setHardware("back", installed("590.48.01"))
	eventually(t, "the base spec is that of the new driver", func() bool { return strings.Contains(n.baseSpec(t), "DRIVER=590.48.01") })
}

// An instance of another version may write other edits for the same driver. Only the leader's
// replace a good spec.
func TestOnlyTheLeaderReplacesAGoodBaseSpec(t *testing.T) {
	t.Parallel()
	r := newHandover(t)
	of := func(n *healthNode) bool { return strings.Contains(r.older.baseSpec(t), "DRIVER="+n.cfg.PodUID) }
	r.older.setHardware("older", installed(r.older.cfg.PodUID))
	eventually(t, "the leader writes the spec", func() bool { return of(r.older) })
	r.newer.setHardware("newer", installed(r.newer.cfg.PodUID))
	r.newer.startPlugin(t)
	r.newer.driver.node.Report(nodeview.Condition{Source: "test", Code: "test", Message: "nothing to publish yet"})
	eventually(t, "the newer instance has scanned", func() bool { return r.newer.driver.inv.Snapshot().Ready })
	check := func(n *healthNode) {
		t.Helper()
		want := r.older.baseSpec(t)
		n.driver.host.Check(t.Context())
		if now := r.older.baseSpec(t); now != want {
			t.Errorf("the instance that does not lead made the base spec %s, want %s", now, want)
		}
	}
	if check(r.newer); !of(r.older) {
		t.Error("the spec is not the leader's")
	}
	r.newer.driver.node.Clear("test")
	eventually(t, "the newer instance takes over", r.older.driver.host.leader.NewerLeads)
	eventually(t, "the new leader writes the spec", func() bool { return of(r.newer) })
	check(r.older)
	prepare := func(name, device string) {
		t.Helper()
		r.older.claim(t, name, device)
		c, err := r.older.client.ResourceV1().ResourceClaims("team").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second time as a repeated call
			if answer, err := r.older.driver.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{c}); err != nil ||
				answer[c.UID].Err != nil {
				t.Errorf("%s: %v, %v", name, err, answer[c.UID].Err)
			}
		}
	}
	if prepare("good", firstGPU); !of(r.newer) {
		t.Errorf("Prepare of the older instance made the base spec %s", r.older.baseSpec(t))
	}
	if err := os.Remove(filepath.Join(r.older.cfg.CDIRoot, "k8s.gpu.nvidia.com-base.json")); err != nil {
		t.Fatal(err)
	}
	if prepare("missing", secondGPU); r.older.baseSpec(t) == "" {
		t.Error("Prepare succeeds without a base spec")
	}
}

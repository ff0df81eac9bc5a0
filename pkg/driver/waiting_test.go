package driver

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/quiesce"
)

// lockUntil locks a claim, and a GPU if one is given, until the caller calls release.
func (n *healthNode) lockUntil(t *testing.T, uid types.UID, gpus ...string) (release func()) {
	t.Helper()
	guard, err := n.driver.preparer.LockClaim(t.Context(), uid)
	if err == nil && len(gpus) > 0 {
		err = prepare.LockGPUs(t.Context(), guard, gpus...)
	}
	if err != nil {
		t.Fatal(err)
	}
	return guard.Release
}

// Prepare may wait for a lock or for another claim. What the node says about the device by then
// counts, not what it said when the call arrived.
func TestWaitingPrepareAsksNode(t *testing.T) {
	t.Parallel()
	reach := func(r device.Reach) func(*testing.T, *healthNode) {
		return func(t *testing.T, n *healthNode) {
			n.send(device.Signal{Condition: &device.Condition{Card: n.card("0000:1b:00.0"), Reach: r, At: time.Now()}})
			eventually(t, "the verdict is known", func() bool {
				g := n.driver.inv.Snapshot().Node.GPUs[0].GPU
				return n.driver.health.View().Of(g, device.Name{GPU: firstGPU}).Unreachable() != ""
			})
		}
	}
	release := func(t *testing.T, n *healthNode) {
		n.editNode(t, nil, map[string]string{passthroughAnnotation: "true", quiesce.Annotation: "true"})
		eventually(t, "the GPUs are released", func() bool { done, ok := n.driver.hardware.Use(); done(); return !ok })
	}
	reference := func(uid, gpu string) func(*testing.T, *healthNode) {
		return func(t *testing.T, n *healthNode) {
			n.writeCheckpoint(t, `{"v2":{"preparedClaims":{"`+uid+`":{"preparedDevices":[{"devices":[
				{"gpu":{"info":{"uuid":"GPU-`+gpu+`"},"device":{"DeviceName":"gpu-0"}}}],"configState":{}}]}}}}`)
		}
	}
	machine := device.Name{GPU: firstGPU, Passthrough: true}.String()
	for name, c := range map[string]struct {
		device string
		change func(*testing.T, *healthNode)
		says   string
	}{
		"lost":         {firstGPU, reach(device.ReachLost), "lost"},
		"hangs":        {firstGPU, reach(device.ReachWedged), "does not answer"},
		"released":     {firstGPU, release, "released for a driver upgrade"},
		"VM, released": {machine, release, "released for a driver upgrade"},
		"reference":    {firstGPU, reference("other", "0000:1b:00.0"), "NVIDIA's DRA driver prepared this GPU for claim other"},
		"its own UID":  {firstGPU, reference("uid-late", "0000:43:00.0"), "NVIDIA's DRA driver prepared it on this node as gpu-0"},
		"not ready": {firstGPU, func(_ *testing.T, n *healthNode) {
			n.driver.node.Report(nodeview.Condition{Source: "test", Code: "hook-missing", Message: "no hook"})
		}, "no hook"},
	} {
		for waits, begin := range map[string]func(*testing.T, *healthNode, *drapb.Claim) (end func()){
			"claim": func(t *testing.T, n *healthNode, late *drapb.Claim) func() {
				return n.lockUntil(t, types.UID(late.GetUid()))
			},
			"GPU": func(t *testing.T, n *healthNode, _ *drapb.Claim) func() { return n.lockUntil(t, "another", firstGPU) },
			"conflict": func(t *testing.T, n *healthNode, _ *drapb.Claim) func() {
				first := n.claim(t, "first", firstGPU)
				if msg := n.prepare(t, first).GetError(); msg != "" {
					t.Fatal(msg)
				}
				return func() {
					if msg := n.unprepare(t, first); msg != "" {
						t.Error(msg)
					}
				}
			},
		} {
			t.Run(name+"/"+waits, func(t *testing.T) {
				t.Parallel()
				n := newHealthNode(t)
				n.setHardware("driver", func() (nvidia.Node, error) {
					all, err := twoGPUs()
					for i := range all.GPUs {
						all.GPUs[i].Passthrough = &device.Passthrough{HasDriver: true}
					}
					return all, err
				})
				n.run(t)
				n.register(t)
				n.editNode(t, nil, map[string]string{passthroughAnnotation: "true"})
				eventually(t, "the device is offered", func() bool { return slices.Contains(published(t, n.client), c.device) })
				late := n.claim(t, "late", c.device)
				end := begin(t, n, late)
				answer := make(chan string, 1)
				go func() { answer <- n.prepare(t, late).GetError() }()
				eventually(t, "Prepare waits", func() bool { return n.metric(t, "gpu_dra_requests_in_flight operation=prepare") })

				c.change(t, n)
				end()
				if msg := <-answer; !strings.Contains(msg, c.says) {
					t.Errorf("Prepare says %q, not %q", msg, c.says)
				}
				if _, found, err := n.driver.preparer.Records.Load(types.UID(late.GetUid())); found || err != nil {
					t.Errorf("a record is left: %v, %v", found, err)
				}
			})
		}
	}
}

// A claim keeps its device when the GPU is lost while a repeated Prepare waits.
func TestRepeatedPrepareKeepsGPULostMeanwhile(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	n.run(t)
	n.register(t)
	held := n.claim(t, "held", firstGPU)
	if msg := n.prepare(t, held).GetError(); msg != "" {
		t.Fatal(msg)
	}
	unlock := n.lockUntil(t, "another", firstGPU)
	answer := make(chan string, 1)
	go func() { answer <- n.prepare(t, held).GetError() }()
	eventually(t, "Prepare waits", func() bool { return n.metric(t, "gpu_dra_requests_in_flight operation=prepare") })
	n.send(device.Signal{Condition: &device.Condition{Card: n.card("0000:1b:00.0"), Reach: device.ReachLost, At: time.Now()}})
	eventually(t, "it is tainted", func() bool { return strings.HasPrefix(n.taints(t)[firstGPU], "gpu.nvidia.com/gpu-lost=") })
	unlock()
	if msg := <-answer; msg != "" {
		t.Errorf("the claim that has it is refused: %s", msg)
	}
}

// Only a claim whose preparation is finished has its GPU. Another one must not get a lost GPU, even
// if it has a record.
func TestUnfinishedClaimDoesNotGetLostGPU(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*testing.T, *healthNode, checkpoint.Record){
		"unfinished": func(t *testing.T, n *healthNode, r checkpoint.Record) {
			r.State = checkpoint.Preparing
			if err := n.driver.preparer.Records.Save(r); err != nil {
				t.Fatal(err)
			}
		},
		"unreadable": func(t *testing.T, n *healthNode, _ checkpoint.Record) {
			path := filepath.Join(n.cfg.StateDir(), "claims", "uid-c_"+firstGPU+".json")
			if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newHealthNode(t)
			n.run(t)
			n.register(t)
			c := n.claim(t, "c", firstGPU)
			if msg := n.prepare(t, c).GetError(); msg != "" {
				t.Fatal(msg)
			}
			r, found, err := n.driver.preparer.Records.Load("uid-c")
			if !found || err != nil {
				t.Fatal(found, err)
			}
			n.send(device.Signal{Condition: &device.Condition{Card: n.card("0000:1b:00.0"), Reach: device.ReachLost, At: time.Now()}})
			eventually(t, "it is tainted", func() bool { return strings.HasPrefix(n.taints(t)[firstGPU], "gpu.nvidia.com/gpu-lost=") })
			spoil(t, n, r)
			if msg := n.prepare(t, c).GetError(); !strings.Contains(msg, "lost") {
				t.Errorf("Prepare says %q", msg)
			}
			if moved, err := os.ReadDir(filepath.Join(n.cfg.StateDir(), "quarantine")); err != nil || len(moved) > 0 {
				t.Errorf("the record of a refused claim was moved: %v, %v", moved, err)
			}
		})
	}
}

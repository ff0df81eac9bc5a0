package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// The nodes of TestUnreadyNode.
const (
	sound  = "sound"
	broken = "broken"

	notReadyKey = "gpu.nvidia.com/not-ready"
)

// noticedWithin limits the time until the plugin notices a broken CDI hook or container runtime.
// The plugin checks both once a minute.
const noticedWithin = 75 * time.Second

// TestUnreadyNode expects that a node that cannot serve claims keeps new claims away, reports the
// reason, and accepts claims again once it can.
func TestUnreadyNode(t *testing.T) {
	t.Parallel()
	sim := simulator(t)
	w := start(t, "e2e-unready", sim.Node(sound, "dgx-h100"), sim.Node(broken, "dgx-h100"))
	for _, node := range []string{sound, broken} {
		w.offersShapes(t, node, 8, 200)
	}

	t.Run("a container runtime that ignores CDI", w.testRuntimeLosesCDI)
	t.Run("other causes", func(t *testing.T) {
		// The plugin takes a minute to notice a missing CDI hook. So one node has only that cause, and
		// the other node all other causes meanwhile.
		parts := map[string]func(*testing.T){}
		for node, causes := range map[string][]cause{sound: {hookGone(w)}, broken: otherCauses(w)} {
			parts[node] = func(t *testing.T) {
				for _, c := range causes {
					t.Run(c.name, func(t *testing.T) { w.testCause(t, node, c) })
				}
			}
		}
		sideBySide(t, parts)
	})
	t.Run("both nodes serve again and nothing is left", func(t *testing.T) {
		u := w.tenant(t)
		u.gpus(8)
		for _, node := range []string{sound, broken} {
			u.holder("all-of-"+node, 8, onNode(node))
		}
		u.running("all-of-"+sound, "all-of-"+broken)
		w.endPods(t, u.namespace)
		w.clean(t, sound)
		w.clean(t, broken)
	})
}

// notReady returns the taint that the driver puts on every device of a node that cannot serve. code
// names the reason.
func notReady(code string) string { return notReadyKey + "=" + code + ":NoSchedule" }

// tolerant creates a template, named tolerant, of a claim for a GPU that tolerates the taint of a
// node that cannot serve.
func (u tenant) tolerant() {
	u.t.Helper()
	u.template("tolerant", `
requests:
- name: gpu
  exactly:
    deviceClassName: gpu.nvidia.com
    tolerations: [{key: `+notReadyKey+`, operator: Exists, effect: NoSchedule}]`)
}

// keepsAway waits until every device of a node has the taint notReady(code), and returns how long
// that took.
func (w *world) keepsAway(t *testing.T, node, code string, within time.Duration) time.Duration {
	t.Helper()
	want := notReady(code)
	what := fmt.Sprintf("all devices of node %s have the taint %s", node, want)
	return eventually(t, within, what, func() (bool, string) {
		tainted, taints := 0, w.taints(t, node)
		for _, of := range taints {
			if slices.Contains(of, want) {
				tainted++
			}
		}
		devices := len(w.devices(t, node))
		state := fmt.Sprintf("%d of %d devices have it; the first GPU has %q", tainted, devices, taints[firstGPU])
		return tainted == devices && devices == 208, state
	})
}

// firstGPU is the name of a GPU that both nodes have.
const firstGPU = "gpu-0000-1b-00-0"

// takesAll waits until no device of a node has a taint that keeps claims away, so that the node can
// get any claim.
func (w *world) takesAll(t *testing.T, node string) {
	t.Helper()
	eventually(t, 30*time.Second, "no device of node "+node+" keeps claims away", func() (bool, string) {
		for device, taints := range w.taints(t, node) {
			for _, taint := range taints {
				if !strings.HasSuffix(taint, ":None") {
					return false, device + " has " + taint
				}
			}
		}
		return true, ""
	})
}

// setCDI enables or disables CDI in the container runtime of a node and restarts the runtime.
func (w *world) setCDI(t *testing.T, node string, on bool) {
	t.Helper()
	w.on(t, node, "sed", "-i", fmt.Sprintf("s/enable_cdi = .*/enable_cdi = %t/", on), "/etc/containerd/config.toml")
	if err := w.node(t, node).RestartContainerd(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func (w *world) testRuntimeLosesCDI(t *testing.T) {
	u := w.tenant(t)
	u.gpus(1)
	// Allocate this claim by hand: the scheduler checks no taints for a claim that already has its
	// device.
	w.handAllocate(t, u.namespace, "allocated", broken, firstGPU)
	u.tolerant()
	w.setCDI(t, broken, false)
	w.saysWhyNot(t, broken, cdiIsOff)

	t.Run("taints every device at once", func(t *testing.T) { w.keepsAway(t, broken, "cdi-disabled", 5*time.Second) })
	t.Run("moves a Deployment to the other node", func(t *testing.T) { w.testDeploymentAvoids(u.as(t)) })
	t.Run("is reported in the Events of bound Pods", func(t *testing.T) {
		u := u.as(t)
		u.pod("bound", onNode(broken), fromClaim("gpu", "allocated"))
		u.pod("tolerant", onNode(broken), fromTemplate("gpu", "tolerant"))
		for _, pod := range []string{"bound", "tolerant"} {
			w.refused(t, u.namespace, pod, cdiIsOff, "enable_cdi = true")
		}
	})
	w.setCDI(t, broken, true)
	t.Run("all Pods start once CDI is back", func(t *testing.T) {
		w.takesAll(t, broken)
		u.as(t).running("bound", "tolerant")
	})
	w.endPods(t, u.namespace)
}

// testDeploymentAvoids runs eight Pods with a GPU each. Both nodes have GPUs for them, but all must
// run on the sound node.
func (w *world) testDeploymentAvoids(u tenant) {
	t := u.t
	u.apply(t, u.namespace, `
apiVersion: apps/v1
kind: Deployment
metadata: {name: eight}
spec:
  replicas: 8
  selector: {matchLabels: {app: eight}}
  template:
    metadata: {labels: {app: eight}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: main
        image: `+cluster.TestImage+`
        imagePullPolicy: Never
        command: [sh, -c, "trap 'exit 0' TERM; sleep infinity & wait"]
        resources: {claims: [{name: gpu}]}
      resourceClaims: [{name: gpu, resourceClaimTemplateName: `+gpusTemplate(1)+`}]`)
	eventually(t, 30*time.Second, "eight replicas run on node "+sound, func() (bool, string) {
		list, err := w.Client.CoreV1().Pods(u.namespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app=eight"})
		if err != nil {
			return false, err.Error()
		}
		ready := map[string]int{}
		for i := range list.Items {
			if p := &list.Items[i]; isReady(p) {
				ready[p.Spec.NodeName]++
			}
		}
		return ready[sound] == 8, fmt.Sprintf("%d Pods, ready by node: %v", len(list.Items), ready)
	})
	err := w.Client.AppsV1().Deployments(u.namespace).Delete(t.Context(), "eight", metav1.DeleteOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

// cause is a reason why a node cannot serve claims. The function begin creates it on a node and the
// function end removes it.
type cause struct {
	name string
	// code is the taint's value. says is a part of the texts of Events and readiness.
	code, says string
	// taintedWithin is how soon the taint must appear. notBefore is how long the driver must wait
	// before it adds the taint, in case the cause passes.
	taintedWithin, notBefore time.Duration
	begin, end               func(t *testing.T, node string)
}

// hookGone is the cause that the CDI hook is missing. It puts a directory in the place of the hook,
// because the plugin would otherwise install the hook again.
func hookGone(w *world) cause {
	return cause{
		name: "a hook that cannot run", code: "hook-missing", says: "hook", taintedWithin: noticedWithin,
		begin: func(t *testing.T, node string) {
			w.on(t, node, "sh", "-c", "hook=$(ls "+cdiHook+") && rm $hook && mkdir -p $hook/full")
		},
		end: func(t *testing.T, node string) { w.on(t, node, "sh", "-c", "rm -r "+cdiHook) },
	}
}

func otherCauses(w *world) []cause {
	return []cause{
		{
			name: "an NVIDIA driver that is gone", code: "driver-missing", says: "the NVIDIA kernel module is not loaded",
			taintedWithin: 45 * time.Second, notBefore: 25 * time.Second,
			begin: func(t *testing.T, node string) { w.nvmlsim(t, node, "driver", "away", "--force") },
			end:   func(t *testing.T, node string) { w.nvmlsim(t, node, "driver", "back") },
		}, {
			name: "GPUs released by the annotation", code: "hardware-released", says: "released for a driver upgrade",
			taintedWithin: 10 * time.Second,
			begin:         w.patchNode(`{"metadata":{"annotations":{"gpu.nvidia.com/release-driver":"true"}}}`),
			end:           w.patchNode(`{"metadata":{"annotations":{"gpu.nvidia.com/release-driver":null}}}`),
		}, {
			name: "GPUs released by a label", code: "hardware-released", says: "released for a driver upgrade",
			taintedWithin: 10 * time.Second,
			begin:         w.patchNode(`{"metadata":{"labels":{"nvidia.com/gpu.deploy.client":"paused-for-driver-upgrade"}}}`),
			end:           w.patchNode(`{"metadata":{"labels":{"nvidia.com/gpu.deploy.client":"true"}}}`),
		}, {
			name: "a device plugin on the same node", code: "device-plugin", says: "nvidia.com/gpu=8", taintedWithin: 10 * time.Second,
			begin: w.patchNode(`{"status":{"capacity":{"nvidia.com/gpu":"8"}}}`, "status"),
			end:   w.patchNode(`{"status":{"capacity":{"nvidia.com/gpu":null}}}`, "status"),
		},
	}
}

// patchNode returns a function that begins or ends a cause by a patch of the Node.
func (w *world) patchNode(patch string, subresources ...string) func(t *testing.T, node string) {
	return func(t *testing.T, node string) {
		nodes := w.Client.CoreV1().Nodes()
		if _, err := nodes.Patch(t.Context(), node, types.MergePatchType, []byte(patch), metav1.PatchOptions{}, subresources...); err != nil {
			t.Fatal(err)
		}
	}
}

// testCause begins a cause on a node, checks that the node keeps claims away, and ends the cause. A
// Pod that waited for the node must run then.
func (w *world) testCause(t *testing.T, node string, c cause) {
	u := w.tenant(t)
	u.gpus(1)
	watch, since := w.watchSlices(t, node), time.Now()
	c.begin(t, node)
	took := w.keepsAway(t, node, c.code, c.taintedWithin)
	t.Logf("tainted after %s", took.Round(100*time.Millisecond))
	if took < c.notBefore {
		t.Errorf("the taint came after %s, want it no sooner than after %s", took, c.notBefore)
	}
	w.saysWhyNot(t, node, c.says)
	w.schedulerKnowsSlices(t)
	u.pod("waits", onNode(node), fromTemplate("gpu", gpusTemplate(1)))
	u.waits("waits")
	c.end(t, node)
	w.takesAll(t, node)
	u.running("waits")
	watch.alwaysOffered(8, since)
	w.endPods(t, u.namespace)
}

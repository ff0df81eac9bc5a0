package e2e

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// TestMigration moves users from NVIDIA's device plugin and from NVIDIA's DRA driver to this
// driver, and back, with the commands of docs/migration.md. Running Pods must continue.
func TestMigration(t *testing.T) {
	t.Parallel()
	sim := simulator(t)
	w := bringUp(t, "e2e-move", sim.Node("node1", "dgx-h100"), sim.Node("node2", "dgx-h100"))
	w.needSMI(t)
	w.while(t, "nvidia-device-plugin-ctr", func(node string) (func(), error) { return w.devicePlugin(t, node) })
	w.while(t, "nvidia-device-plugin", func(node string) (func(), error) { return w.devicePlugin(t, node) })
	w.while(t, "gpus", func(node string) (func(), error) { return w.referenceDriver(t, node) })

	// Each part needs the state in which the previous one ended, so a failure skips the rest.
	_ = t.Run("from the device plugin, node by node", w.testFromDevicePlugin) &&
		t.Run("with the GPU Operator's monitoring", w.testOperatorMonitoring) &&
		t.Run("from NVIDIA's DRA driver, with running Pods", w.testFromReference) &&
		t.Run("back to NVIDIA's DRA driver", w.testBackToReference) &&
		t.Run("with the GPU Operator and its DRA driver", w.testOperatorWithDRA) &&
		t.Run("with the GPU Operator and its device plugin", w.testOperatorWithDevicePlugin)
}

func (w *world) testFromDevicePlugin(t *testing.T) {
	g := w.guide(t, "From NVIDIA's device plugin")
	g.shell(g.dir, g.variables+`helm install "$OLD" "$OLD_CHART" --namespace "$OLD_NAMESPACE" --create-namespace --wait`)
	w.capacity(t, "node1", "8")
	w.capacity(t, "node2", "8")
	u := w.tenant(t)
	u.pod("stays", onNode("node2"), limits("1"), lasting)
	u.deployment("moves", "node1")
	u.running("stays")
	before := u.process("stays", "main")
	u.ready("moves")
	u.servedByPlugin("stays")

	g.do("Let a label say who serves a node")
	g.do("Install this driver")
	g.do("Move a node")
	u.servedHere(u.ready("moves"))
	u.pod("new", onNode("node2"), limits("1"))
	u.running("new")
	u.servedByPlugin("new")
	if after := u.process("stays", "main"); after != before {
		t.Errorf("the container of Pod stays was %s and is %s", before, after)
	}
	u.pod("claims", onNode("node2"), limits("9"))
	u.unschedulable("claims", "Insufficient nvidia.com/gpu")

	u.end("stays", "new", "claims")
	g.variables += "NODE=node2\n"
	g.do("Move a node")
	g.do("When the last node has moved")
	g.complete()
	u.pod("last", onNode("node2"), limits("1"))
	u.running("last")
	u.servedHere("last")
	for _, node := range []string{"node1", "node2"} {
		w.offers(t, node, 8)
	}
}

// servedByPlugin and servedHere fail the test unless a Pod got its GPU from the device plugin, or
// from this driver.
func (u tenant) servedByPlugin(pod string) {
	u.t.Helper()
	if s := u.get(pod).Status.ExtendedResourceClaimStatus; s != nil {
		u.t.Errorf("Pod %s has claim %s, want its GPU from the device plugin", pod, s.ResourceClaimName)
	}
	if got := u.sh(pod, "main", "echo $NVIDIA_VISIBLE_DEVICES"); !strings.HasPrefix(got, "GPU-") {
		u.t.Errorf("the device plugin gave Pod %s %q", pod, got)
	}
}

func (u tenant) servedHere(pod string) {
	u.t.Helper()
	if u.get(pod).Status.ExtendedResourceClaimStatus == nil {
		u.t.Errorf("Pod %s has no claim", pod)
	}
	if seen := u.visible(pod, "main"); len(seen) != 1 {
		u.t.Errorf("Pod %s sees %v, want one GPU", pod, seen)
	}
}

// capacity waits until the Node's allocatable nvidia.com/gpu, which a device plugin sets, is want.
func (w *world) capacity(t *testing.T, node, want string) {
	t.Helper()
	eventually(t, 30*time.Second, "the device plugin's GPUs of "+node, func() (bool, string) {
		n, err := w.Client.CoreV1().Nodes().Get(t.Context(), node, metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		got := n.Status.Allocatable["nvidia.com/gpu"]
		return got.String() == want, got.String()
	})
}

// deployment creates a Deployment of one Pod with a GPU on a node, so that a Pod that is evicted
// gets a successor.
func (u tenant) deployment(name, node string) {
	u.t.Helper()
	u.apply(u.t, u.namespace, `
apiVersion: apps/v1
kind: Deployment
metadata: {name: `+name+`}
spec:
  selector: {matchLabels: {app: `+name+`}}
  template:
    metadata: {labels: {app: `+name+`}}
    spec:
      terminationGracePeriodSeconds: 1
      nodeSelector: {kubernetes.io/hostname: `+node+`}
      containers:
      - name: main
        image: `+cluster.TestImage+`
        imagePullPolicy: Never
        command: [sh, -c, "trap 'exit 0' TERM; sleep infinity & wait"]
        resources: {limits: {nvidia.com/gpu: "1"}}`)
}

// ready waits until there is exactly one Pod with this app label and it is ready, and returns its
// name.
func (u tenant) ready(app string) (pod string) {
	u.t.Helper()
	eventually(u.t, time.Minute, "a Pod of "+app+" is ready", func() (bool, string) {
		list, err := u.Client.CoreV1().Pods(u.namespace).List(u.t.Context(), metav1.ListOptions{LabelSelector: "app=" + app})
		if err != nil {
			return false, err.Error()
		}
		if len(list.Items) != 1 {
			return false, fmt.Sprintf("%d Pods", len(list.Items))
		}
		pod = list.Items[0].Name
		return isReady(&list.Items[0]), pod + u.events(u.t, u.namespace, pod)
	})
	return pod
}

// process returns a text that identifies the current run of a container: it changes when the
// container is replaced or restarted.
func (u tenant) process(pod, container string) string {
	u.t.Helper()
	for _, c := range u.get(pod).Status.ContainerStatuses {
		if c.Name == container {
			return fmt.Sprintf("%s, restarted %d times", c.ContainerID, c.RestartCount)
		}
	}
	u.t.Fatalf("Pod %s has no container %s", pod, container)
	return ""
}

// testOperatorMonitoring runs the GPU Operator's monitoring claims, which use admin access, on a
// node whose GPUs another claim holds.
func (w *world) testOperatorMonitoring(t *testing.T) {
	u := w.tenant(t)
	u.gpus(8)
	u.holder("all", 8, onNode("node1"))
	held := u.holding("all")
	operator := w.tenant(t)
	w.kubectl(t, "label", "namespace", operator.namespace, "resource.kubernetes.io/admin-access=true")
	w.kubectl(t, "label", "node", "node1", "node2", "nvidia.com/gpu.deploy.client=true", "nvidia.com/gpu.deploy.dra-validator=true")
	w.apply(t, operator.namespace, operatorClaims)
	for app, sees := range map[string]int{"nvidia-dcgm-exporter": 8, "nvidia-operator-validator": 1} {
		for _, node := range []string{"node1", "node2"} {
			pod := operator.ready(app + ",node=" + node)
			if seen := operator.visible(pod, "main"); len(seen) != sees {
				t.Errorf("%s on %s sees %v, want %d GPUs", app, node, seen, sees)
			}
		}
	}

	w.paused(t, "node1", "nvidia.com/gpu.deploy.client")
	u.undisturbed(held)
	// The GPU Operator relies on a validator that starts again after a driver upgrade, so a new
	// validator must run.
	operator.end(operator.ready("nvidia-operator-validator,node=node1"))
	operator.apply(t, operator.namespace, operatorClaims)
	operator.ready("nvidia-operator-validator,node=node1")
	u.remove("all")
}

// paused sets a Node label as the GPU Operator does before a driver upgrade, and resets it as the
// Operator does after the upgrade. Every device must be tainted in between.
func (w *world) paused(t *testing.T, node, label string) {
	t.Helper()
	w.kubectl(t, "label", "node", node, label+"=paused-for-driver-upgrade", "--overwrite")
	w.allTainted(t, node, notReady("hardware-released"))
	w.kubectl(t, "label", "node", node, label+"=true", "--overwrite")
	w.takesAll(t, node)
}

// allTainted waits until every device of a node has the taint, given as KEY=VALUE:EFFECT.
func (w *world) allTainted(t *testing.T, node, taint string) {
	t.Helper()
	eventually(t, 30*time.Second, "every device of "+node+" has the taint "+taint, func() (bool, string) {
		taints := w.taints(t, node)
		for device := range w.devices(t, node) {
			if !slices.Contains(taints[device], taint) {
				return false, device + " has " + strings.Join(taints[device], " ")
			}
		}
		return true, ""
	})
}

func (w *world) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := w.Kubectl(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(out)
}

func (w *world) testFromReference(t *testing.T) {
	w.leave(t)
	g := w.guide(t, "From NVIDIA's DRA driver")
	g.shell(g.dir, g.variables+`helm install "$OLD" "$OLD_CHART" --namespace "$OLD_NAMESPACE" --create-namespace --wait`)
	for _, node := range []string{"node1", "node2"} {
		w.offers(t, node, 8)
	}
	u := w.tenant(t)
	u.gpus(1)
	u.holder("trainer", 1, onNode("node1"))
	u.running("trainer")
	before := u.process("trainer", "main")
	if got := u.sh("trainer", "main", "echo $REFERENCE_DEVICE"); got != "gpu-0\n" {
		t.Fatalf("NVIDIA's DRA driver gave the Pod %q", got)
	}
	classes := w.classes(t)

	g.do("Hold new Pods back")
	g.do("Switch the old driver's GPUs off")
	g.do("Hand the classes over")
	g.do("Install this driver")
	g.do("Let new Pods in")
	w.offers(t, "node1", 7)
	w.offers(t, "node2", 8)
	now := w.classes(t)
	for class, uid := range classes {
		if now[class] != uid && class != "vfio.gpu.nvidia.com" {
			t.Errorf("class %s was %s and is %s", class, uid, now[class])
		}
	}
	if got := w.kubectl(t, "get", "pods", "-A", "-l", "dra-driver-nvidia-gpu-component=kubelet-plugin", "-o",
		"jsonpath={.items[*].spec.containers[*].name}"); got != "compute-domains compute-domains" {
		t.Errorf("NVIDIA's DRA driver has the containers %q", got)
	}
	u.pod("limits", onNode("node1"), limits("1"))
	u.holder("claim", 1, onNode("node1"))
	u.running("limits", "claim")
	u.servedHere("limits")
	u.sees("claim", "main", u.allocated("claim", "gpu"))
	if after := u.process("trainer", "main"); after != before {
		t.Errorf("the container of Pod trainer was %s and is %s", before, after)
	}
	u.end("trainer")
	w.offers(t, "node1", 8)

	g.do("Remove the old release")
	g.complete()
	for class, uid := range w.classes(t) {
		if classes[class] != uid {
			t.Errorf("class %s was %s and is %s", class, classes[class], uid)
		}
	}
	if got := len(w.classes(t)); got != 2 {
		t.Errorf("there are %d DeviceClasses, want 2: %v", got, w.classes(t))
	}
	u.holder("later", 1)
	u.running("later")
	u.remove("later", "claim")
	u.end("limits")
}

// classes returns the UIDs of the cluster's DeviceClasses, by name.
func (w *world) classes(t *testing.T) map[string]types.UID {
	t.Helper()
	list, err := w.Client.ResourceV1().DeviceClasses().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]types.UID{}
	for _, class := range list.Items {
		found[class.Name] = class.UID
	}
	return found
}

func (w *world) testBackToReference(t *testing.T) {
	classes := w.classes(t)
	g := w.guide(t, "Back to NVIDIA's DRA driver")
	g.do("Take the classes out of this release")
	g.do("Uninstall this driver")
	g.do("Hand the classes back, and switch the old driver's GPUs on")
	g.complete()
	now := w.classes(t)
	for class, uid := range classes {
		if now[class] != uid {
			t.Errorf("class %s was %s and is %s", class, uid, now[class])
		}
	}
	for _, node := range []string{"node1", "node2"} {
		eventually(t, 30*time.Second, "the old driver's devices on "+node, func() (bool, string) {
			devices := w.devices(t, node)
			_, old := devices["gpu-0"]
			return old && len(devices) == 8, fmt.Sprint(len(devices))
		})
		if _, err := os.Stat(filepath.Join(w.hostDir(t, node, stateDir), "claims")); !os.IsNotExist(err) {
			t.Errorf("records are left on %s: %v", node, err)
		}
	}
	u := w.tenant(t)
	u.gpus(1)
	u.holder("back", 1)
	u.running("back")
	if got := u.sh("back", "main", "echo $REFERENCE_DEVICE"); !strings.HasPrefix(got, "gpu-") {
		t.Errorf("NVIDIA's DRA driver gave the Pod %q", got)
	}
	u.remove("back")
	w.kubectl(t, "delete", "namespace", clusterharness.Namespace)
}

// leave uninstalls this driver and removes the namespace and labels of a guide, so that the next
// guide starts without this driver.
func (w *world) leave(t *testing.T) {
	t.Helper()
	if out, err := w.uninstall(t); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	w.kubectl(t, "delete", "namespace", clusterharness.Namespace)
	w.kubectl(t, "label", "nodes", "--all", "gpu-driver-")
}

func (w *world) testOperatorWithDRA(t *testing.T) {
	long(t)
	g := w.guide(t, "With a GPUCluster")
	w.kubectl(
		t,
		"label",
		"nodes",
		"--all",
		"nvidia.com/gpu.present=true",
		"nvidia.com/gpu.deploy.dra-driver=true",
		"nvidia.com/gpu.deploy.dra-validator=true",
		"--overwrite",
	)
	g.shell(g.dir, `helm uninstall dra-driver-nvidia-gpu --namespace dra-driver-nvidia-gpu --wait
helm install gpu-operator nvidia/gpu-operator --namespace gpu-operator --create-namespace \
    --set clusterPolicy.deployCR=false,gpuCluster.deployCR=true --wait`)
	u := w.tenant(t)
	u.gpus(1)
	u.holder("trainer", 1, onNode("node1"))
	u.running("trainer")
	before, classes := u.process("trainer", "main"), w.classes(t)

	g.do("Install this driver")
	g.do("Move a node")
	g.complete()
	w.offers(t, "node1", 7)
	u.holder("here", 1, onNode("node1"))
	u.running("here")
	u.sees("here", "main", u.allocated("here", "gpu"))
	u.holder("there", 1, onNode("node2"))
	u.running("there")
	if got := u.sh("there", "main", "echo $REFERENCE_DEVICE"); !strings.HasPrefix(got, "gpu-") {
		t.Errorf("the GPU Operator's driver gave the Pod %q", got)
	}
	w.paused(t, "node1", "nvidia.com/gpu.deploy.dra-validator")
	if after := u.process("trainer", "main"); after != before {
		t.Errorf("the container of Pod trainer was %s and is %s", before, after)
	}
	if now := w.classes(t); !maps.Equal(now, classes) {
		t.Errorf("the classes were %v and are %v", classes, now)
	}
	u.remove("trainer", "here", "there")
	w.offers(t, "node1", 8)
	w.leave(t)
	g.shell(g.dir, "helm uninstall gpu-operator --namespace gpu-operator --wait")
}

func (w *world) testOperatorWithDevicePlugin(t *testing.T) {
	long(t)
	g := w.guide(t, "With a ClusterPolicy")
	w.kubectl(
		t,
		"label",
		"nodes",
		"--all",
		"nvidia.com/gpu.deploy.device-plugin=true",
		"nvidia.com/gpu.deploy.operator-validator=true",
		"nvidia.com/gpu.deploy.client=true",
		"--overwrite",
	)
	g.shell(g.dir, "helm install gpu-operator nvidia/gpu-operator --namespace gpu-operator --create-namespace --wait")
	w.capacity(t, "node1", "8")
	w.capacity(t, "node2", "8")
	u := w.tenant(t)
	g.do("Install this driver")
	g.do("Move a node")
	u.pod("here", onNode("node1"), limits("1"))
	u.pod("there", onNode("node2"), limits("1"))
	u.running("here", "there")
	u.servedHere("here")
	u.servedByPlugin("there")
	u.end("there")
	g.variables += "NODE=node2\n"
	g.do("Move a node")
	g.do("When the last node has moved")
	g.complete()
	u.end("here")
	w.paused(t, "node2", "nvidia.com/gpu.deploy.device-plugin")
}

// operatorClaims fake two operands of the GPU Operator: the exporter claims all GPUs of a node, the
// validator one. The Operator creates DaemonSets. Here each node gets a single Pod of each.
var operatorClaims = operatorTemplate("nvidia-dcgm-exporter", "allocationMode: All") +
	operatorTemplate("nvidia-operator-validator", "allocationMode: ExactCount, count: 1") +
	operatorPods("nvidia-dcgm-exporter") + operatorPods("nvidia-operator-validator")

func operatorTemplate(name, amount string) string {
	return `
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: ` + name + `}
spec: {spec: {devices: {requests: [{name: gpus, exactly: {deviceClassName: gpu.nvidia.com, adminAccess: true, ` + amount + `}}]}}}
`
}

func operatorPods(app string) (pods string) {
	for _, node := range []string{"node1", "node2"} {
		pods += `
---
apiVersion: v1
kind: Pod
metadata: {name: ` + app + `-` + node + `, labels: {app: ` + app + `, node: ` + node + `}}
spec:
  priorityClassName: system-node-critical
  terminationGracePeriodSeconds: 1
  nodeSelector: {kubernetes.io/hostname: ` + node + `, nvidia.com/gpu.deploy.dra-validator: "true"}
  resourceClaims: [{name: gpus, resourceClaimTemplateName: ` + app + `}]
  initContainers:
  - name: gpu-validation
    image: ` + cluster.TestImage + `
    imagePullPolicy: Never
    command: [sh, -c, nvidia-smi -L]
    resources: {claims: [{name: gpus}]}
  containers:
  - name: main
    image: ` + cluster.TestImage + `
    imagePullPolicy: Never
    command: [sh, -c, "trap 'exit 0' TERM; sleep infinity & wait"]
    resources: {claims: [{name: gpus}]}
`
	}
	return pods
}

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/stand"
)

// world is a cluster with the driver on it.
type world struct {
	*cluster.Cluster
	Client kubernetes.Interface
	root   string
	sim    *stand.Simulator
}

// built is made once for all suites.
var built = sync.OnceValues(func() (*world, error) {
	root, err := stand.Root()
	if err != nil {
		return nil, err
	}
	sim, err := stand.BuildSimulator(context.Background(), root, os.Stderr)
	if err != nil {
		return nil, err
	}
	return &world{root: root, sim: sim}, nil
})

// simulator is the built simulated driver, for describing nodes.
func simulator(t *testing.T) *stand.Simulator {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: a cluster needs root")
	}
	b, err := built()
	if err != nil {
		t.Fatal(err)
	}
	return b.sim
}

// needSMI skips a test that is nothing without the real nvidia-smi.
func (w *world) needSMI(t *testing.T) {
	t.Helper()
	if w.sim.SMI == "" {
		t.Skip("SKIPPED: the real nvidia-smi cannot be had here; nothing that it would show was tested")
	}
}

// bringUp starts a cluster of these nodes with the production image on them. The chart is not installed yet.
func bringUp(t *testing.T, name string, nodes ...cluster.NodeOptions) *world {
	t.Helper()
	return bringUpWith(t, cluster.Options{Name: name, Nodes: nodes})
}

// bringUpWith is bringUp of a cluster with further options. Plugins are killed often: the kubelet's usual pause before it starts a container again, which grows
// up to five minutes, would be most of such tests.
func bringUpWith(t *testing.T, options cluster.Options) *world {
	t.Helper()
	name := options.Name
	options.Output = os.Stderr
	if options.RestartPause == 0 {
		options.RestartPause = time.Second
	}
	sim := simulator(t)
	b, _ := built()
	archive, err := stand.BuildImage(t.Context(), b.root, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	if err := cluster.Down(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	c, err := cluster.Up(t.Context(), options)
	w := &world{Cluster: c, root: b.root, sim: sim}
	t.Cleanup(func() { w.takeDown(t, name) })
	if err != nil {
		t.Fatal(err)
	}
	if err := c.LoadImage(t.Context(), archive); err != nil {
		t.Fatal(err)
	}
	config, err := c.RESTConfig()
	if err != nil {
		t.Fatal(err)
	}
	config.QPS, config.Burst = 100, 200
	config.ContentType = runtime.ContentTypeProtobuf // the server has two processors for everything, and polls are many
	if w.Client, err = kubernetes.NewForConfig(config); err != nil {
		t.Fatal(err)
	}
	return w
}

// start is bringUp with the chart installed and every plugin ready.
func start(t *testing.T, name string, nodes ...cluster.NodeOptions) *world {
	t.Helper()
	w := bringUp(t, name, nodes...)
	w.install(t)
	return w
}

func (w *world) takeDown(t *testing.T, name string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*enough)
	defer cancel()
	if t.Failed() {
		target := filepath.Join(w.root, "build", "e2e", strings.ReplaceAll(t.Name(), "/", "_"))
		if w.Cluster != nil {
			objects, _ := w.Kubectl(ctx, "get", "pods,resourceclaims,resourceslices,events", "-A", "-o", "yaml")
			_ = os.MkdirAll(target, 0o755)
			_ = os.WriteFile(filepath.Join(target, "objects.yaml"), []byte(objects), 0o644)
		}
		if err := cluster.SaveLogs(name, target); err != nil {
			t.Logf("the logs could not be kept: %v", err)
		}
		t.Logf("logs of every component: %s", target)
	}
	if err := cluster.Down(ctx, name); err != nil {
		t.Errorf("take the cluster down: %v", err)
	}
}

// install installs or upgrades the chart; more are further helm arguments.
func (w *world) install(t *testing.T, more ...string) {
	t.Helper()
	if err := stand.Install(t.Context(), w.Cluster, w.root, more...); err != nil {
		t.Fatalf("install the chart: %v\n%s", err, w.pluginLogs(t))
	}
}

// nvmlsim runs the simulator's control tool on a node.
func (w *world) nvmlsim(t *testing.T, node string, args ...string) string {
	t.Helper()
	return w.on(t, node, append([]string{w.sim.Tool, "--root", stand.NodeRoot}, args...)...)
}

// on runs a command on a node.
func (w *world) on(t *testing.T, node string, argv ...string) string {
	t.Helper()
	out, err := w.node(t, node).Exec(t.Context(), argv...)
	if err != nil {
		t.Fatalf("on %s: %q: %v", node, argv, err)
	}
	return out
}

func (w *world) node(t *testing.T, name string) *cluster.Node {
	t.Helper()
	n, err := w.Node(name)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// namespace makes a namespace for one test. At the test's end it is removed: when no Pod is left in it, the next test begins; the rest takes Kubernetes
// some seconds for which nobody needs to wait.
func (w *world) namespace(t *testing.T) string {
	t.Helper()
	ns, err := w.Client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "t-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*enough)
		defer cancel()
		if t.Failed() {
			out, _ := w.Kubectl(ctx, "-n", ns.Name, "describe", "pods,resourceclaims")
			t.Logf("what is in namespace %s:\n%s\nplugins:\n%s", ns.Name, out, w.pluginLogs(t))
		}
		w.endNamespace(t, ns.Name)
	})
	return ns.Name
}

// endNamespace deletes a namespace and returns when no Pod is left in it.
func (w *world) endNamespace(t *testing.T, name string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*enough)
	defer cancel()
	if err := w.Client.CoreV1().Namespaces().Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		t.Errorf("delete namespace %s: %v", name, err)
		return
	}
	eventually(t, 90*time.Second, "no Pod is left in namespace "+name, func() (bool, string) {
		pods, err := w.Client.CoreV1().Pods(name).List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err.Error()
		}
		var left []string
		for _, p := range pods.Items {
			left = append(left, p.Name)
		}
		return len(left) == 0, strings.Join(left, " ")
	})
}

func (w *world) pluginLogs(t *testing.T) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 30*time.Second)
	defer cancel()
	out, err := w.Kubectl(ctx, "-n", stand.Namespace, "logs", "-l", "app.kubernetes.io/component=kubelet-plugin", "--tail=60", "--prefix")
	if err != nil {
		return err.Error()
	}
	return out
}

// apply creates objects from YAML in a namespace.
func (w *world) apply(t *testing.T, namespace, yaml string) {
	t.Helper()
	if err := w.tryApply(t, namespace, yaml); err != nil {
		t.Fatalf("%v\n%s", err, yaml)
	}
}

func (w *world) tryApply(t *testing.T, namespace, yaml string) error {
	t.Helper()
	cmd, err := w.ClientCommand(t.Context(), "kubectl", "-n", namespace, "apply", "-f", "-")
	if err != nil {
		return err
	}
	var stderr bytes.Buffer
	cmd.Stdin, cmd.Stderr = strings.NewReader(yaml), &stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("kubectl apply: %w: %s", err, stderr.String())
	}
	return nil
}

// busy is how much longer things may take on a slow machine, or on one that does something else too, and enough the longest that anybody waits.
const (
	busy   = 4
	enough = 6 * time.Minute
)

// eventually polls a condition; what names it in the failure, and the condition's last text says how far it came. usually is how long it takes at most
// on a machine with nothing else to do. It is no promise: a test of one compares what it returns, the time that it took.
func eventually(t *testing.T, usually time.Duration, what string, ok func() (bool, string)) (took time.Duration) {
	t.Helper()
	start, limit := time.Now(), min(busy*usually, max(usually, enough))
	for {
		done, state := ok()
		if done {
			return time.Since(start)
		}
		if time.Since(start) > limit {
			t.Fatalf("not within %s: %s; last: %s", limit, what, state)
		}
		<-time.After(100 * time.Millisecond)
	}
}

// running waits until the Pods run with all containers ready.
func (w *world) running(t *testing.T, namespace string, pods ...string) {
	t.Helper()
	waited := ""
	defer func() {
		if t.Failed() && waited != "" {
			t.Logf("what Events say of Pod %s:\n%s", waited, w.events(t, namespace, waited))
		}
	}()
	for _, name := range pods {
		waited = name
		eventually(t, 60*time.Second, "Pod "+name+" runs", func() (bool, string) {
			pod, err := w.Client.CoreV1().Pods(namespace).Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				return false, err.Error()
			}
			for _, c := range pod.Status.Conditions {
				if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
					return true, ""
				}
			}
			return false, string(pod.Status.Phase)
		})
	}
	waited = ""
}

// events is what the Events about an object say, newest last.
func (w *world) events(t *testing.T, namespace, object string) string {
	t.Helper()
	list, err := w.Client.CoreV1().Events(namespace).List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + object})
	if err != nil {
		return err.Error()
	}
	var texts []string
	for _, e := range list.Items {
		texts = append(texts, e.Reason+": "+e.Message)
	}
	return strings.Join(texts, "\n")
}

// exec runs a command in a Pod's container ("" is the first) and returns what it printed to both streams.
func (w *world) exec(t *testing.T, namespace, pod, container string, argv ...string) (string, error) {
	t.Helper()
	args := []string{"-n", namespace, "exec", pod}
	if container != "" {
		args = append(args, "-c", container)
	}
	cmd, err := w.ClientCommand(t.Context(), "kubectl", append(append(args, "--"), argv...)...)
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// mustExec is exec of a command that has to succeed.
func (w *world) mustExec(t *testing.T, namespace, pod, container string, argv ...string) string {
	t.Helper()
	out, err := w.exec(t, namespace, pod, container, argv...)
	if err != nil {
		t.Fatalf("in Pod %s: %q: %v\n%s", pod, argv, err, out)
	}
	return out
}

// devices are the published devices of a node, by name.
func (w *world) devices(t *testing.T, node string) map[string]resourceapi.Device {
	t.Helper()
	devices := map[string]resourceapi.Device{}
	for _, s := range w.slices(t, node) {
		for _, d := range s.Spec.Devices {
			devices[d.Name] = d
		}
	}
	return devices
}

// gpus are the published GPUs of a node, as wholes, by name.
func (w *world) gpus(t *testing.T, node string) map[string]resourceapi.Device {
	t.Helper()
	devices := w.devices(t, node)
	maps.DeleteFunc(devices, func(_ string, d resourceapi.Device) bool { return !isWhole(&d) })
	return devices
}

func isWhole(d *resourceapi.Device) bool { return *d.Attributes["type"].StringValue == "gpu" }

// slices are the driver's ResourceSlices of a node.
func (w *world) slices(t *testing.T, node string) []resourceapi.ResourceSlice {
	t.Helper()
	list, err := w.Client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{FieldSelector: "spec.driver=gpu.nvidia.com,spec.nodeName=" + node})
	if err != nil {
		t.Fatal(err)
	}
	return list.Items
}

// offers waits until a node offers n GPUs as wholes.
func (w *world) offers(t *testing.T, node string, n int) {
	t.Helper()
	eventually(t, 30*time.Second, fmt.Sprintf("node %s offers %d GPUs", node, n), func() (bool, string) {
		got := len(w.gpus(t, node))
		return got == n, fmt.Sprint(got)
	})
}

// claimOf is the claim behind a Pod's entry of spec.resourceClaims.
func (w *world) claimOf(t *testing.T, namespace, pod, entry string) *resourceapi.ResourceClaim {
	t.Helper()
	p, err := w.Client.CoreV1().Pods(namespace).Get(t.Context(), pod, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	name := ""
	for _, c := range p.Spec.ResourceClaims {
		if c.Name == entry && c.ResourceClaimName != nil {
			name = *c.ResourceClaimName
		}
	}
	for _, c := range p.Status.ResourceClaimStatuses {
		if c.Name == entry && c.ResourceClaimName != nil {
			name = *c.ResourceClaimName
		}
	}
	claim, err := w.Client.ResourceV1().ResourceClaims(namespace).Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatalf("claim %q of Pod %s: %v", entry, pod, err)
	}
	return claim
}

// uuids are the GPUs that a claim was allocated, as the ResourceSlices name them.
func (w *world) uuids(t *testing.T, claim *resourceapi.ResourceClaim) []string {
	t.Helper()
	if claim.Status.Allocation == nil {
		t.Fatalf("claim %s is not allocated", claim.Name)
	}
	var uuids []string
	for _, r := range claim.Status.Allocation.Devices.Results {
		d, ok := w.devices(t, r.Pool)[r.Device]
		if !ok {
			t.Fatalf("no slice has device %s of pool %s", r.Device, r.Pool)
		}
		uuids = append(uuids, *d.Attributes["uuid"].StringValue)
	}
	return uuids
}

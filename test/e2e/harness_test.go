package e2e

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// world is a test cluster in which the driver is or will be installed, with the clients and
// programs that tests need.
type world struct {
	*cluster.Cluster
	Client kubernetes.Interface
	root   string
	sim    *clusterharness.Simulator
}

// nodeFile is the file in test/nvmlsim/nodes that describes the node of TestMIG, TestSharing and
// TestHealth. It must have eight H100 at the PCI addresses of dgx-h100.
var nodeFile = flag.String("node", "dgx-h100", "node file of TestMIG, TestSharing and TestHealth: dgx-h100 or "+awkward)

const awkward = "awkward"

// awkwardValue is what the chart needs on the awkward node, whose host has no /sbin/ldconfig.
const awkwardValue = "ldconfigPath=" + clusterharness.NodeRoot + "/bin/ldconfig"

// asAdmin runs what an admin does to the GPUs of the node h100. On the awkward node the plugin's
// watcher blocks a change of MIG mode, so the admin releases the GPUs first, as docs/mig.md says.
func (w *world) asAdmin(t *testing.T, do func()) {
	t.Helper()
	if *nodeFile != awkward {
		do()
		return
	}
	annotate := func(value string) {
		t.Helper()
		if _, err := w.Kubectl(t.Context(), "annotate", "node", h100, "gpu.nvidia.com/release-driver"+value); err != nil {
			t.Fatal(err)
		}
	}
	func() {
		annotate("=true")
		defer annotate("-")
		eventually(t, 20*time.Second, "the plugin has no GPU open", func() (bool, string) {
			watchers := w.watchers(t)
			return len(watchers) == 0, fmt.Sprint(watchers)
		})
		do()
	}()
	eventually(t, 60*time.Second, "the plugin serves again", func() (bool, string) {
		ready := w.readiness(t, h100)
		return ready == "ok", ready
	})
}

// built holds what all suites share: the source root and the built simulator. It has no cluster.
var built = sync.OnceValues(func() (*world, error) {
	root, err := clusterharness.Root()
	if err != nil {
		return nil, err
	}
	sim, err := clusterharness.BuildSimulator(context.Background(), root, os.Stderr)
	if err != nil {
		return nil, err
	}
	return &world{root: root, sim: sim}, nil
})

// simulator returns the simulated NVIDIA driver, which also describes the suites' nodes.
func simulator(t *testing.T) *clusterharness.Simulator {
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

// bringUp starts a cluster with these nodes and loads the production image. It does not install the
// chart.
func bringUp(t *testing.T, name string, nodes ...cluster.NodeOptions) *world {
	t.Helper()
	return bringUpWith(t, cluster.Options{Name: name, Nodes: nodes})
}

// bringUpWith is bringUp with more options. It shortens the kubelet's restart back-off, which grows
// to five minutes, because tests kill the plugin often. E2E_KUBERNETES and E2E_CONTAINERD select
// versions, as in cluster.Options.
func bringUpWith(t *testing.T, options cluster.Options) *world {
	t.Helper()
	options.Kubernetes, options.Containerd = os.Getenv("E2E_KUBERNETES"), os.Getenv("E2E_CONTAINERD")
	needsRelease(t, options.Kubernetes)
	if options.RestartPause == 0 {
		options.RestartPause = time.Second
	}
	sim := simulator(t)
	b, _ := built()
	w := bringUpPlain(t, b.root, options)
	w.sim = sim
	return w
}

// bringUpPlain starts a cluster and loads the production image. It uses no simulator. root is the
// checkout.
func bringUpPlain(t *testing.T, root string, options cluster.Options) *world {
	t.Helper()
	name := options.Name
	options.Output = os.Stderr
	archive, err := clusterharness.BuildImage(t.Context(), root, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	if err := cluster.Down(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	c, err := cluster.Up(t.Context(), options)
	w := &world{Cluster: c, root: root}
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
	config.ContentType = runtime.ContentTypeProtobuf // cheaper than JSON for the many polls
	if w.Client, err = kubernetes.NewForConfig(config); err != nil {
		t.Fatal(err)
	}
	return w
}

// start is bringUp, and then installs the chart and waits until every plugin is ready.
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
			t.Logf("the logs could not be saved: %v", err)
		}
		t.Logf("logs of every component: %s", target)
	}
	if err := cluster.Down(ctx, name); err != nil {
		t.Errorf("take the cluster down: %v", err)
	}
}

// install installs or upgrades the chart. more are further helm arguments.
func (w *world) install(t *testing.T, more ...string) {
	t.Helper()
	if *nodeFile == awkward {
		more = append([]string{"--set", awkwardValue}, more...)
	}
	if err := clusterharness.Install(t.Context(), w.Cluster, w.root, more...); err != nil {
		t.Fatalf("install the chart: %v\n%s", err, w.pluginLogs(t))
	}
}

// nvmlsim runs the simulator's control tool on a node and returns its output.
func (w *world) nvmlsim(t *testing.T, node string, args ...string) string {
	t.Helper()
	return w.on(t, node, append([]string{w.sim.Tool, "--root", clusterharness.NodeRoot}, args...)...)
}

// on runs a command on a node and returns its output. The test fails if the command fails.
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

// namespace creates a namespace for one test. When the test ends, it deletes the namespace and
// waits only until no Pod is left in it.
func (w *world) namespace(t *testing.T) string {
	t.Helper()
	ns, err := w.Client.CoreV1().
		Namespaces().
		Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "t-"}}, metav1.CreateOptions{})
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

// endNamespace deletes a namespace and waits until no Pod is left in it.
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
	out, err := w.Kubectl(ctx, "-n", clusterharness.Namespace, "logs", "-l", "app.kubernetes.io/component=kubelet-plugin", "--tail=60",
		"--prefix")
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

// busy multiplies the usual time of a condition to get its time limit, for slow or loaded machines.
// enough caps that limit.
const (
	busy   = 4
	enough = 6 * time.Minute
)

// eventually polls ok until it returns true, and returns how long that took. usually is the most
// that an idle machine takes. After a multiple of usually the test fails, with what and the last
// text of ok. A test of a time limit must compare the returned time.
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

// running waits until these Pods run with all containers ready.
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

// events returns the reasons and messages of the Events about an object, one a line.
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

// exec runs a command in a Pod's container and returns both output streams. An empty container name
// means the first container.
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

// mustExec is exec, but the test fails if the command fails.
func (w *world) mustExec(t *testing.T, namespace, pod, container string, argv ...string) string {
	t.Helper()
	out, err := w.exec(t, namespace, pod, container, argv...)
	if err != nil {
		t.Fatalf("in Pod %s: %q: %v\n%s", pod, argv, err, out)
	}
	return out
}

// devices returns the published devices of a node, by name.
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

// gpus returns the published whole GPUs of a node, by name.
func (w *world) gpus(t *testing.T, node string) map[string]resourceapi.Device {
	t.Helper()
	devices := w.devices(t, node)
	maps.DeleteFunc(devices, func(_ string, d resourceapi.Device) bool { return !isWhole(&d) })
	return devices
}

func isWhole(d *resourceapi.Device) bool { return *d.Attributes["type"].StringValue == "gpu" }

// slices returns the driver's ResourceSlices of a node.
func (w *world) slices(t *testing.T, node string) []resourceapi.ResourceSlice {
	t.Helper()
	list, err := w.Client.ResourceV1().
		ResourceSlices().
		List(t.Context(), metav1.ListOptions{FieldSelector: "spec.driver=gpu.nvidia.com,spec.nodeName=" + node})
	if err != nil {
		t.Fatal(err)
	}
	return list.Items
}

// offers waits until a node's ResourceSlices contain exactly n whole GPUs.
func (w *world) offers(t *testing.T, node string, n int) {
	t.Helper()
	eventually(t, 30*time.Second, fmt.Sprintf("node %s offers %d GPUs", node, n), func() (bool, string) {
		got := len(w.gpus(t, node))
		return got == n, fmt.Sprint(got)
	})
}

// claimOf returns a Pod's claim. entry is the claim's name in the Pod's spec.resourceClaims.
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

// uuids returns the UUIDs of the GPUs that a claim was allocated, as the ResourceSlices publish
// them.
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

// sideBySide runs parts of a suite two at a time, because they mostly wait. It does not use
// t.Parallel: the parts would wait for a place until all other suites have begun, and the cluster
// would use memory and processors meanwhile.
func sideBySide(t *testing.T, parts map[string]func(*testing.T)) {
	t.Helper()
	var all errgroup.Group
	all.SetLimit(2)
	for name, part := range parts {
		all.Go(func() error {
			t.Run(name, part)
			return nil
		})
	}
	_ = all.Wait()
}

package e2e

import (
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// idleMemory limits the anonymous memory, in KiB, of the plugin on a node without GPUs.
const idleMemory = 16 << 10

var anonymous = regexp.MustCompile(`RssAnon:\s+(\d+) kB`)

func (w *world) testPlainNode(t *testing.T) {
	pod := w.livePlugin(t, plain)
	if status := pod.Status.ContainerStatuses[0]; !status.Ready || status.RestartCount != 0 {
		t.Errorf("the plugin is not ready or was restarted: %+v", status)
	}
	if published := w.slices(t, plain); len(published) != 0 {
		t.Errorf("the node has no GPU, and its slices are %v", published)
	}
	// The plugin may create no file on a node without GPUs. The supervisor of MPS daemons may create
	// its socket there, because it listens on every node.
	if out := w.on(t, plain, "find", "/var/run/cdi", "/var/lib/kubelet/plugins", "/var/lib/kubelet/plugins_registry", "-mindepth", "1",
		"!", "-path", pluginDir, "!", "-path", pluginDir+"/mps", "!", "-path", pluginDir+"/mps/supervisor_*"); out != "" {
		t.Errorf("the idle plugin has created %s", out)
	}
	// Read the memory of every process of the plugin's binary, so that a child process would count
	// too.
	status := w.on(t, plain, "/bin/sh", "-c", `for p in /proc/[0-9]*; do
		if [ "$(readlink $p/exe)" = /usr/bin/gpu-kubelet-plugin ]; then cat $p/status; fi; done`)
	found := anonymous.FindAllStringSubmatch(status, -1)
	if len(found) != 1 {
		t.Fatalf("%d processes of the plugin, want 1:\n%s", len(found), status)
	}
	kib, err := strconv.Atoi(found[0][1])
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the idle plugin holds %d KiB of anonymous memory", kib)
	if kib > idleMemory {
		t.Errorf("the idle plugin holds %d KiB of anonymous memory, want at most %d", kib, idleMemory)
	}
}

func (w *world) testSlicesOfEveryNode(t *testing.T) {
	t.Run("the inventory shows what is published", func(t *testing.T) {
		for _, node := range []string{h100, mixed} {
			out := w.mustExec(t, clusterharness.Namespace, w.livePlugin(t, node).Name, "", "gpu-kubelet-plugin", "inventory", "-o", "yaml")
			shown, published := parseSlices(t, out), w.slices(t, node)
			if len(shown) == 0 || len(shown) != len(published) {
				t.Fatalf("the inventory of node %s shows %d slices, but %d are published", node, len(shown), len(published))
			}
			// inventory asks no API server. So it does not know that this cluster keeps an attribute for the
			// gate DRAPartitionableDevicesType.
			for _, slice := range published {
				for _, d := range slice.Spec.Devices {
					delete(d.Attributes, "partitionType")
				}
			}
			for _, slice := range shown {
				if !slices.ContainsFunc(published, func(p resourceapi.ResourceSlice) bool {
					return equality.Semantic.DeepEqual(p.Spec.Devices, slice.Spec.Devices) &&
						equality.Semantic.DeepEqual(p.Spec.SharedCounters, slice.Spec.SharedCounters)
				}) {
					t.Errorf("the inventory of node %s shows\n%+v\nwhich is not published", node, slice)
				}
			}
		}
	})
	files, err := filepath.Glob(filepath.Join(w.root, "test", "nvmlsim", "nodes", "*.yaml"))
	if err != nil || len(files) < 7 {
		t.Fatalf("the node files: %v (%v)", files, err)
	}
	for _, file := range files {
		model := strings.TrimSuffix(filepath.Base(file), ".yaml")
		t.Run(model, func(t *testing.T) {
			for _, slice := range w.wouldPublish(t, model) {
				w.keeps(t, slice)
			}
		})
	}
}

// wouldPublish creates the files of a simulated node, described by the parameter model, on the node
// without GPUs. It returns the slices that the plugin's inventory subcommand prints for these
// files.
func (w *world) wouldPublish(t *testing.T, model string) []*resourceapi.ResourceSlice {
	t.Helper()
	// host is the path of these files on the node. visible is their path in the plugin's container,
	// where the parent directory of the driver root is mounted at /driver-root.
	host, visible := path.Join(clusterharness.NodeRoot, model), path.Join("/driver-root", model)
	w.on(t, plain, w.sim.LayoutUp(host, model, "--kind", "container")...)
	out := w.mustExec(
		t,
		clusterharness.Namespace,
		w.livePlugin(t, plain).Name,
		"",
		"gpu-kubelet-plugin",
		"inventory",
		"-o",
		"yaml",
		"--node-name",
		"layout-"+model,
		"--driver-root",
		path.Join(host, "driver"),
		"--driver-root-mount",
		path.Join(visible, "driver"),
		"--sysfs-root",
		path.Join(visible, "sys"),
		"--proc-root",
		path.Join(visible, "proc"),
	)
	shown, cards := parseSlices(t, out), map[string]bool{}
	for _, slice := range shown {
		for _, d := range slice.Spec.Devices {
			cards[*d.Attributes["resource.kubernetes.io/pciBusID"].StringValue] = true
		}
	}
	file, err := os.ReadFile(filepath.Join(w.root, "test", "nvmlsim", "nodes", model+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var node struct {
		GPUs []any `json:"gpus"`
	}
	if err := yaml.Unmarshal(file, &node); err != nil {
		t.Fatal(err)
	}
	if len(cards) == 0 || len(cards) != len(node.GPUs) {
		t.Fatalf("the node has %d GPUs, but would publish devices of %d", len(node.GPUs), len(cards))
	}
	return shown
}

// parseSlices parses the ResourceSlices that the plugin's inventory prints as YAML documents.
func parseSlices(t *testing.T, documents string) []*resourceapi.ResourceSlice {
	t.Helper()
	var parsed []*resourceapi.ResourceSlice
	for document := range strings.SplitSeq(documents, "---\n") {
		if strings.TrimSpace(document) == "" {
			continue
		}
		slice := &resourceapi.ResourceSlice{}
		if err := yaml.UnmarshalStrict([]byte(document), slice); err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		parsed = append(parsed, slice)
	}
	return parsed
}

// keeps stores a slice and reads it again. The API server must not refuse, drop or change anything
// in it.
func (w *world) keeps(t *testing.T, slice *resourceapi.ResourceSlice) {
	t.Helper()
	client := w.Client.ResourceV1().ResourceSlices()
	if _, err := client.Create(t.Context(), slice, metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}); err != nil {
		t.Fatalf("the API server refuses the slice: %v", err)
	}
	t.Cleanup(func() {
		if err := client.Delete(context.WithoutCancel(t.Context()), slice.Name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	stored, err := client.Get(t.Context(), slice.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if !equality.Semantic.DeepEqual(stored.Spec, slice.Spec) {
		t.Errorf("the API server stored\n%+v\nand was sent\n%+v", stored.Spec, slice.Spec)
	}
}

// as returns a client of the API server that has a token of the service account. If pod is not nil,
// the token is bound to that Pod.
func (w *world) as(t *testing.T, pod *corev1.Pod, account string) kubernetes.Interface {
	t.Helper()
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To(int64(600))}}
	if pod != nil {
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}
	}
	token, err := w.Client.CoreV1().ServiceAccounts(clusterharness.Namespace).CreateToken(t.Context(), account, request,
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	config, err := w.RESTConfig()
	if err != nil {
		t.Fatal(err)
	}
	config = rest.AnonymousClientConfig(config)
	config.BearerToken = token.Status.Token
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func (w *world) testForgedSlices(t *testing.T) {
	pod := w.livePlugin(t, h100)
	plugin := w.as(t, &pod, pod.Spec.ServiceAccountName)
	unbound := w.as(t, nil, pod.Spec.ServiceAccountName)
	withDevices := func(node string) resourceapi.ResourceSlice {
		all := w.slices(t, node)
		return all[slices.IndexFunc(all, func(s resourceapi.ResourceSlice) bool { return len(s.Spec.Devices) > 0 })]
	}
	own, theirs := withDevices(h100), withDevices(mixed)
	dry := []string{metav1.DryRunAll}

	create := func(node *string, driver string) func(kubernetes.Interface) error {
		return func(c kubernetes.Interface) error {
			slice := &resourceapi.ResourceSlice{
				ObjectMeta: metav1.ObjectMeta{GenerateName: "forged-"},
				Spec: resourceapi.ResourceSliceSpec{
					Driver: driver, NodeName: node, Pool: resourceapi.ResourcePool{Name: "forged", Generation: 1, ResourceSliceCount: 1},
					Devices: []resourceapi.Device{{Name: "gpu-forged"}},
				},
			}
			if node == nil {
				slice.Spec.AllNodes = ptr.To(true)
			}
			_, err := c.ResourceV1().ResourceSlices().Create(t.Context(), slice, metav1.CreateOptions{DryRun: dry})
			return err
		}
	}
	update := func(slice resourceapi.ResourceSlice) func(kubernetes.Interface) error {
		return func(c kubernetes.Interface) error {
			slice := slice.DeepCopy()
			slice.Spec.Devices[0].Attributes["productName"] = resourceapi.DeviceAttribute{StringValue: ptr.To("forged")}
			_, err := c.ResourceV1().ResourceSlices().Update(t.Context(), slice, metav1.UpdateOptions{DryRun: dry})
			return err
		}
	}
	remove := func(slice resourceapi.ResourceSlice) func(kubernetes.Interface) error {
		return func(c kubernetes.Interface) error {
			return c.ResourceV1().ResourceSlices().Delete(t.Context(), slice.Name, metav1.DeleteOptions{DryRun: dry})
		}
	}
	removeAll := func(node string) func(kubernetes.Interface) error {
		return func(c kubernetes.Interface) error {
			return c.ResourceV1().ResourceSlices().DeleteCollection(t.Context(), metav1.DeleteOptions{DryRun: dry},
				metav1.ListOptions{FieldSelector: "spec.driver=gpu.nvidia.com,spec.nodeName=" + node})
		}
	}
	ownOnly := fmt.Sprintf("The plugin on node %q may write only the ResourceSlices of that node.", h100)
	for name, c := range map[string]struct {
		client  kubernetes.Interface
		write   func(kubernetes.Interface) error
		refusal string // a text of the error; empty: allowed
	}{
		"creates its own":               {plugin, create(ptr.To(h100), "gpu.nvidia.com"), ""},
		"updates its own":               {plugin, update(own), ""},
		"deletes its own":               {plugin, remove(own), ""},
		"deletes all of its own":        {plugin, removeAll(h100), ""},
		"creates another node's":        {plugin, create(ptr.To(mixed), "gpu.nvidia.com"), ownOnly},
		"updates another node's":        {plugin, update(theirs), ownOnly},
		"deletes another node's":        {plugin, remove(theirs), ownOnly},
		"deletes all of another node's": {plugin, removeAll(mixed), ownOnly},
		"creates one for all nodes":     {plugin, create(nil, "gpu.nvidia.com"), ownOnly},
		"speaks for another driver": {plugin, create(ptr.To(h100), "nic.example.com"),
			"only the ResourceSlices of driver gpu.nvidia.com"},
		"has a token that is bound to no node":    {unbound, create(ptr.To(h100), "gpu.nvidia.com"), "bound to no node"},
		"is the administrator, of no concern":     {w.Client, create(ptr.To(mixed), "gpu.nvidia.com"), ""},
		"is the administrator, of another driver": {w.Client, create(ptr.To(mixed), "nic.example.com"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			switch err := c.write(c.client); {
			case c.refusal == "" && err != nil:
				t.Errorf("refused: %v", err)
			case c.refusal != "" && !apierrors.IsForbidden(err):
				t.Errorf("got %v, want it forbidden", err)
			case c.refusal != "" && !strings.Contains(err.Error(), c.refusal):
				t.Errorf("forbidden with %q, want %q", err, c.refusal)
			}
		})
	}
	t.Run("reads and writes nothing else", func(t *testing.T) {
		for _, a := range []authorizationv1.ResourceAttributes{
			{Verb: "get", Resource: "secrets", Namespace: clusterharness.Namespace},
			{Verb: "list", Resource: "pods"},
			{Verb: "update", Resource: "nodes", Name: h100},
			{Verb: "update", Group: "resource.k8s.io", Resource: "resourceclaims", Namespace: "default"},
			{Verb: "update", Group: "resource.k8s.io", Resource: "resourceclaims", Subresource: "binding", Namespace: "default"},
			{Verb: "update", Group: "resource.k8s.io", Resource: "deviceclasses"},
			{Verb: "create", Resource: "pods", Namespace: clusterharness.Namespace},
		} {
			review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &a}}
			answer, err := plugin.AuthorizationV1().SelfSubjectAccessReviews().Create(t.Context(), review, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if answer.Status.Allowed {
				t.Errorf("the plugin may %s %s/%s %s", a.Verb, a.Group, a.Resource, a.Subresource)
			}
		}
	})
}

// testForgedStatuses expects that a plugin may write to a claim's status only about the plugin's
// own devices on its own node.
func (w *world) testForgedStatuses(t *testing.T) {
	u := w.tenant(t)
	u.template("one", oneGPU)
	u.pod("here", onNode(h100), fromTemplate("gpu", "one"))
	u.pod("there", onNode(mixed), fromTemplate("gpu", "one"))
	u.running("here", "there")
	pod := w.livePlugin(t, h100)
	plugin := w.as(t, &pod, pod.Spec.ServiceAccountName)
	say := func(c *resourceapi.ResourceClaim) {
		r := c.Status.Allocation.Devices.Results[0]
		c.Status.Devices = []resourceapi.AllocatedDeviceStatus{
			{Driver: r.Driver, Pool: r.Pool, Device: r.Device, Data: &runtime.RawExtension{Raw: []byte(`{"uuid":"said"}`)}},
		}
	}
	// From Kubernetes 1.36 on, the API server itself refuses what the chart's policy refuses before.
	byPolicy := w.isBefore(t, "1.36")
	for name, c := range map[string]struct {
		pod    string
		change func(*resourceapi.ResourceClaim)
		// texts of the errors of the API server and of the policy, empty: allowed
		refusal, policyRefusal string
	}{
		"says what its own device is": {"here", say, "", ""},
		"speaks of another node's": {"there", say, "changing status.devices requires",
			"may write only into the status of claims that are allocated on its own node"},
		"reserves the claim for no Pod": {"here", func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = nil },
			"changing status.allocation or status.reservedFor requires", "may change neither a claim's allocation nor its reservations"},
	} {
		if byPolicy {
			c.refusal = c.policyRefusal
		}
		t.Run(name, func(t *testing.T) {
			claim := w.claimOf(t, u.namespace, c.pod, "gpu")
			c.change(claim)
			_, err := plugin.ResourceV1().
				ResourceClaims(u.namespace).
				UpdateStatus(t.Context(), claim, metav1.UpdateOptions{DryRun: []string{metav1.DryRunAll}})
			switch {
			case c.refusal == "" && err != nil:
				t.Errorf("refused: %v", err)
			case c.refusal != "" && (err == nil || !strings.Contains(err.Error(), c.refusal)):
				t.Errorf("got %v, want a refusal with %q", err, c.refusal)
			}
		})
	}
}

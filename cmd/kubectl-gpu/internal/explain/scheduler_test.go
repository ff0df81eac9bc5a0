//go:build cluster

package explain

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fleettest"
)

const (
	clusterName = "explain"
	// clusterLabel is the label of the nodes of one random cluster. All random clusters share a real
	// one, and the Pod of each selects its own nodes.
	clusterLabel = "random-cluster"
	// patient is how long the scheduler may take for all Pods together.
	patient = 3 * time.Minute
)

// The verdict of explain is that of the running kube-scheduler, with the release's own feature
// gates. E2E_KUBERNETES selects the version. make test-long runs it with 200 random clusters.
func TestVerdictIsThatOfTheScheduler(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: a cluster needs root")
	}
	client, version := controlPlane(t)
	t.Logf("Kubernetes %s", version)
	seeds := make([]uint64, *clusters)
	pods := make([]*corev1.Pod, len(seeds))
	group, ctx := errgroup.WithContext(t.Context())
	group.SetLimit(8)
	for _, class := range fleettest.New().Classes {
		if _, err := client.ResourceV1().DeviceClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range seeds {
		seeds[i] = *seed + uint64(i)
		group.Go(func() error {
			var err error
			pods[i], err = create(ctx, client, seeds[i])
			if err != nil {
				return fmt.Errorf("seed %d: %w", seeds[i], err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}

	s, err := fleet.Read(t.Context(), client, func(ctx context.Context) ([]byte, error) {
		return client.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	})
	if err != nil || len(s.Missing) > 0 {
		t.Fatal(err, s.Missing)
	}
	reports := map[string]*Report{}
	fitting := 0
	for _, p := range pods {
		report, err := New(partOf(s, p)).Pod(t.Context(), p.Namespace, p.Name)
		if err != nil {
			t.Fatal(err)
		}
		reports[p.Namespace] = report
		if report.State == Fits {
			fitting++
		}
	}
	for _, p := range pods {
		if _, err := client.CoreV1().Pods(p.Namespace).Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	verdicts := schedulersVerdicts(t, client, reports)
	for i, p := range pods {
		report, verdict := reports[p.Namespace], verdicts[p.Namespace]
		expected := report.State == Fits
		if expected != (verdict.Spec.NodeName != "") {
			t.Errorf("seed %d: explain says %s, the scheduler %q: %s", seeds[i], report.State, verdict.Spec.NodeName, why(verdict))
			continue
		}
		if expected && !slices.ContainsFunc(report.Nodes, func(n Node) bool { return n.Fits && n.Name == verdict.Spec.NodeName }) {
			t.Errorf("seed %d: the scheduler chose %s, where explain says it does not fit", seeds[i], verdict.Spec.NodeName)
		}
	}
	t.Logf("%d clusters, of which %d have room for the Pod", len(pods), fitting)
	if fitting == 0 || fitting == len(pods) {
		t.Error("the clusters are all alike")
	}
}

// controlPlane starts a control plane without kubelets.
func controlPlane(t *testing.T) (kubernetes.Interface, string) {
	t.Helper()
	if err := cluster.Down(t.Context(), clusterName); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cluster.Down(context.WithoutCancel(t.Context()), clusterName); err != nil {
			t.Error(err)
		}
	})
	c, err := cluster.Up(t.Context(), cluster.Options{
		Name: clusterName, ControlPlaneOnly: true, ReleaseDefaults: true, Kubernetes: os.Getenv("E2E_KUBERNETES"), Output: os.Stderr,
	})
	if err != nil {
		t.Fatal(err)
	}
	config, err := c.RESTConfig()
	if err != nil {
		t.Fatal(err)
	}
	config.QPS, config.Burst = 200, 400
	config.ContentType = runtime.ContentTypeProtobuf
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	version, err := client.Discovery().ServerVersion()
	if err != nil {
		t.Fatal(err)
	}
	return client, version.GitVersion
}

// create creates the random cluster of this seed in a namespace of its own. It returns its Pod,
// which is not created.
func create(ctx context.Context, client kubernetes.Interface, seed uint64) (*corev1.Pod, error) {
	s := randomCluster(rand.New(rand.NewPCG(seed, 0)))
	name := fmt.Sprintf("c%d", seed)
	unique := func(node string) string { return name + "-" + node }
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if _, err := client.CoreV1().Namespaces().Create(ctx, namespace, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	for _, n := range s.Nodes {
		n.Name = unique(n.Name)
		n.Labels = map[string]string{clusterLabel: name}
		n.Status.Allocatable[corev1.ResourcePods] = resource.MustParse("110")
		n.Status.Capacity = n.Status.Allocatable
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		if _, err := client.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{}); err != nil {
			return nil, err
		}
		// The API server taints a new Node as not ready, and no controller here would remove the taint.
		noTaints := []byte(`{"spec": {"taints": null}}`)
		if _, err := client.CoreV1().Nodes().Patch(ctx, n.Name, types.MergePatchType, noTaints, metav1.PatchOptions{}); err != nil {
			return nil, err
		}
	}
	for _, slice := range s.Slices {
		slice.Name, slice.Spec.Pool.Name = unique(slice.Name), unique(slice.Spec.Pool.Name)
		slice.Spec.NodeName = &slice.Spec.Pool.Name
		if _, err := client.ResourceV1().ResourceSlices().Create(ctx, slice, metav1.CreateOptions{}); err != nil {
			return nil, err
		}
	}
	for _, c := range s.Claims {
		allocation := c.Status.Allocation
		c.Namespace, c.UID = name, ""
		created, err := client.ResourceV1().ResourceClaims(name).Create(ctx, c, metav1.CreateOptions{})
		if err != nil {
			return nil, err
		}
		if allocation == nil {
			continue
		}
		for i := range allocation.Devices.Results {
			allocation.Devices.Results[i].Pool = unique(allocation.Devices.Results[i].Pool)
		}
		allocation.NodeSelector = fleettest.OnNode(allocation.Devices.Results[0].Pool)
		created.Status.Allocation = allocation
		if _, err := client.ResourceV1().ResourceClaims(name).UpdateStatus(ctx, created, metav1.UpdateOptions{}); err != nil {
			return nil, err
		}
	}
	p := s.Pods[0]
	p.Namespace, p.UID, p.Status = name, "", corev1.PodStatus{}
	p.Spec.NodeSelector = map[string]string{clusterLabel: name}
	p.Spec.AutomountServiceAccountToken, p.Spec.Containers[0].Image = ptr.To(false), "none"
	return p, nil
}

// partOf returns the random cluster of this Pod, with the Pod.
func partOf(s *fleet.Snapshot, p *corev1.Pod) *fleet.Snapshot {
	part := *s
	part.Nodes, part.Slices, part.Claims, part.Pods = nil, nil, nil, []*corev1.Pod{p}
	for _, n := range s.Nodes {
		if n.Labels[clusterLabel] == p.Namespace {
			part.Nodes = append(part.Nodes, n)
		}
	}
	for _, slice := range s.Slices {
		if strings.HasPrefix(slice.Spec.Pool.Name, p.Namespace+"-") {
			part.Slices = append(part.Slices, slice)
		}
	}
	for _, c := range s.Claims {
		if c.Namespace == p.Namespace {
			part.Claims = append(part.Claims, c)
		}
	}
	return &part
}

// schedulersVerdicts waits until the scheduler has a verdict on each Pod, and for a while for those
// that explain disagrees with, because the scheduler may not have seen all objects at first.
func schedulersVerdicts(t *testing.T, client kubernetes.Interface, reports map[string]*Report) map[string]*corev1.Pod {
	t.Helper()
	verdicts := map[string]*corev1.Pod{}
	deadline := time.Now().Add(patient)
	for {
		list, err := client.CoreV1().Pods("").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		settled := 0
		for i := range list.Items {
			p := &list.Items[i]
			report := reports[p.Namespace]
			if report == nil {
				continue
			}
			verdicts[p.Namespace] = p
			if p.Spec.NodeName != "" || report.State != Fits && why(p) != "" {
				settled++
			}
		}
		if settled == len(reports) || time.Now().After(deadline) && len(verdicts) == len(reports) {
			return verdicts
		}
		select {
		case <-t.Context().Done():
			t.Fatalf("%d of %d Pods have a verdict: %v", settled, len(reports), slices.Sorted(maps.Keys(verdicts)))
		case <-time.After(time.Second):
		}
	}
}

// why returns why the scheduler did not schedule the Pod. It is empty as long as the scheduler has
// no verdict.
func why(p *corev1.Pod) string {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return c.Reason + ": " + c.Message
		}
	}
	return ""
}

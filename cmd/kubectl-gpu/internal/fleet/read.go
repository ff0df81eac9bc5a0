package fleet

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// pluginSelector selects the DaemonSets and ConfigMaps of this driver's chart.
const pluginSelector = "app.kubernetes.io/name=gpu-dra-driver"

// Read reads a cluster. It fails only if it cannot read slices, claims or nodes. Whatever else it
// cannot read is listed in Missing.
//
// metrics returns the API server's metrics, which show its feature gates. It may fail: then the
// defaults of the server's version count.
func Read(ctx context.Context, client kubernetes.Interface, metrics func(context.Context) ([]byte, error)) (*Snapshot, error) {
	s := &Snapshot{Configs: map[string]string{}, Settings: map[string]string{}}
	if v, err := client.Discovery().ServerVersion(); err == nil {
		s.Version = v.GitVersion
	} else {
		s.missing("the API server's version", err)
	}
	if text, err := metrics(ctx); err == nil {
		s.Gates = parseGates(text)
	}
	api := client.ResourceV1()
	parts := newSharer()
	if err := list(ctx, &s.Slices, api.ResourceSlices().List, func(slice *resourceapi.ResourceSlice) {
		slimMeta(&slice.ObjectMeta)
		parts.slice(slice)
	}); apierrors.IsNotFound(err) {
		return nil, errors.New("the cluster does not serve resource.k8s.io/v1: use Kubernetes 1.34 or later")
	} else if err != nil {
		return nil, fmt.Errorf("list %s: %w", Slices, err)
	}
	if err := list(ctx, &s.Claims, api.ResourceClaims("").List, slimClaim); err != nil {
		return nil, fmt.Errorf("list %s: %w", Claims, err)
	}
	if err := list(ctx, &s.Nodes, client.CoreV1().Nodes().List, slimNode); err != nil {
		return nil, fmt.Errorf("list %s: %w", Nodes, err)
	}
	s.missing(Classes, list(ctx, &s.Classes, api.DeviceClasses().List, slimClass))
	s.missing(Templates, list(ctx, &s.Templates, api.ResourceClaimTemplates("").List, slimTemplate))
	s.missing(Pods, list(ctx, &s.Pods, client.CoreV1().Pods("").List, slimPod))
	s.missing(TaintRules, s.readRules(ctx, client))
	labelled := func(o metav1.ListOptions) metav1.ListOptions { o.LabelSelector = pluginSelector; return o }
	var configs []*corev1.ConfigMap
	s.missing(Configs, list(ctx, &configs, func(ctx context.Context, o metav1.ListOptions) (*corev1.ConfigMapList, error) {
		return client.CoreV1().ConfigMaps("").List(ctx, labelled(o))
	}, nil))
	for _, c := range configs {
		if text, ok := c.Data["config.yaml"]; ok {
			s.Configs[Key(c)], s.Settings[Key(c)] = text, c.Data["settings.yaml"]
		}
	}
	s.missing(DaemonSets, list(ctx, &s.DaemonSets, client.AppsV1().DaemonSets("").List, slimDaemonSet))
	s.prepare()
	return s, nil
}

// missing notes that something could not be read, unless err is nil.
func (s *Snapshot) missing(what Kind, err error) {
	if err != nil {
		s.Missing = append(s.Missing, fmt.Sprintf("%s: %v", what, err))
	}
}

// list reads all objects of a kind page by page, and drops from each what slim drops.
func list[T any, L runtime.Object](
	ctx context.Context, all *[]*T, get func(context.Context, metav1.ListOptions) (L, error), slim func(*T),
) error {
	p := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return get(ctx, o) })
	return p.EachListItem(ctx, metav1.ListOptions{}, func(o runtime.Object) error {
		typed, ok := o.(any).(*T)
		if !ok {
			return fmt.Errorf("the API server returned a %T in a list", o)
		}
		if slim != nil {
			slim(typed)
		}
		*all = append(*all, typed)
		return nil
	})
}

// readRules reads the DeviceTaintRules in the newest version that the cluster serves.
func (s *Snapshot) readRules(ctx context.Context, client kubernetes.Interface) error {
	err := list(ctx, &s.TaintRules, client.ResourceV1().DeviceTaintRules().List, nil)
	if !apierrors.IsNotFound(err) {
		return err
	}
	rules, err := client.ResourceV1beta2().DeviceTaintRules().List(ctx, metav1.ListOptions{})
	if apierrors.IsNotFound(err) {
		return nil // the cluster has no such rules
	}
	if err != nil {
		return err
	}
	for _, r := range rules.Items {
		// The versions have the same form.
		text, err := json.Marshal(r)
		if err != nil {
			return err
		}
		var rule resourceapi.DeviceTaintRule
		if err := json.Unmarshal(text, &rule); err != nil {
			return fmt.Errorf("DeviceTaintRule %s: %w", r.Name, err)
		}
		s.TaintRules = append(s.TaintRules, &rule)
	}
	return nil
}

// parseGates returns the feature gates of DRA in the API server's metrics.
// https://kubernetes.io/docs/reference/instrumentation/metrics/ (kubernetes_feature_enabled)
func parseGates(metrics []byte) map[string]bool {
	gates := map[string]bool{}
	lines := bufio.NewScanner(bytes.NewReader(metrics))
	for lines.Scan() {
		rest, ok := strings.CutPrefix(lines.Text(), `kubernetes_feature_enabled{name="DRA`)
		if !ok {
			continue
		}
		if name, after, ok := strings.Cut(rest, `"`); ok {
			gates["DRA"+name] = strings.HasSuffix(after, " 1")
		}
	}
	return gates
}

// The functions below drop what is not needed, above all what may be secret or large.

var keptAnnotations = []string{"resource.kubernetes.io/", "meta.helm.sh/", "helm.sh/", device.DriverName + "/"}

func slimMeta(m *metav1.ObjectMeta) {
	m.ManagedFields = nil
	for key := range m.Annotations {
		kept := false
		for _, prefix := range keptAnnotations {
			kept = kept || strings.HasPrefix(key, prefix)
		}
		if !kept {
			delete(m.Annotations, key)
		}
	}
}

// foreign replaces the parameters of other drivers, which may be secret.
func foreign(o *resourceapi.OpaqueDeviceConfiguration) {
	if o != nil && o.Driver != device.DriverName {
		o.Parameters = runtime.RawExtension{Raw: []byte(`{}`)}
	}
}

func slimClaimSpec(s *resourceapi.ResourceClaimSpec) {
	for i := range s.Devices.Config {
		foreign(s.Devices.Config[i].Opaque)
	}
}

func slimClaim(c *resourceapi.ResourceClaim) {
	slimMeta(&c.ObjectMeta)
	slimClaimSpec(&c.Spec)
	if c.Status.Allocation != nil {
		for i := range c.Status.Allocation.Devices.Config {
			foreign(c.Status.Allocation.Devices.Config[i].Opaque)
		}
	}
}

func slimTemplate(t *resourceapi.ResourceClaimTemplate) {
	slimMeta(&t.ObjectMeta)
	t.Spec.ObjectMeta = metav1.ObjectMeta{}
	slimClaimSpec(&t.Spec.Spec)
}

func slimClass(c *resourceapi.DeviceClass) {
	slimMeta(&c.ObjectMeta)
	for i := range c.Spec.Config {
		foreign(c.Spec.Config[i].Opaque)
	}
}

func slimNode(n *corev1.Node) {
	slimMeta(&n.ObjectMeta)
	n.Status.Images, n.Status.VolumesAttached, n.Status.VolumesInUse, n.Status.Addresses = nil, nil, nil, nil
	n.Spec.ProviderID = ""
}

// slimPod keeps what the scheduler looks at.
func slimPod(p *corev1.Pod) {
	slimMeta(&p.ObjectMeta)
	containers := func(all []corev1.Container) []corev1.Container {
		var kept []corev1.Container
		for _, c := range all {
			kept = append(kept, corev1.Container{Name: c.Name, Resources: c.Resources, RestartPolicy: c.RestartPolicy})
		}
		return kept
	}
	p.Spec = corev1.PodSpec{
		NodeName: p.Spec.NodeName, NodeSelector: p.Spec.NodeSelector, Affinity: p.Spec.Affinity, Tolerations: p.Spec.Tolerations,
		ResourceClaims: p.Spec.ResourceClaims, SchedulingGates: p.Spec.SchedulingGates, SchedulerName: p.Spec.SchedulerName,
		Resources: p.Spec.Resources, Overhead: p.Spec.Overhead,
		Containers: containers(p.Spec.Containers), InitContainers: containers(p.Spec.InitContainers),
	}
	p.Status = corev1.PodStatus{
		Phase: p.Status.Phase, Conditions: p.Status.Conditions, ResourceClaimStatuses: p.Status.ResourceClaimStatuses,
		ExtendedResourceClaimStatus: p.Status.ExtendedResourceClaimStatus,
	}
}

func slimDaemonSet(d *appsv1.DaemonSet) {
	slimMeta(&d.ObjectMeta)
	var images []corev1.Container
	for _, c := range d.Spec.Template.Spec.Containers {
		images = append(images, corev1.Container{Name: c.Name, Image: c.Image})
	}
	d.Spec.Template = corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: images}}
}

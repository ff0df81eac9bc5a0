package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// tenant is the user in one test, with a namespace for claims and Pods.
type tenant struct {
	*world
	t         *testing.T
	namespace string
}

func (w *world) tenant(t *testing.T) tenant {
	t.Helper()
	return tenant{world: w, t: t, namespace: w.namespace(t)}
}

// oneGPU is the YAML of spec.devices of a claim for one GPU.
const oneGPU = `requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]`

// template creates a ResourceClaimTemplate from the YAML of its spec.devices.
func (u tenant) template(name, devices string) {
	u.t.Helper()
	template := &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{Devices: u.devicesOf(devices)}},
	}
	if _, err := u.Client.ResourceV1().ResourceClaimTemplates(u.namespace).Create(u.t.Context(), template,
		metav1.CreateOptions{}); err != nil {
		u.t.Fatal(err)
	}
}

// claim creates a ResourceClaim from the YAML of its spec.devices.
func (u tenant) claim(name, devices string) {
	u.t.Helper()
	if err := u.tryClaim(name, devices); err != nil {
		u.t.Fatal(err)
	}
}

func (u tenant) tryClaim(name, devices string) error {
	u.t.Helper()
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       resourceapi.ResourceClaimSpec{Devices: u.devicesOf(devices)},
	}
	_, err := u.Client.ResourceV1().ResourceClaims(u.namespace).Create(u.t.Context(), claim, metav1.CreateOptions{})
	return err
}

func (u tenant) devicesOf(text string) resourceapi.DeviceClaim {
	u.t.Helper()
	var devices resourceapi.DeviceClaim
	if err := yaml.UnmarshalStrict([]byte(text), &devices); err != nil {
		u.t.Fatalf("%v in\n%s", err, text)
	}
	return devices
}

// pod starts a Pod that runs until it gets SIGTERM. parts change the Pod before its creation. If
// they add no container, the Pod gets one named main with all its claims.
func (u tenant) pod(name string, parts ...func(*corev1.Pod)) {
	u.t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, TerminationGracePeriodSeconds: ptr.To(int64(1))},
	}
	for _, part := range parts {
		part(pod)
	}
	if len(pod.Spec.Containers) == 0 {
		var all []string
		for _, c := range pod.Spec.ResourceClaims {
			all = append(all, c.Name)
		}
		container("main", all...)(pod)
	}
	if _, err := u.Client.CoreV1().Pods(u.namespace).Create(u.t.Context(), pod, metav1.CreateOptions{}); err != nil {
		u.t.Fatal(err)
	}
}

// fromTemplate gives a Pod a claim of its own from a template. entry is the claim's name in
// spec.resourceClaims.
func fromTemplate(entry, template string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, corev1.PodResourceClaim{Name: entry, ResourceClaimTemplateName: &template})
	}
}

// fromClaim lets a Pod use an existing claim, which other Pods may use too. entry is the claim's
// name in spec.resourceClaims.
func fromClaim(entry, claim string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, corev1.PodResourceClaim{Name: entry, ResourceClaimName: &claim})
	}
}

// container adds a container to a Pod. uses names its claims by their entries in
// spec.resourceClaims: "entry" for a whole claim, "entry/request" for one request of it.
func container(name string, uses ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		c := waitingContainer(name)
		for _, use := range uses {
			entry, request, _ := strings.Cut(use, "/")
			c.Resources.Claims = append(c.Resources.Claims, corev1.ResourceClaim{Name: entry, Request: request})
		}
		p.Spec.Containers = append(p.Spec.Containers, c)
	}
}

// waitingContainer returns a container that waits, and ends with success at SIGTERM.
func waitingContainer(name string) corev1.Container {
	return corev1.Container{
		Name: name, Image: cluster.TestImage, ImagePullPolicy: corev1.PullNever,
		Command: []string{"sh", "-c", "trap 'exit 0' TERM; sleep infinity & wait"},
	}
}

func onNode(name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: name} }
}

// hostPath mounts a path of the node, read-only and at the same path, in every container that the
// Pod has so far.
func hostPath(name, path string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Volumes = append(
			p.Spec.Volumes,
			corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path}}},
		)
		for i := range p.Spec.Containers {
			c := &p.Spec.Containers[i]
			c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: name, MountPath: path, ReadOnly: true})
		}
	}
}

func (u tenant) running(pods ...string) {
	u.t.Helper()
	u.world.running(u.t, u.namespace, pods...)
}

// waits waits until the scheduler reports that no node has the devices that a Pod claims.
func (u tenant) waits(pod string) {
	u.t.Helper()
	u.unschedulable(pod, "cannot allocate all claims")
}

// unschedulable waits until the scheduler reports that it cannot schedule a Pod, for this reason.
func (u tenant) unschedulable(pod, reason string) {
	u.t.Helper()
	eventually(u.t, 30*time.Second, fmt.Sprintf("Pod %s cannot be scheduled: %s", pod, reason), func() (bool, string) {
		p := u.get(pod)
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && strings.Contains(c.Message, reason) {
				return true, ""
			}
		}
		return false, fmt.Sprint(p.Status.Conditions)
	})
}

func (u tenant) get(pod string) *corev1.Pod {
	u.t.Helper()
	p, err := u.Client.CoreV1().Pods(u.namespace).Get(u.t.Context(), pod, metav1.GetOptions{})
	if err != nil {
		u.t.Fatal(err)
	}
	return p
}

// sh runs a shell command in a container and returns its output.
func (u tenant) sh(pod, container, line string) string {
	u.t.Helper()
	return u.mustExec(u.t, u.namespace, pod, container, "sh", "-c", line)
}

// visible returns the UUIDs of the GPUs that nvidia-smi lists in a container, sorted.
func (u tenant) visible(pod, container string) []string {
	u.t.Helper()
	return u.world.visible(u.t, u.namespace, pod, container)
}

// allocated returns the UUIDs of the GPUs that a Pod's claim was allocated, sorted. entry is the
// claim's name in spec.resourceClaims. If requests are named, only their GPUs count.
func (u tenant) allocated(pod, entry string, requests ...string) []string {
	u.t.Helper()
	claim := u.claimOf(u.t, u.namespace, pod, entry)
	if len(requests) > 0 && claim.Status.Allocation != nil {
		devices := &claim.Status.Allocation.Devices
		devices.Results = slices.DeleteFunc(
			devices.Results,
			func(r resourceapi.DeviceRequestAllocationResult) bool { return !slices.Contains(requests, r.Request) },
		)
	}
	return u.sortedUUIDs(u.t, claim)
}

func (w *world) sortedUUIDs(t *testing.T, claim *resourceapi.ResourceClaim) []string {
	t.Helper()
	uuids := w.uuids(t, claim)
	slices.Sort(uuids)
	return uuids
}

// sees checks that nvidia-smi in a container lists exactly the allocated GPUs.
func (u tenant) sees(pod, container string, allocated []string) {
	u.t.Helper()
	if len(allocated) == 0 {
		u.t.Errorf("Pod %s: nothing is allocated", pod)
	}
	if seen := u.visible(pod, container); !slices.Equal(seen, allocated) {
		u.t.Errorf("container %q of Pod %s sees %v, its claim was allocated %v", container, pod, seen, allocated)
	}
}

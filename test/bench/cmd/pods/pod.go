package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/report"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

const (
	namespace = metav1.NamespaceDefault
	template  = "one-gpu"
	// podTimeout limits how long a Pod may take to start and end.
	podTimeout = 2 * time.Minute

	cdiDir      = "/var/run/cdi"
	otherVendor = "k8s.crowd.example"
)

// meter starts Pods on the node and measures them.
type meter struct {
	client kubernetes.Interface
	node   *cluster.Node
}

// started has the times of one Pod's start. pod is the time from its creation until it runs.
// container is the part in which the runtime created and started the container.
type started struct{ pod, container time.Duration }

type starts struct{ pod, container report.Samples }

func (s *starts) add(one started) {
	s.pod.All, s.container.All = append(s.pod.All, one.pod), append(s.container.All, one.container)
}

func (m meter) makeTemplate(ctx context.Context) error {
	t := &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Name: template}}
	t.Spec.Spec.Devices.Requests = []resourceapi.DeviceRequest{
		{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: driver.DriverName}},
	}
	_, err := m.client.ResourceV1().ResourceClaimTemplates(namespace).Create(ctx, t, metav1.CreateOptions{})
	return err
}

func pod(name string, claimed bool) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}}
	p.Spec.RestartPolicy = corev1.RestartPolicyNever
	// With 0 the API server would delete the Pod and its claim before the kubelet unprepares the GPU.
	// The scheduler could then allocate that GPU to the next Pod too early.
	p.Spec.TerminationGracePeriodSeconds = ptr.To[int64](1)
	p.Spec.Containers = []corev1.Container{{Name: "main", Image: cluster.TestImage, Command: []string{"sleep", "infinity"}}}
	if claimed {
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To(template)}}
		p.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	}
	return p
}

// start starts a Pod, measures its start, and deletes it. claimed says whether the Pod has a claim
// for a GPU.
func (m meter) start(ctx context.Context, name string, claimed bool) (started, error) {
	ctx, cancel := context.WithTimeout(ctx, podTimeout)
	defer cancel()
	pods := m.client.CoreV1().Pods(namespace)
	seen, err := pods.Watch(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()})
	if err != nil {
		return started{}, err
	}
	defer seen.Stop()
	before, err := m.containers(ctx)
	if err != nil {
		return started{}, err
	}
	begin := time.Now()
	if _, err := pods.Create(ctx, pod(name, claimed), metav1.CreateOptions{}); err != nil {
		return started{}, err
	}
	err = await(ctx, seen, func(e watch.Event) bool {
		p, ok := e.Object.(*corev1.Pod)
		return ok && len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].State.Running != nil
	})
	took := time.Since(begin)
	if err != nil {
		return started{}, fmt.Errorf("wait until Pod %s runs: %w", name, err)
	}
	after, err := m.containers(ctx)
	if err != nil {
		return started{}, err
	}
	if err := pods.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return started{}, err
	}
	if err := await(ctx, seen, func(e watch.Event) bool { return e.Type == watch.Deleted }); err != nil {
		return started{}, fmt.Errorf("wait until Pod %s has ended: %w", name, err)
	}
	return started{pod: took, container: after - before}, nil
}

// containers returns the total time so far that the runtime took to create and start containers. It
// comes from the kubelet's metrics.
func (m meter) containers(ctx context.Context) (time.Duration, error) {
	text, err := m.client.CoreV1().RESTClient().Get().Resource("nodes").Name(nodeName).SubResource("proxy", "metrics").DoRaw(ctx)
	if err != nil {
		return 0, fmt.Errorf("read the kubelet's metrics: %w", err)
	}
	var sum time.Duration
	for _, operation := range []string{"create_container", "start_container"} {
		metric := fmt.Sprintf("\nkubelet_runtime_operations_duration_seconds_sum{operation_type=%q} ", operation)
		_, value, found := strings.Cut(string(text), metric)
		if !found {
			continue // no such operation yet
		}
		value, _, _ = strings.Cut(value, "\n")
		seconds, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return 0, fmt.Errorf("read the kubelet's metrics: %w", err)
		}
		sum += time.Duration(seconds * float64(time.Second))
	}
	return sum, nil
}

// addSpecs puts the CDI specs of many invented claims on the node. The specs have another vendor,
// so the plugin ignores them.
func (m meter) addSpecs(ctx context.Context) error {
	var files bytes.Buffer
	archive := tar.NewWriter(&files)
	for i := range otherClaims {
		uid := types.UID(fmt.Sprintf("%08d-0000-4000-8000-000000000000", i))
		path := fmt.Sprintf("/dev/nvidia%d", i%8)
		edits := specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: path, HostPath: path}}}
		_, spec, err := cdi.Render(specs.ContainerEdits{}, []specs.Device{
			{Name: cdi.ClaimDeviceName(uid, "gpu-0000-1b-00-0", nil), ContainerEdits: edits},
		})
		if err != nil {
			return err
		}
		spec = bytes.ReplaceAll(spec, []byte(cdi.Vendor+"/"), []byte(otherVendor+"/"))
		header := &tar.Header{Name: fmt.Sprintf("%s-claim_%s.json", otherVendor, uid), Mode: 0o600, Size: int64(len(spec)), Typeflag: tar.TypeReg}
		if err := archive.WriteHeader(header); err != nil {
			return err
		}
		if _, err := archive.Write(spec); err != nil {
			return err
		}
	}
	if err := archive.Close(); err != nil {
		return err
	}
	if err := m.node.ExecStreams(ctx, &files, io.Discard, os.Stderr, "tar", "-x", "-C", cdiDir); err != nil {
		return fmt.Errorf("put CDI specs on the node: %w", err)
	}
	return m.settle(ctx)
}

// removeSpecs removes the specs that addSpecs put on the node.
func (m meter) removeSpecs(ctx context.Context) error {
	if _, err := m.node.Exec(ctx, "find", cdiDir, "-name", otherVendor+"-claim_*.json", "-delete"); err != nil {
		return fmt.Errorf("remove CDI specs from the node: %w", err)
	}
	return m.settle(ctx)
}

// settle waits until the container runtime has read all changed specs: until it has used almost no
// processor time for a second.
func (m meter) settle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, podTimeout)
	defer cancel()
	for before := -1; ; {
		// Fields 14 and 15 of /proc/PID/stat are the user and kernel time of the process, in hundredths
		// of a second.
		text, err := m.node.Exec(ctx, "sh", "-c", `for p in /proc/[0-9]*; do
			read -r name 2>/dev/null <$p/comm && [ "$name" = containerd ] && cut -d' ' -f14,15 $p/stat
			done; true`)
		if err != nil {
			return fmt.Errorf("read the container runtime's processor time: %w", err)
		}
		now := 0
		for _, field := range strings.Fields(text) {
			n, err := strconv.Atoi(field)
			if err != nil {
				return fmt.Errorf("read the container runtime's processor time: %w", err)
			}
			now += n
		}
		if before >= 0 && now-before <= 5 {
			return nil
		}
		before = now
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return fmt.Errorf("the container runtime is not idle: %w", ctx.Err())
		}
	}
}

func await(ctx context.Context, seen watch.Interface, is func(watch.Event) bool) error {
	for {
		select {
		case e, open := <-seen.ResultChan():
			if !open {
				return errors.New("the API server has ended the watch")
			}
			if is(e) {
				return nil
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

package e2e

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// load is a set of users, each of whom keeps creating a Pod with a GPU, checks what the Pod sees,
// and deletes it.
type load struct {
	u       tenant
	cancel  context.CancelFunc
	workers sync.WaitGroup
	done    map[int]*atomic.Int64
	uuids   map[string]string // by pool/device
}

// load starts users that create Pods. perNode is the number of users for each node.
func (u tenant) load(perNode map[string]int) *load {
	u.t.Helper()
	ctx, cancel := context.WithCancel(u.t.Context())
	l := &load{u: u, cancel: cancel, done: map[int]*atomic.Int64{}, uuids: map[string]string{}}
	for node := range perNode {
		for name, device := range u.world.gpus(u.t, node) {
			l.uuids[node+"/"+name] = *device.Attributes["uuid"].StringValue
		}
	}
	for node, n := range perNode {
		for range n {
			worker, done := len(l.done), &atomic.Int64{}
			l.done[worker] = done
			l.workers.Go(func() {
				for i := 0; ctx.Err() == nil; i++ {
					if err := l.use(ctx, fmt.Sprintf("load-%d-%d", worker, i), node); err != nil {
						if ctx.Err() == nil {
							u.t.Errorf("user %d: %v", worker, err)
						}
						return
					}
					done.Add(1)
				}
			})
		}
	}
	u.t.Cleanup(l.stop)
	return l
}

// completed waits until every user has finished n more Pods.
func (l *load) completed(n int64) {
	l.u.t.Helper()
	before := map[int]int64{}
	for worker, done := range l.done {
		before[worker] = done.Load()
	}
	eventually(l.u.t, 90*time.Second, fmt.Sprintf("every user has had %d further Pods", n), func() (bool, string) {
		for worker, done := range l.done {
			if done.Load() < before[worker]+n || l.u.t.Failed() {
				return false, fmt.Sprintf("user %d: %d", worker, done.Load())
			}
		}
		return true, ""
	})
}

// stop ends the users. Pods that still run are deleted with the namespace.
func (l *load) stop() {
	l.cancel()
	l.workers.Wait()
	var all int64
	for _, done := range l.done {
		all += done.Swap(0)
	}
	if all > 0 {
		l.u.t.Logf("%d Pods came and went", all)
	}
}

// use creates a Pod, checks that it lists exactly the GPUs of its claim, and deletes it.
func (l *load) use(ctx context.Context, name, node string) error {
	pods := l.u.Client.CoreV1().Pods(l.u.namespace)
	_, err := pods.Create(ctx, loadPod(name, node), metav1.CreateOptions{})
	if err != nil {
		return err
	}
	pod, err := l.await(ctx, name, func(p *corev1.Pod) bool { return isReady(p) || p.Status.Phase == corev1.PodFailed })
	if err != nil {
		return err
	}
	allocated, err := l.allocated(ctx, pod)
	if err != nil {
		return err
	}
	// The container's output may reach the log a moment after the Pod is ready.
	var seen []string
	err = wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, enough, true, func(ctx context.Context) (bool, error) {
		printed, err := pods.GetLogs(name, &corev1.PodLogOptions{}).DoRaw(ctx)
		seen = uuidForm.FindAllString(string(printed), -1)
		return len(seen) > 0, err
	})
	if err != nil {
		return fmt.Errorf("Pod %s: what it printed: %w", name, err)
	}
	if !slices.Equal(seen, allocated) {
		return fmt.Errorf("Pod %s sees %q, it was allocated %v", name, seen, allocated)
	}
	if err := pods.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return err
	}
	_, err = l.await(ctx, name, func(p *corev1.Pod) bool { return false })
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// allocated returns the UUIDs of the GPUs that a Pod's claim was allocated, as the ResourceSlices
// published them when the load began.
func (l *load) allocated(ctx context.Context, pod *corev1.Pod) ([]string, error) {
	if len(pod.Status.ResourceClaimStatuses) == 0 {
		return nil, fmt.Errorf("Pod %s: %s: no claim: %+v", pod.Name, pod.Status.Phase, pod.Status.ContainerStatuses)
	}
	claim, err := l.u.Client.ResourceV1().
		ResourceClaims(l.u.namespace).
		Get(ctx, *pod.Status.ResourceClaimStatuses[0].ResourceClaimName, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	if claim.Status.Allocation == nil {
		return nil, fmt.Errorf("Pod %s runs and claim %s is not allocated", pod.Name, claim.Name)
	}
	var uuids []string
	for _, r := range claim.Status.Allocation.Devices.Results {
		uuids = append(uuids, l.uuids[r.Pool+"/"+r.Device])
	}
	return uuids, nil
}

func (l *load) await(ctx context.Context, name string, ok func(*corev1.Pod) bool) (*corev1.Pod, error) {
	limit, cancel := context.WithTimeout(ctx, enough)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		p, err := l.u.Client.CoreV1().Pods(l.u.namespace).Get(limit, name, metav1.GetOptions{})
		if err != nil || ok(p) {
			return p, err
		}
		select {
		case <-limit.Done():
			return p, fmt.Errorf("Pod %s after %s: %s %+v", name, enough, p.Status.Phase, p.Status.Conditions)
		case <-tick.C:
		}
	}
}

func loadPod(name, node string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			RestartPolicy: corev1.RestartPolicyNever, TerminationGracePeriodSeconds: ptr.To(int64(1)),
			NodeSelector:   map[string]string{corev1.LabelHostname: node},
			ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To(gpusTemplate(1))}},
			Containers: []corev1.Container{{
				Name: "main", Image: cluster.TestImage, ImagePullPolicy: corev1.PullNever,
				Command:   []string{"sh", "-c", "nvidia-smi -L; trap 'exit 0' TERM; sleep infinity & wait"},
				Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpu"}}},
			}},
		},
	}
}

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

const (
	namespace = metav1.NamespaceDefault
	template  = "one-gpu"
	// patience is how long a Pod may take to start, or to end.
	patience = 2 * time.Minute
)

// meter starts Pods.
type meter struct{ client kubernetes.Interface }

func (m meter) makeTemplate(ctx context.Context) error {
	t := &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Name: template}}
	t.Spec.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: driver.DriverName}}}
	_, err := m.client.ResourceV1().ResourceClaimTemplates(namespace).Create(ctx, t, metav1.CreateOptions{})
	return err
}

func pod(name string, claimed bool) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}}
	p.Spec.RestartPolicy = corev1.RestartPolicyNever
	// With 0 the Pod and its claim would be gone before the kubelet has given back the GPU, and the next Pod would be sent there too early.
	p.Spec.TerminationGracePeriodSeconds = ptr.To[int64](1)
	p.Spec.Containers = []corev1.Container{{Name: "main", Image: cluster.TestImage, Command: []string{"sleep", "infinity"}}}
	if claimed {
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To(template)}}
		p.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	}
	return p
}

// start is how long it takes from a Pod's creation until it is seen to run. Nothing of it is left then.
func (m meter) start(ctx context.Context, name string, claimed bool) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	pods := m.client.CoreV1().Pods(namespace)
	seen, err := pods.Watch(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()})
	if err != nil {
		return 0, err
	}
	defer seen.Stop()
	begin := time.Now()
	if _, err := pods.Create(ctx, pod(name, claimed), metav1.CreateOptions{}); err != nil {
		return 0, err
	}
	err = await(ctx, seen, func(e watch.Event) bool {
		p, ok := e.Object.(*corev1.Pod)
		return ok && len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].State.Running != nil
	})
	took := time.Since(begin)
	if err != nil {
		return 0, fmt.Errorf("wait until Pod %s runs: %w", name, err)
	}
	if err := pods.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return 0, err
	}
	if err := await(ctx, seen, func(e watch.Event) bool { return e.Type == watch.Deleted }); err != nil {
		return 0, fmt.Errorf("wait until Pod %s has ended: %w", name, err)
	}
	return took, nil
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

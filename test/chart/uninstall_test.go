package chart

import (
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
)

func TestUninstallHook(t *testing.T) {
	objects, _ := render(t)
	t.Run("gets its rights first, and leaves only a failed Job", func(t *testing.T) {
		for _, object := range objects {
			m := object.(metav1.Object)
			if m.GetName() != uninstaller {
				continue
			}
			a := m.GetAnnotations()
			_, job := object.(*batchv1.Job)
			weight, policy := "-10", "before-hook-creation,hook-succeeded,hook-failed"
			if job {
				weight, policy = "0", "before-hook-creation,hook-succeeded"
			}
			if a["helm.sh/hook"] != "pre-delete" || a["helm.sh/hook-weight"] != weight || a["helm.sh/hook-delete-policy"] != policy {
				t.Errorf("%T: annotations %v", object, a)
			}
		}
	})
	t.Run("is an ordinary unprivileged Pod that tries once", func(t *testing.T) {
		job := only[*batchv1.Job](t, objects, uninstaller)
		pod := job.Spec.Template.Spec
		security := pod.Containers[0].SecurityContext
		if security.Privileged != nil || *security.AllowPrivilegeEscalation || !*pod.SecurityContext.RunAsNonRoot ||
			len(pod.Volumes) != len(tokens(pod)) || *job.Spec.BackoffLimit != 0 {
			t.Errorf("%+v", job.Spec)
		}
	})
	t.Run("sets its user, except on OpenShift, which assigns one", func(t *testing.T) {
		onOpenShift, _ := render(t, "--set", "openshift.privilegedSCC=true")
		for _, c := range []struct {
			objects     []runtime.Object
			user, group *int64
		}{{objects, ptr.To(int64(65532)), ptr.To(int64(65532))}, {onOpenShift, nil, nil}} {
			pod := only[*batchv1.Job](t, c.objects, uninstaller).Spec.Template.Spec
			want := &corev1.PodSecurityContext{
				RunAsNonRoot: ptr.To(true), RunAsUser: c.user, RunAsGroup: c.group,
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			}
			if diff := cmp.Diff(want, pod.SecurityContext); diff != "" {
				t.Error(diff)
			}
			if own := pod.Containers[0].SecurityContext; own.RunAsUser != nil || own.RunAsGroup != nil {
				t.Errorf("the container says otherwise: %+v", own)
			}
		}
	})
	t.Run("runs on any Linux node that answers", func(t *testing.T) {
		pod := only[*batchv1.Job](t, objects, uninstaller).Spec.Template.Spec
		want := []corev1.Toleration{{Key: "node-role.kubernetes.io/control-plane", Operator: corev1.TolerationOpExists,
			Effect: corev1.TaintEffectNoSchedule}}
		if diff := cmp.Diff(want, pod.Tolerations); diff != "" {
			t.Error(diff)
		}
		narrowed, _ := render(t, "--set", "nodeSelector.gpu=yes")
		if got := only[*batchv1.Job](t, narrowed, uninstaller).Spec.Template.Spec.NodeSelector; !maps.Equal(got, onLinux) {
			t.Errorf("with the plugin's selector gpu=yes the hook has %v", got)
		}
		own, _ := render(t, "--set", "uninstall.nodeSelector.a=b", "--set-json", `uninstall.tolerations=[{"key":"x","operator":"Exists"}]`)
		pod = only[*batchv1.Job](t, own, uninstaller).Spec.Template.Spec
		if len(pod.Tolerations) != 1 || pod.Tolerations[0].Key != "x" || !maps.Equal(pod.NodeSelector,
			map[string]string{"kubernetes.io/os": "linux", "a": "b"}) {
			t.Errorf("tolerations %v, selector %v", pod.Tolerations, pod.NodeSelector)
		}
	})
	t.Run("forces only with uninstall.force", func(t *testing.T) {
		forced, _ := render(t, "--set", "uninstall.force=true")
		if slices.Contains(jobArgs(t, objects), "--force") || !slices.Contains(jobArgs(t, forced), "--force") {
			t.Errorf("args %v, forced %v", jobArgs(t, objects), jobArgs(t, forced))
		}
	})
}

func jobArgs(t *testing.T, objects []runtime.Object) []string {
	t.Helper()
	return only[*batchv1.Job](t, objects, uninstaller).Spec.Template.Spec.Containers[0].Args
}

package chart

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// supervisor is the name of the DaemonSet that runs the MPS daemons.
const supervisor = "gpus-gpu-dra-driver-mps"

// withMPS enables the MPS supervisor.
var withMPS = []string{"--set", "mps.enabled=true"}

func TestSupervisorDaemonSet(t *testing.T) {
	objects, _ := render(t, withMPS...)
	set := only[*appsv1.DaemonSet](t, objects, supervisor)
	of := only[*appsv1.DaemonSet](t, objects, plugin)
	pod := set.Spec.Template.Spec
	container := pod.Containers[0]

	t.Run("is updated only by deleting its Pod", func(t *testing.T) {
		if set.Spec.UpdateStrategy.Type != appsv1.OnDeleteDaemonSetStrategyType {
			t.Errorf("update strategy %s", set.Spec.UpdateStrategy.Type)
		}
		if container.LivenessProbe != nil || container.StartupProbe != nil {
			t.Error("a probe may kill it, and with it every client's daemon")
		}
		if limits := container.Resources.Limits; len(limits) > 0 {
			t.Errorf("limits %v", limits)
		}
	})
	t.Run("does not depend on the plugin's settings", func(t *testing.T) {
		changed, _ := render(t, "--set", "mps.enabled=true", "--set", "logVerbosity=5", "--set-json", inFractions, "--set",
			"mig.policy=static", "--set", "metrics.port=9090")
		if diff := cmp.Diff(set.Spec, only[*appsv1.DaemonSet](t, changed, supervisor).Spec); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("sees its clients' processes, and the GPUs' device nodes", func(t *testing.T) {
		if !pod.HostPID || container.SecurityContext.Privileged == nil || !*container.SecurityContext.Privileged {
			t.Errorf("hostPID %t, %+v", pod.HostPID, container.SecurityContext)
		}
	})
	t.Run("has no token, no port and no host network", func(t *testing.T) {
		if pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken || len(container.Ports) > 0 ||
			pod.HostNetwork || pod.HostIPC {
			t.Errorf("%+v", pod)
		}
		if slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.HostPath == nil }) {
			t.Errorf("volumes %+v", pod.Volumes)
		}
	})
	t.Run("runs on the plugin's nodes", func(t *testing.T) {
		theirs := of.Spec.Template.Spec
		type place struct {
			Selector    map[string]string
			Tolerations []corev1.Toleration
			Priority    string
		}
		if diff := cmp.Diff(place{theirs.NodeSelector, theirs.Tolerations, theirs.PriorityClassName}, place{pod.NodeSelector,
			pod.Tolerations, pod.PriorityClassName}); diff != "" {
			t.Error(diff)
		}
		if container.Image != theirs.Containers[0].Image {
			t.Errorf("image %s, the plugin's is %s", container.Image, theirs.Containers[0].Image)
		}
	})
	t.Run("has other labels than the plugin", func(t *testing.T) {
		for _, c := range []struct{ selects, selected *appsv1.DaemonSet }{{set, of}, {of, set}} {
			selector, err := metav1.LabelSelectorAsSelector(c.selects.Spec.Selector)
			if err != nil {
				t.Fatal(err)
			}
			if !selector.Matches(labels(c.selects.Spec.Template.Labels)) || selector.Matches(labels(c.selected.Spec.Template.Labels)) {
				t.Errorf("selector %s of %s", selector, c.selects.Name)
			}
		}
	})
	t.Run("leaves no termination message on the host's /dev", func(t *testing.T) {
		if strings.HasPrefix(container.TerminationMessagePath, "/dev/") || container.TerminationMessagePath == "" {
			t.Errorf("terminationMessagePath %q", container.TerminationMessagePath)
		}
	})
	t.Run("is no hook, so it outlives the plugin's uninstallation", func(t *testing.T) {
		if len(set.Annotations) != 0 {
			t.Errorf("annotations %v", set.Annotations)
		}
	})
}

// A path that the plugin, the supervisor and the container runtime share must name the same
// directory for all three.
func TestSupervisorMountsHostPaths(t *testing.T) {
	for name, args := range map[string][]string{
		"defaults": nil, "everything": everything, "test cluster": {"--values", "../e2e/values.yaml"},
	} {
		t.Run(name, func(t *testing.T) {
			args := slices.Concat(args, withMPS)
			objects, _ := render(t, args...)
			pod := only[*appsv1.DaemonSet](t, objects, supervisor).Spec.Template.Spec
			given := flags(pod.Containers[0].Args)
			onHost := func(inside string) string {
				for _, m := range pod.Containers[0].VolumeMounts {
					rest, below := strings.CutPrefix(inside, m.MountPath)
					if !below || rest != "" && rest[0] != '/' {
						continue
					}
					i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
					return filepath.Join(pod.Volumes[i].HostPath.Path, rest)
				}
				return ""
			}
			for flag, host := range map[string]string{"--plugin-dir": given["--plugin-dir"], "--driver-root-mount": given["--driver-root"]} {
				if inside := given[flag]; inside == "" || onHost(inside) != host {
					t.Errorf("%s=%s is %q on the host, want %q", flag, inside, onHost(inside), host)
				}
			}
			_, text := render(t, append(args, "-s", "templates/configmap.yaml")...)
			for _, want := range []string{"pluginDir: \"" + given["--plugin-dir"] + `"`, "driverRoot: \"" + given["--driver-root"] + `"`} {
				if !strings.Contains(text, want) {
					t.Errorf("the plugin's configuration has no %s:\n%s", want, text)
				}
			}
			if probe := pod.Containers[0].ReadinessProbe.Exec.Command; !slices.Contains(probe, "--plugin-dir="+given["--plugin-dir"]) {
				t.Errorf("the probe runs %q", probe)
			}
		})
	}
}

func flags(args []string) map[string]string {
	given := map[string]string{}
	for _, arg := range args {
		name, value, _ := strings.Cut(arg, "=")
		given[name] = value
	}
	return given
}

// The supervisor is privileged and in the host's PID namespace. So it must be off unless the values
// enable MPS, or shares with a limited part of memory and compute. The plugin's configuration must
// say whether the supervisor exists.
func TestSupervisorIsOptIn(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		want bool
	}{
		"by default": {nil, false},
		"enabled":    {withMPS, true},
		"fractions":  {[]string{"--set-json", inFractions}, true},
		"fractions of one model": {
			[]string{"--set-json", `shares=[{"kind":"shares","count":2},{"gpus":"NVIDIA L40S","kind":"fractions"}]`}, true,
		},
		"fractions, and MPS disabled": {[]string{"--set-json", inFractions, "--set", "mps.enabled=false"}, true},
		"plain shares":                {[]string{"--set-json", twoShares}, false},
		"a model of that name":        {[]string{"--set-json", `shares=[{"gpus":"NVIDIA fractions","kind":"shares","count":2}]`}, false},
		"a model named like the kind": {[]string{"--set-json", `shares=[{"gpus":"fractions","kind":"off"}]`}, false},
	} {
		t.Run(name, func(t *testing.T) {
			objects, text := render(t, c.args...)
			named := slices.DeleteFunc(objects, func(o runtime.Object) bool { return o.(metav1.Object).GetName() != supervisor })
			if want := map[bool]int{true: 2}[c.want]; len(named) != want { // the DaemonSet and its NetworkPolicy
				t.Errorf("%d objects are named after the supervisor, want %d", len(named), want)
			}
			if want := fmt.Sprintf("\n    mps: %t\n", c.want); !strings.Contains(text, want) {
				t.Errorf("the plugin's configuration has no %q", want)
			}
		})
	}
}

func TestSupervisorSettings(t *testing.T) {
	objects, _ := render(t, "--set", "mps.enabled=true", "--set", "mps.selinuxLabel=system_u:object_r:container_file_t:s0", "--set",
		"mps.logVerbosity=4", "--set", "devRoot=/driver-root/driver", "--set", "mps.sharedMemoryMiB=2048")
	given := flags(only[*appsv1.DaemonSet](t, objects, supervisor).Spec.Template.Spec.Containers[0].Args)
	for flag, want := range map[string]string{"--selinux-label": "system_u:object_r:container_file_t:s0", "--v": "4",
		"--dev-root": "/driver-root/driver", "--shared-memory": "2048"} {
		if given[flag] != want {
			t.Errorf("%s=%s, want %s", flag, given[flag], want)
		}
	}
	byDefault, _ := render(t, withMPS...)
	if size := flags(only[*appsv1.DaemonSet](t, byDefault, supervisor).Spec.Template.Spec.Containers[0].Args)["--shared-memory"]; size != "0" {
		t.Errorf("by default clients have %s MiB, want half of the memory", size)
	}
	for set, want := range map[string]string{
		"mps.selinuxLabel=container_file_t": "selinuxLabel", "mps.startTimeout=45s": "startTimeout",
	} {
		if _, err := template(t, "--set", set); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("--set %s: %v, want an error that names %s", set, err, want)
		}
	}
}

// OpenShift lets a Pod be privileged if its account has a right to the privileged SCC. The chart
// must give this right to no account but the plugin's.
func TestOpenShiftConstraintCoversOneAccount(t *testing.T) {
	objects, _ := render(t, "--set", "openshift.privilegedSCC=true", "--set", "mps.enabled=true")
	binding := only[*rbacv1.RoleBinding](t, objects, plugin+"-privileged")
	if binding.RoleRef.Name != "system:openshift:scc:privileged" || len(binding.Subjects) != 1 {
		t.Errorf("%+v", binding)
	}
	for _, name := range []string{plugin, supervisor} {
		if account := only[*appsv1.DaemonSet](t, objects, name).Spec.Template.Spec.ServiceAccountName; account != binding.Subjects[0].Name {
			t.Errorf("%s runs as %s, the right is %s's", name, account, binding.Subjects[0].Name)
		}
	}
}

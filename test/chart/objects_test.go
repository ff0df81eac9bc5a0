package chart

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
)

// These are values of shares, for helm's --set-json.
const (
	inFractions = `shares=[{"kind":"fractions"}]`
	twoShares   = `shares=[{"kind":"shares","count":2}]`
	fourShares  = `shares=[{"kind":"shares","count":4}]`
)

// everything is the set of values that enables all features that are off by default.
var everything = []string{
	"--set", "metrics.service.enabled=true", "--set", "metrics.podMonitor.enabled=true", "--set", "metrics.podMonitor.labels.team=gpu",
	"--set", "metrics.prometheusRule.enabled=true", "--set", "metrics.dashboards.enabled=true",
	"--set", "criticalPodsQuota.enabled=true", "--set", "deviceClasses.gpu.extendedResourceName=nvidia.com/gpu",
	"--set-json", `deviceClasses.migProfiles=[{"profile":"1g.10gb"},{"profile":"1g.10gb+me"}]`, "--set-json",
	`mig.rules=[{"gpus":"NVIDIA A100*","policy":"dynamic"},{"gpus":"NVIDIA H100*","policy":"adopt","profiles":["1g.10gb","1g.10gb+me"]}]`,
	"--set", "openshift.privilegedSCC=true", "--set", "mps.enabled=true", "--set", "passthrough.rules[0].enabled=true",
	"--set-json", `networkPolicy={"metricsFrom":[{"podSelector":{"matchLabels":{"app":"prometheus"}}}],` +
		`"apiServer":[{"cidr":"10.0.0.10/32","port":6443},{"cidr":"fd00::10/128","port":6443}]}`,
	"--set", "image.digest=sha256:" + strings.Repeat("0a", 32), "--set", "imagePullSecrets[0].name=pull",
	"--set", "driverRoot=/run/nvidia/driver", "--set", "devRoot=/driver-root/driver", "--set", "hookPath=/opt/nvidia/bin/nvidia-cdi-hook",
	"--set", "kubeletRootDir=/var/lib/k0s/kubelet", "--set", "criSocket=/run/k0s/containerd.sock",
	"--set", "nodeSelector.gpu=yes", "--set", "extraArgs[0]=--claim-grace=10m", "--set", "extraEnv[0].name=A", "--set",
	"extraEnv[0].value=b",
	"--set", "extraVolumes[0].name=more", "--set", "extraVolumes[0].hostPath.path=/more",
	"--set", "extraVolumeMounts[0].name=more", "--set", "extraVolumeMounts[0].mountPath=/more",
	"--set", "podLabels.a=b", "--set", "podAnnotations.a=b", "--set", "serviceAccount.annotations.a=b", "--set", "uninstall.force=true",
	"--set-json", `affinity={"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{` +
		`"nodeSelectorTerms":[{"matchExpressions":[{"key":"a","operator":"Exists"}]}]}}}`,
}

var onLinux = map[string]string{"kubernetes.io/os": "linux"}

// nothing is the set of values that disables all features that can be disabled.
var nothing = []string{
	"--set", "rbac.create=false", "--set", "serviceAccount.create=false", "--set", "serviceAccount.name=mine", "--set",
	"admissionPolicy.enabled=false", "--set", "networkPolicy.enabled=false",
	"--set", "deviceClasses.gpu.enabled=false", "--set", "deviceClasses.mig.enabled=false", "--set", "uninstall.enabled=false",
	"--set", "criSocket=", "--set", "priorityClassName=",
	"--set-json", "tolerations=[]", "--set", "claimStatus.enabled=false",
}

var valueSets = map[string][]string{
	"defaults":     nil,
	"everything":   everything,
	"nothing":      nothing,
	"test cluster": {"--values", "../e2e/values.yaml"},
}

func TestValueSetsRenderValidObjects(t *testing.T) {
	for name, args := range valueSets {
		t.Run(name, func(t *testing.T) {
			objects, text := render(t, args...)
			if len(objects) < 2 {
				t.Errorf("rendered %d objects:\n%s", len(objects), text)
			}
			for _, object := range objects {
				m := object.(metav1.Object)
				switch object.(type) {
				case *corev1.ServiceAccount, *corev1.ConfigMap, *corev1.Service, *corev1.ResourceQuota, *appsv1.DaemonSet, *rbacv1.Role,
					*rbacv1.RoleBinding, *batchv1.Job, *networkingv1.NetworkPolicy:
					if m.GetNamespace() != namespace {
						t.Errorf("%T %s is in namespace %q, want the release's", object, m.GetName(), m.GetNamespace())
					}
				default:
					if m.GetNamespace() != "" {
						t.Errorf("%T %s has no namespace, but says %q", object, m.GetName(), m.GetNamespace())
					}
				}
			}
		})
	}
}

// The plugin must accept the two files in the ConfigMap. It decodes strictly, so an unknown key or
// an invalid value would keep every Pod from starting.
func TestPluginAcceptsRenderedConfiguration(t *testing.T) {
	for name, args := range valueSets {
		t.Run(name, func(t *testing.T) {
			objects, _ := render(t, args...)
			dir := t.TempDir()
			for name, content := range only[*corev1.ConfigMap](t, objects, plugin).Data {
				content = strings.ReplaceAll(content, "/etc/gpu-dra-driver/", dir+"/")
				if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			path := filepath.Join(dir, "config.yaml")
			container := only[*appsv1.DaemonSet](t, objects, plugin).Spec.Template.Spec.Containers[0]
			environ := map[string]string{"GPU_DRA_CONFIG": path}
			for _, e := range container.Env {
				if e.ValueFrom != nil {
					environ[e.Name] = "node-1"
				}
			}
			lookupEnv := func(name string) (string, bool) { v, ok := environ[name]; return v, ok }
			cfg, err := config.Load("gpu-kubelet-plugin", container.Args, lookupEnv, nil)
			if err != nil {
				t.Fatal(err)
			}
			if cfg.NodeName != "node-1" || cfg.Namespace != "node-1" || cfg.PodName != "node-1" || cfg.PodUID != "node-1" {
				t.Errorf("the environment lacks the plugin's node or Pod: %+v", cfg)
			}
			if cfg.DaemonSetName != plugin {
				t.Errorf("daemonsetName is %q, want %q", cfg.DaemonSetName, plugin)
			}
			checkMounts(t, cfg, only[*appsv1.DaemonSet](t, objects, plugin).Spec.Template.Spec)
		})
	}
}

// checkMounts fails the test if the Pod does not mount a path that the configuration names. A path
// that must be the same on the host and in the Pod must also be mounted from that path of the host.
func checkMounts(t *testing.T, cfg *config.Config, pod corev1.PodSpec) {
	t.Helper()
	host := func(inside string) string {
		best, source := "", ""
		for _, mount := range pod.Containers[0].VolumeMounts {
			if inside != mount.MountPath && !strings.HasPrefix(inside, strings.TrimSuffix(mount.MountPath, "/")+"/") ||
				len(mount.MountPath) < len(best) {
				continue
			}
			for _, volume := range pod.Volumes {
				if volume.Name == mount.Name && volume.HostPath != nil {
					best, source = mount.MountPath, volume.HostPath.Path
				}
			}
		}
		return filepath.Join(source, strings.TrimPrefix(inside, best))
	}
	for what, path := range map[string]string{
		"plugin directory": cfg.PluginDir, "registration directory": cfg.RegistrarDir, "CDI root": cfg.CDIRoot, "hook": cfg.HookPath,
	} {
		if got := host(path); got != path {
			t.Errorf("%s: %s in the container is %q on the host, want the same path", what, path, got)
		}
	}
	if got := host(cfg.DriverRootMount); got != cfg.DriverRoot {
		t.Errorf("driver root: %s in the container is %q on the host, want %s", cfg.DriverRootMount, got, cfg.DriverRoot)
	}
	if !strings.HasPrefix(cfg.SysfsRoot, "/host/") || !strings.HasPrefix(cfg.ProcRoot, "/host/") {
		t.Errorf("sysfs and procfs are not the host's: %s, %s", cfg.SysfsRoot, cfg.ProcRoot)
	}
}

func TestPluginDaemonSet(t *testing.T) {
	objects, _ := render(t)
	set := only[*appsv1.DaemonSet](t, objects, plugin)
	pod := set.Spec.Template.Spec
	container := pod.Containers[0]

	t.Run("runs on every Linux node, with any labels and taints", func(t *testing.T) {
		if !maps.Equal(pod.NodeSelector, onLinux) || pod.Affinity != nil {
			t.Errorf("selector %v, affinity %v", pod.NodeSelector, pod.Affinity)
		}
		if diff := cmp.Diff([]corev1.Toleration{{Operator: corev1.TolerationOpExists}}, pod.Tolerations); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("selects its own Pods and not the uninstall Job's", func(t *testing.T) {
		job := only[*batchv1.Job](t, objects, uninstaller)
		selector, err := metav1.LabelSelectorAsSelector(set.Spec.Selector)
		if err != nil {
			t.Fatal(err)
		}
		if !selector.Matches(labels(set.Spec.Template.Labels)) || selector.Matches(labels(job.Spec.Template.Labels)) {
			t.Errorf("selector %s", selector)
		}
	})
	t.Run("starts the new Pod before the old one ends, without a host port", func(t *testing.T) {
		update := set.Spec.UpdateStrategy.RollingUpdate
		if update == nil || update.MaxSurge.IntValue() != 1 || update.MaxUnavailable.IntValue() != 0 {
			t.Errorf("rolling update %v", update)
		}
		if pod.HostNetwork || slices.ContainsFunc(container.Ports, func(p corev1.ContainerPort) bool { return p.HostPort != 0 }) {
			t.Error("uses the host's network")
		}
	})
	t.Run("sees drivers and runtimes that are mounted or restarted later", func(t *testing.T) {
		for _, name := range []string{"driver-root", "plugins", "cri"} {
			i := slices.IndexFunc(container.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == name })
			if i < 0 || container.VolumeMounts[i].MountPropagation == nil ||
				*container.VolumeMounts[i].MountPropagation != corev1.MountPropagationHostToContainer {
				t.Errorf("mount %s does not follow the host's mounts", name)
			}
		}
	})
	t.Run("leaves no termination message on the host's /dev", func(t *testing.T) {
		if strings.HasPrefix(container.TerminationMessagePath, "/dev/") || container.TerminationMessagePath == "" {
			t.Errorf("terminationMessagePath %q", container.TerminationMessagePath)
		}
	})
	t.Run("has more time to end than one call of the kubelet", func(t *testing.T) {
		if *pod.TerminationGracePeriodSeconds <= 45 {
			t.Errorf("%d s", *pod.TerminationGracePeriodSeconds)
		}
	})
	t.Run("restarts only after a change of its configuration or Pod", func(t *testing.T) {
		changed, _ := render(t, "--set", "logVerbosity=5")
		same, _ := render(t, "--set", "metrics.service.enabled=true")
		if cmp.Equal(set.Spec.Template, only[*appsv1.DaemonSet](t, changed, plugin).Spec.Template) {
			t.Error("another verbosity makes the same Pod")
		}
		if diff := cmp.Diff(set.Spec.Template, only[*appsv1.DaemonSet](t, same, plugin).Spec.Template); diff != "" {
			t.Errorf("a Service changes the Pod: %s", diff)
		}
	})
}

// The Pod must mount the parent of the driver root. Then the plugin also sees a driver root that is
// replaced after the plugin's start.
func TestDriverRootMountPropagates(t *testing.T) {
	objects, _ := render(t, "--set", "driverRoot=/run/nvidia/driver")
	pod := only[*appsv1.DaemonSet](t, objects, plugin).Spec.Template.Spec
	i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == "driver-root" })
	if pod.Volumes[i].HostPath.Path != "/run/nvidia" || *pod.Volumes[i].HostPath.Type != corev1.HostPathDirectoryOrCreate {
		t.Errorf("mounts %s (%s)", pod.Volumes[i].HostPath.Path, *pod.Volumes[i].HostPath.Type)
	}
}

// The plugin and the uninstall hook must have exactly these rights at the API server. A change of
// the rights in the chart must change this list too.
func TestPluginRights(t *testing.T) {
	objects, _ := render(t, everything...)
	want := map[string][]rbacv1.PolicyRule{
		"ClusterRole " + plugin: {
			{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceslices"}, Verbs: []string{"list", "watch", "create",
				"update", "delete", "deletecollection"}},
			{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceclaims"}, Verbs: []string{"get", "list"}},
			{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceclaims/status"}, Verbs: []string{"update", "patch"}},
			{
				APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceclaims/driver"}, ResourceNames: []string{"gpu.nvidia.com"},
				Verbs: []string{"associated-node:update", "associated-node:patch"},
			},
			{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
		},
		"Role " + plugin: {
			{APIGroups: []string{"apps"}, Resources: []string{"daemonsets"}, ResourceNames: []string{plugin}, Verbs: []string{"get"}},
		},
		"ClusterRole " + uninstaller: {
			{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceclaims"}, Verbs: []string{"list"}},
		},
		"Role " + uninstaller: {
			{APIGroups: []string{"apps"}, Resources: []string{"daemonsets"}, ResourceNames: []string{plugin}, Verbs: []string{"get", "delete"}},
			{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"list"}},
		},
	}
	got := map[string][]rbacv1.PolicyRule{}
	bound := map[string]string{}
	for _, object := range objects {
		switch o := object.(type) {
		case *rbacv1.ClusterRole:
			got["ClusterRole "+o.Name] = o.Rules
		case *rbacv1.Role:
			got["Role "+o.Name] = o.Rules
		case *rbacv1.ClusterRoleBinding:
			bound["ClusterRole "+o.RoleRef.Name] = o.Subjects[0].Namespace + "/" + o.Subjects[0].Name
		case *rbacv1.RoleBinding:
			kind := o.RoleRef.Kind
			if kind == "ClusterRole" {
				kind += " of the namespace"
			}
			bound[kind+" "+o.RoleRef.Name] = o.Subjects[0].Namespace + "/" + o.Subjects[0].Name
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("roles (-want +got):\n%s", diff)
	}
	wantBound := map[string]string{
		"ClusterRole " + plugin: namespace + "/" + plugin, "Role " + plugin: namespace + "/" + plugin,
		"ClusterRole " + uninstaller: namespace + "/" + uninstaller, "Role " + uninstaller: namespace + "/" + uninstaller,
		"ClusterRole of the namespace system:openshift:scc:privileged": namespace + "/" + plugin,
	}
	if diff := cmp.Diff(wantBound, bound); diff != "" {
		t.Errorf("bindings (-want +got):\n%s", diff)
	}
}

// With claimStatus.enabled=false, the chart renders neither the right to write claims' status nor
// the admission policy for that right.
func TestDisabledClaimStatusNeedsNoRight(t *testing.T) {
	objects, text := render(t, "--set", "claimStatus.enabled=false")
	for _, left := range []string{"resourceclaims/status", "resourceclaims/driver", "claim-status"} {
		if strings.Contains(text, left) {
			t.Errorf("the chart still renders %s", left)
		}
	}
	rights := only[*rbacv1.ClusterRole](t, objects, plugin).Rules
	everyClaim := func(r rbacv1.PolicyRule) bool {
		return slices.Contains(r.Resources, "resourceclaims") && slices.Contains(r.Verbs, "get")
	}
	if !slices.ContainsFunc(rights, everyClaim) {
		t.Errorf("the plugin cannot read claims any more: %v", rights)
	}
	only[*admissionregistrationv1.ValidatingAdmissionPolicy](t, objects, plugin) // The policy for ResourceSlices must stay.
}

func TestDeviceMetadataIsOnUnlessSwitchedOff(t *testing.T) {
	for value, want := range map[string]string{"": "deviceMetadata: true", "deviceMetadata.enabled=false": "deviceMetadata: false"} {
		arguments := []string{}
		if value != "" {
			arguments = append(arguments, "--set", value)
		}
		if _, text := render(t, arguments...); !strings.Contains(text, want) {
			t.Errorf("with %q the chart does not render %q", value, want)
		}
	}
}

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

func TestSchemaRefusesInvalidValues(t *testing.T) {
	for name, c := range map[string]struct{ set, want string }{
		"an unknown key":                {"driverroot=/x", "driverroot"},
		"an unknown nested key":         {"hostPaths.run=/run", "run"},
		"a relative path":               {"cdiRoot=run/cdi", "cdiRoot"},
		"a path with ..":                {"driverRoot=/opt/../etc", "driverRoot"},
		"a path with a final slash":     {"kubeletRootDir=/var/lib/kubelet/", "kubeletRootDir"},
		"a verbosity of letters":        {"logVerbosity=high", "logVerbosity"},
		"a rate of zero":                {"kubeAPI.qps=0", "qps"},
		"no image":                      {"image.repository=", "repository"},
		"a duration without a unit":     {"uninstall.timeout=240", "timeout"},
		"an argument without dashes":    {"extraArgs[0]=version", "extraArgs"},
		"an unknown policy":             {"mig.policy=never", "policy"},
		"profiles for static":           {"mig.profiles={1g.10gb}", "profiles"},
		"an invalid profile":            {"mig.policy=dynamic,mig.profiles={1g.10gb,small}", "profiles"},
		"a policy that is a Boolean":    {"mig.policy=false", "policy"},
		"a rule without a policy":       {"mig.rules[0].gpus=GPU-1", "policy"},
		"a rule with an unknown key":    {"mig.rules[0].policy=static,mig.rules[0].gpu=GPU-1", "gpu"},
		"policies in a string":          {"mig=dynamic", "mig"},
		"shares in a string":            {"shares=fractions", "shares"},
		"shares of no kind":             {"shares[0].kind=half", "kind"},
		"shares without a number":       {"shares[0].kind=shares", "count"},
		"fractions with a number":       {"shares[0].kind=fractions,shares[0].count=4", "shares"},
		"a single share":                {"shares[0].kind=shares,shares[0].count=1", "count"},
		"more shares than processes":    {"shares[0].kind=shares,shares[0].count=1001", "count"},
		"shares of one GPU by two ways": {"shares[0].kind=fractions,shares[0].index=0,shares[0].gpus=GPU-1", "shares"},
		"a state that does not exist":   {"health.effects.dead=none", "dead"},
		"an effect that does not exist": {"health.effects.lost=Evict", "lost"},
		"an XID without a number":       {"xidRules.gone=app", "xidRules"},
		"a weight that does not exist":  {"xidRules.79=dead", "79"},
		"a network without a prefix":    {`networkPolicy.apiServer[0].cidr=10.0.0.1,networkPolicy.apiServer[0].port=443`, "cidr"},
		"an API server without port":    {`networkPolicy.apiServer[0].cidr=10.0.0.1/32`, "port"},
		"an update strategy of MPS":     {"mps.updateStrategy.type=RollingUpdate", "updateStrategy"},
		"too little shared memory":      {"mps.sharedMemoryMiB=63", "sharedMemoryMiB"},
		"nodes by another way":          {"nodes=all", "nodes"},
		"a common label of helm's":      {`commonLabels.helm\.sh/chart=x`, "helm.sh/chart"},
		"a class's config without kind": {"deviceClasses.gpu.config.apiVersion=resource.nvidia.com/v1beta1", "config"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := template(t, "--set", c.set)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("--set %s: %v, want an error that names %s", c.set, err, c.want)
			}
		})
	}
}

// Each example in docs/examples must decode strictly, and use one request with a count for several
// equal devices. Requests that differ only in their names cost the scheduler exponential time.
func TestExamplesAreValid(t *testing.T) {
	files, err := filepath.Glob("../../docs/examples/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no examples: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, object := range decode(t, string(content)) {
				template, ok := object.(*resourceapi.ResourceClaimTemplate)
				if !ok {
					continue
				}
				requests := template.Spec.Spec.Devices.Requests
				for i, r := range requests {
					if slices.ContainsFunc(requests[:i], func(o resourceapi.DeviceRequest) bool {
						o.Name = r.Name
						return cmp.Equal(o, r)
					}) {
						t.Errorf("request %s of %s differs from another only in its name", r.Name, template.Name)
					}
				}
			}
		})
	}
}

type labels map[string]string

func (l labels) Has(key string) bool              { _, ok := l[key]; return ok }
func (l labels) Get(key string) string            { return l[key] }
func (l labels) Lookup(key string) (string, bool) { v, ok := l[key]; return v, ok }

func TestRequireValidationReachesPlugin(t *testing.T) {
	for value, want := range map[string]string{"false": "requireValidation: false", "true": "requireValidation: true"} {
		if _, text := render(t, "--set", "requireValidation="+value); !strings.Contains(text, want) {
			t.Errorf("requireValidation=%s does not render %s", value, want)
		}
	}
	if _, text := render(t); !strings.Contains(text, "requireValidation: false") {
		t.Error("validation is not off by default")
	}
}

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
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
)

// These are values of shares, for helm's --set-json.
const (
	inFractions = `shares=[{"kind":"fractions"}]`
	twoShares   = `shares=[{"kind":"shares","count":2}]`
	fourShares  = `shares=[{"kind":"shares","count":4}]`
)

var onLinux = map[string]string{"kubernetes.io/os": "linux"}

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
		"plugin directory": cfg.PluginDir, "registration directory": cfg.RegistrarDir, "CDI root": cfg.CDIRoot,
		"directory of the hooks": cfg.HookDirs[0], "last directory of the hooks": cfg.HookDirs[len(cfg.HookDirs)-1],
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

type labels map[string]string

func (l labels) Has(key string) bool              { _, ok := l[key]; return ok }
func (l labels) Get(key string) string            { return l[key] }
func (l labels) Lookup(key string) (string, bool) { v, ok := l[key]; return v, ok }

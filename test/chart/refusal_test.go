package chart

import (
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/version"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api/v1"
)

// The plugin must run on Linux nodes only, because its image is for Linux. The user's nodeSelector
// can narrow that, but not override it.
func TestPluginRunsOnLinuxOnly(t *testing.T) {
	objects, _ := render(t, "--set", "nodeSelector.gpu=yes", "--set", `nodeSelector.kubernetes\.io/os=windows`)
	want := map[string]string{"kubernetes.io/os": "linux", "gpu": "yes"}
	if got := only[*appsv1.DaemonSet](t, objects, plugin).Spec.Template.Spec.NodeSelector; !maps.Equal(got, want) {
		t.Errorf("selector %v, want %v", got, want)
	}
}

func TestRefusesHookPathOverImageFiles(t *testing.T) {
	for _, dir := range []string{
		"", "/usr", "/usr/bin", "/usr/sbin", "/bin", "/sbin", "/lib64", "/usr/lib", "/lib/x86_64-linux-gnu", "/dev", "/dev/shm", "/etc",
		"/etc/gpu-dra-driver",
		"/host", "/host/sys", "/host/cri", "/proc", "/proc/driver", "/sys", "/driver-root", "/run", "/var/run", "/var/run/cdi",
		"/var/lib/kubelet/plugins_registry",
		"/run/secrets", "/var/run/secrets/kubernetes.io/serviceaccount",
	} {
		_, err := template(t, "--set", "hookPath="+dir+"/nvidia-cdi-hook")
		if err == nil || !strings.Contains(err.Error(), "hookPath: "+max(dir, "/")+" cannot be") || !strings.Contains(err.Error(),
			"/opt/nvidia/bin") {
			t.Errorf("%s/nvidia-cdi-hook: %v, want an error that names the directory and a better one", dir, err)
		}
	}
	for _, dir := range []string{
		"/usr/local/bin", "/usr/local/nvidia/toolkit", "/opt/nvidia/bin", "/usr/lib/nvidia", "/binaries", "/etc/nvidia", "/devices",
		"/var/lib/kubelet/plugins",
	} {
		if _, err := template(t, "--set", "hookPath="+dir+"/nvidia-cdi-hook"); err != nil {
			t.Errorf("%s/nvidia-cdi-hook: %v", dir, err)
		}
	}
	for _, args := range [][]string{
		{"--set", "cdiRoot=/opt/cdi", "--set", "hookPath=/opt/cdi/hook"},
		{"--set", "kubeletRootDir=/var/lib/k0s/kubelet", "--set", "hookPath=/var/lib/k0s/kubelet/plugins_registry/hook"},
	} {
		if _, err := template(t, args...); err == nil || !strings.Contains(err.Error(), "cannot be the hook's directory") {
			t.Errorf("%v: %v", args, err)
		}
	}
}

// If the chart may not create accounts or grant rights, it must not do so for the uninstall hook
// either. The user must name an account for the hook, or disable the hook.
func TestUninstallHookMakesNoUnwantedAccount(t *testing.T) {
	for name, args := range map[string][]string{
		"no rights":  {"--set", "rbac.create=false"},
		"no account": {"--set", "serviceAccount.create=false", "--set", "serviceAccount.name=mine"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := template(t, args...)
			if err == nil || !strings.Contains(err.Error(), "Set uninstall.serviceAccountName") || !strings.Contains(err.Error(),
				"uninstall.enabled=false") {
				t.Errorf("%v, want an error that names both ways out", err)
			}
			if _, err := template(t, append(args, "--set", "uninstall.enabled=false")...); err != nil {
				t.Errorf("without the hook: %v", err)
			}
			objects, _ := render(t, append(args, "--set", "uninstall.serviceAccountName=theirs")...)
			if got := only[*batchv1.Job](t, objects, uninstaller).Spec.Template.Spec.ServiceAccountName; got != "theirs" {
				t.Errorf("the hook runs as %s", got)
			}
			for _, object := range objects {
				if _, job := object.(*batchv1.Job); !job && object.(metav1.Object).GetName() == uninstaller {
					t.Errorf("the hook makes a %T", object)
				}
			}
		})
	}
}

func TestRefusesDeviceClassOfAnotherRelease(t *testing.T) {
	owner := func(name, namespace string) map[string]string {
		return map[string]string{"meta.helm.sh/release-name": name, "meta.helm.sh/release-namespace": namespace}
	}
	const profiles = `deviceClasses.migProfiles=[{"profile":"1g.10gb"}]`
	for class, c := range map[string]struct {
		with, without []string
		wayOut        string
	}{
		"gpu.nvidia.com": {nil, []string{"--set", "deviceClasses.gpu.enabled=false"}, "deviceClasses.gpu.enabled=false"},
		"mig.nvidia.com": {nil, []string{"--set", "deviceClasses.mig.enabled=false"}, "deviceClasses.mig.enabled=false"},
		"shared.gpu.nvidia.com": {[]string{"--set-json", inFractions}, []string{"--set", "deviceClasses.shared.enabled=false"},
			"deviceClasses.shared.enabled=false"},
		"mig-1g.10gb.nvidia.com": {[]string{"--set-json", profiles}, nil, "deviceClasses.migProfiles[0]: "},
	} {
		for name, there := range map[string]struct {
			class   bool
			owner   map[string]string
			args    []string
			refused string
		}{
			"no class":       {args: c.with},
			"this release's": {class: true, args: c.with, owner: owner(release, namespace)},
			"no release's":   {class: true, args: c.with},
			"another release's": {class: true, args: c.with, owner: owner("nvidia-dra", "nvidia"),
				refused: "release nvidia-dra in namespace nvidia"},
			"another namespace's": {class: true, args: c.with, owner: owner(release, "old"),
				refused: "release " + release + " in namespace old"},
			"another's, and not offered": {class: true, args: c.without, owner: owner("nvidia-dra", "nvidia")},
		} {
			t.Run(class+": "+name, func(t *testing.T) {
				objects := map[string]any{}
				if there.class {
					objects["/apis/resource.k8s.io/v1/deviceclasses/"+class] = &resourceapi.DeviceClass{
						TypeMeta:   metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "DeviceClass"},
						ObjectMeta: metav1.ObjectMeta{Name: class, Annotations: there.owner},
					}
				}
				_, err := template(t, append(clusterWith(t, objects), there.args...)...)
				switch {
				// The fake API server has no OpenAPI, so helm always fails after it has rendered the templates.
				case there.refused == "" && err != nil && !strings.Contains(err.Error(), "from release manifest"):
					t.Error(err)
				case there.refused != "" && (err == nil || !strings.Contains(err.Error(), there.refused) || !strings.Contains(err.Error(), c.wayOut)):
					t.Errorf("%v, want an error that names the %s and the way out", err, there.refused)
				}
			})
		}
	}
}

// clusterWith starts a fake API server and returns the arguments that make helm use it. objects are
// the server's objects by URL path. The server answers only what a template's lookup needs.
func clusterWith(t *testing.T, objects map[string]any) []string {
	t.Helper()
	group := func(name string) metav1.APIGroup {
		v := metav1.GroupVersionForDiscovery{GroupVersion: name + "/v1", Version: "v1"}
		return metav1.APIGroup{Name: name, Versions: []metav1.GroupVersionForDiscovery{v}, PreferredVersion: v}
	}
	resources := func(group string, all ...metav1.APIResource) metav1.APIResourceList {
		kind := metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}
		return metav1.APIResourceList{TypeMeta: kind, GroupVersion: group + "/v1", APIResources: all}
	}
	verbs := []string{"get", "list"}
	answers := map[string]any{
		"/version": version.Info{Major: "1", Minor: "34", GitVersion: "v1.34.0"},
		"/api":     metav1.APIVersions{TypeMeta: metav1.TypeMeta{Kind: "APIVersions"}, Versions: []string{"v1"}},
		"/api/v1":  metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList"}, GroupVersion: "v1"},
		"/apis": metav1.APIGroupList{
			TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"}, Groups: []metav1.APIGroup{group("apps"), group("resource.k8s.io")},
		},
		"/apis/apps/v1": resources("apps", metav1.APIResource{Name: "daemonsets", SingularName: "daemonset", Namespaced: true,
			Kind: "DaemonSet", Verbs: verbs}),
		"/apis/resource.k8s.io/v1": resources("resource.k8s.io",
			metav1.APIResource{Name: "deviceclasses", SingularName: "deviceclass", Kind: "DeviceClass", Verbs: verbs},
			metav1.APIResource{Name: "resourceclaims", SingularName: "resourceclaim", Namespaced: true, Kind: "ResourceClaim", Verbs: verbs}),
	}
	maps.Copy(answers, objects)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		answer, found := answers[r.URL.Path]
		if !found {
			w.WriteHeader(http.StatusNotFound)
			answer = metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure,
				Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound}
		}
		_ = json.NewEncoder(w).Encode(answer)
	}))
	t.Cleanup(server.Close)
	home := t.TempDir()
	t.Setenv("HOME", home) // helm caches the server's API below HOME.
	kubeconfig, err := json.Marshal(clientcmdapi.Config{
		Kind: "Config", APIVersion: "v1", CurrentContext: "c",
		Clusters: []clientcmdapi.NamedCluster{{Name: "c", Cluster: clientcmdapi.Cluster{Server: server.URL}}},
		Contexts: []clientcmdapi.NamedContext{{Name: "c", Context: clientcmdapi.Context{Cluster: "c"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(home, "kubeconfig")
	if err := os.WriteFile(path, kubeconfig, 0o600); err != nil {
		t.Fatal(err)
	}
	return []string{"--dry-run=server", "--kubeconfig", path}
}

package components

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"
)

func program(name string) string { return "/tools/" + name }

var example = Node{
	Name: "node1", Address: "10.199.0.3", PodNetwork: "10.100.1.0/24", PauseImage: "localhost/pause:1",
	FeatureGates: map[string]bool{"DRADeviceTaintRules": true, "Other": false}, Labels: map[string]string{"b": "2", "a": "1"},
}

func TestServicesStartInDependencyOrder(t *testing.T) {
	order := func(services []string, first, second string) {
		t.Helper()
		if i, j := slices.Index(services, first), slices.Index(services, second); i < 0 || j < 0 || i > j {
			t.Errorf("%s must start before %s, in %v", first, second, services)
		}
	}
	var names []string
	ready := map[string]string{}
	for _, service := range append(ControlPlane{Address: "10.199.0.2"}.Services(program), example.Services(program)...) {
		names = append(names, service.Name)
		ready[service.Name] = service.Ready
		if !strings.HasPrefix(service.Argv[0], "/tools/") {
			t.Errorf("%s runs %s, which is not the built program", service.Name, service.Argv[0])
		}
	}
	order(names, "etcd", "kube-apiserver")
	order(names, "kube-apiserver", "kube-controller-manager")
	order(names, "kube-apiserver", "kube-scheduler")
	order(names, "containerd", "kubelet")
	for _, depended := range []string{"etcd", "kube-apiserver", "containerd", "kubelet"} {
		if ready[depended] == "" {
			t.Errorf("no service can wait for %s", depended)
		}
	}
}

func TestKubeletRestartPause(t *testing.T) {
	for pause, want := range map[time.Duration]string{0: "", time.Second: "1s", time.Minute: "1m0s"} {
		var kubelet struct {
			CrashLoopBackOff struct{ MaxContainerRestartPeriod string }
			FeatureGates     map[string]bool
		}
		node := example
		node.RestartPause = pause
		decode(t, "/etc/kubernetes/kubelet.yaml", node, &kubelet)
		if got := kubelet.CrashLoopBackOff.MaxContainerRestartPeriod; got != want {
			t.Errorf("for a pause of %s the kubelet gets %q, want %q", pause, got, want)
		}
		if on := kubelet.FeatureGates["KubeletCrashLoopBackOffMax"]; on != (pause != 0) {
			t.Errorf("for a pause of %s the kubelet's gate is on: %t", pause, on)
		}
	}
}

func TestFeatureGatesReachEveryComponent(t *testing.T) {
	const want = "--feature-gates=DRADeviceTaintRules=true,Other=false"
	for _, service := range (ControlPlane{FeatureGates: example.FeatureGates}).Services(program) {
		if service.Name != "etcd" && !slices.Contains(service.Argv, want) {
			t.Errorf("%s lacks %s", service.Name, want)
		}
	}
	var kubelet struct {
		FeatureGates map[string]bool
	}
	decode(t, "/etc/kubernetes/kubelet.yaml", example, &kubelet)
	if !kubelet.FeatureGates["DRADeviceTaintRules"] || kubelet.FeatureGates["Other"] {
		t.Errorf("kubelet has gates %v", kubelet.FeatureGates)
	}
}

func TestLabelsAreSorted(t *testing.T) {
	services := example.Services(program)
	if kubelet := services[len(services)-1]; !slices.Contains(kubelet.Argv, "--node-labels=a=1,b=2") {
		t.Errorf("kubelet is called with %v", kubelet.Argv)
	}
}

func TestPodNetworkBelongsToNode(t *testing.T) {
	files, err := example.Files(program)
	if err != nil {
		t.Fatal(err)
	}
	var network struct {
		Plugins []struct {
			Ipam struct {
				Ranges [][]struct{ Subnet string }
			}
		}
	}
	if err := json.Unmarshal(files["/etc/cni/net.d/10-cluster.conflist"], &network); err != nil {
		t.Fatal(err)
	}
	if subnet := network.Plugins[0].Ipam.Ranges[0][0].Subnet; subnet != example.PodNetwork {
		t.Errorf("Pods get addresses of %s", subnet)
	}
}

func TestContainerdCanIgnoreCDI(t *testing.T) {
	for version, settings := range map[string][]string{
		"":        {"version = 3", "sandbox = 'localhost/pause:1'", "BinaryName = '/tools/runc'", "bin_dirs = ['/tools']"},
		"v2.3.7":  {"version = 3", "sandbox = 'localhost/pause:1'"},
		"v1.7.35": {"version = 2", "sandbox_image = 'localhost/pause:1'", "BinaryName = '/tools/runc'", "bin_dir = '/tools'"},
	} {
		for _, disabled := range []bool{false, true} {
			node := example
			node.Containerd, node.DisableCDI = version, disabled
			files, err := node.Files(program)
			if err != nil {
				t.Fatal(err)
			}
			config := string(files["/etc/containerd/config.toml"])
			if got := strings.Contains(config, "enable_cdi = false"); got != disabled {
				t.Errorf("with DisableCDI=%t containerd %s has enable_cdi = %t", disabled, version, !got)
			}
			for _, want := range settings {
				if !strings.Contains(config, want) {
					t.Errorf("the configuration of containerd %s lacks %q", version, want)
				}
			}
		}
	}
}

func decode(t *testing.T, path string, node Node, into any) {
	t.Helper()
	files, err := node.Files(program)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(files[path], into); err != nil {
		t.Fatal(err)
	}
}

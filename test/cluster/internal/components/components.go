// Package components renders the configuration of each component of a test cluster: command lines,
// configuration files, ports and paths. It has no side effects: its callers write the files and
// start the processes.
//
// The cluster is a small real one. It has authorization by Node and RBAC, the NodeRestriction
// admission plugin, the aggregation layer, bound ServiceAccount tokens, and the beta and alpha
// versions of the resource API. It has no DNS and no kube-proxy: Pods reach each other by address,
// and the API server under the Service "kubernetes".
package components

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/machine"
)

// These are the folders in which a machine of the cluster keeps its configuration.
const (
	KubernetesDir = "/etc/kubernetes"
	PKIDir        = "/etc/kubernetes/pki"
	ContainerdDir = "/etc/containerd"
	CNIDir        = "/etc/cni/net.d"

	containerdSocket = "/run/containerd/containerd.sock"
	verbosity        = "--v=2"
)

// ServiceNetwork is the cluster-internal network of Services. KubernetesService is the address of
// the Service "kubernetes" in it, which is the API server.
const (
	ServiceNetwork    = "10.96.0.0/16"
	KubernetesService = "10.96.0.1"
	APIServerPort     = 443
	SchedulerPort     = 10259
)

// Programs returns the path of a program as a machine of the cluster sees it.
type Programs func(name string) string

// ControlPlane describes the machine of etcd, the API server, the controllers and the scheduler.
type ControlPlane struct {
	Address      string
	FeatureGates map[string]bool
	// RuntimeConfig names the API versions to serve in addition to the default ones.
	RuntimeConfig string
	// Alone says that the cluster has no kubelets. The node lifecycle controller, which taints Nodes
	// without heartbeats, is then off.
	Alone bool
}

// Services are the control plane's processes in the order of their start.
func (c ControlPlane) Services(programs Programs) []machine.Service {
	gates := "--feature-gates=" + joinGates(c.FeatureGates)
	pki := func(name string) string { return path.Join(PKIDir, name) }
	kubeconfigs := func(name string) []string {
		file := path.Join(KubernetesDir, name+".conf")
		return []string{"--kubeconfig=" + file, "--authentication-kubeconfig=" + file, "--authorization-kubeconfig=" + file}
	}
	controllers := "*"
	if c.Alone {
		controllers += ",-node-lifecycle-controller"
	}
	return []machine.Service{
		{Name: "etcd", Ready: "http://127.0.0.1:2379/health", Argv: []string{
			programs("etcd"), "--name=cluster", "--data-dir=/var/lib/etcd", "--unsafe-no-fsync", "--log-level=warn",
			"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
			"--listen-peer-urls=http://127.0.0.1:2380",
		}},
		{Name: "kube-apiserver", Ready: "https://127.0.0.1:" + strconv.Itoa(APIServerPort) + "/readyz", Argv: []string{
			programs("kube-apiserver"), verbosity, gates, "--runtime-config=" + c.RuntimeConfig,
			"--etcd-servers=http://127.0.0.1:2379",
			"--secure-port=" + strconv.Itoa(APIServerPort), "--bind-address=0.0.0.0", "--advertise-address=" + c.Address,
			"--service-cluster-ip-range=" + ServiceNetwork, "--allow-privileged", "--enable-aggregator-routing",
			"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
			"--client-ca-file=" + pki("ca.crt"),
			"--tls-cert-file=" + pki("apiserver.crt"), "--tls-private-key-file=" + pki("apiserver.key"),
			"--kubelet-client-certificate=" + pki("apiserver-kubelet.crt"), "--kubelet-client-key=" + pki("apiserver-kubelet.key"),
			"--kubelet-preferred-address-types=InternalIP",
			"--requestheader-client-ca-file=" + pki("front-proxy-ca.crt"), "--requestheader-allowed-names=front-proxy",
			"--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
			"--requestheader-extra-headers-prefix=X-Remote-Extra-",
			"--proxy-client-cert-file=" + pki("front-proxy.crt"), "--proxy-client-key-file=" + pki("front-proxy.key"),
			"--service-account-issuer=https://kubernetes.default.svc",
			"--service-account-key-file=" + pki("service-account.pub"), "--service-account-signing-key-file=" + pki("service-account.key"),
		}},
		// The command line raises the controller manager's client limits, because with the defaults a
		// cluster starts five seconds more slowly.
		{Name: "kube-controller-manager", Argv: append([]string{
			programs("kube-controller-manager"), verbosity, gates, "--leader-elect=false", "--bind-address=127.0.0.1",
			"--kube-api-qps=500", "--kube-api-burst=1000", "--use-service-account-credentials",
			"--controllers=" + controllers,
			"--service-account-private-key-file=" + pki("service-account.key"), "--root-ca-file=" + pki("ca.crt"),
		}, kubeconfigs("controller-manager")...)},
		{Name: "kube-scheduler", Argv: append([]string{
			programs(
				"kube-scheduler",
			), verbosity, gates, "--leader-elect=false", "--bind-address=" + c.Address, "--secure-port=" + strconv.Itoa(SchedulerPort),
			"--kube-api-qps=500", "--kube-api-burst=1000",
		}, kubeconfigs("scheduler")...)},
	}
}

// Node describes a machine that runs Pods.
type Node struct {
	Name         string
	Address      string
	PodNetwork   string
	FeatureGates map[string]bool
	Labels       map[string]string
	// PauseImage is the full name of the image of every Pod's sandbox.
	PauseImage string
	// Containerd is containerd's version, like v1.7.35. Empty means the pinned one.
	Containerd string
	// DisableCDI makes containerd ignore CDI devices, as it does on some users' nodes.
	DisableCDI bool
	// KubeletRoot is the kubelet's root directory. Empty means /var/lib/kubelet.
	KubeletRoot string
	// RestartPause is the longest time that the kubelet waits before it restarts a container. 0 keeps
	// the kubelet's default.
	RestartPause time.Duration
}

// Services are a node's processes in the order of their start.
func (n Node) Services(programs Programs) []machine.Service {
	kubelet := []string{
		programs(
			"kubelet",
		), verbosity, "--config=" + path.Join(KubernetesDir, "kubelet.yaml"), "--kubeconfig=" + path.Join(KubernetesDir, "kubelet.conf"),
		"--hostname-override=" + n.Name, "--node-ip=" + n.Address, "--root-dir=" + cmp.Or(n.KubeletRoot, "/var/lib/kubelet"),
	}
	if len(n.Labels) > 0 {
		var labels []string
		for _, key := range slices.Sorted(maps.Keys(n.Labels)) {
			labels = append(labels, key+"="+n.Labels[key])
		}
		kubelet = append(kubelet, "--node-labels="+strings.Join(labels, ","))
	}
	return []machine.Service{
		{
			Name:  "containerd",
			Argv:  []string{programs("containerd"), "--config=" + path.Join(ContainerdDir, "config.toml")},
			Ready: "unix://" + containerdSocket,
		},
		{Name: "kubelet", Argv: kubelet, Ready: "http://127.0.0.1:10248/healthz"},
	}
}

func joinGates(gates map[string]bool) string {
	var joined []string
	for _, name := range slices.Sorted(maps.Keys(gates)) {
		joined = append(joined, fmt.Sprintf("%s=%t", name, gates[name]))
	}
	return strings.Join(joined, ",")
}

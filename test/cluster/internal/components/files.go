package components

import (
	"encoding/json"
	"fmt"
	"path"

	"sigs.k8s.io/yaml"
)

// Files returns a node's configuration files, by their path in the machine.
func (n Node) Files(programs Programs) (map[string][]byte, error) {
	kubelet, err := n.kubeletConfiguration()
	if err != nil {
		return nil, err
	}
	network, err := n.networkConfiguration()
	if err != nil {
		return nil, err
	}
	return map[string][]byte{
		path.Join(KubernetesDir, "kubelet.yaml"): kubelet,
		path.Join(ContainerdDir, "config.toml"):  []byte(n.containerdConfiguration(programs)),
		path.Join(CNIDir, "10-cluster.conflist"): network,
	}, nil
}

type object = map[string]any

func (n Node) kubeletConfiguration() ([]byte, error) {
	configuration := object{
		"apiVersion": "kubelet.config.k8s.io/v1beta1",
		"kind":       "KubeletConfiguration",
		"authentication": object{
			"anonymous": object{"enabled": false},
			"webhook":   object{"enabled": true},
			"x509":      object{"clientCAFile": path.Join(PKIDir, "ca.crt")},
		},
		"authorization":             object{"mode": "Webhook"},
		"address":                   "0.0.0.0",
		"healthzBindAddress":        "127.0.0.1",
		"containerRuntimeEndpoint":  "unix://" + containerdSocket,
		"cgroupDriver":              "cgroupfs",
		"failCgroupV1":              false,
		"failSwapOn":                false,
		"clusterDomain":             "cluster.local",
		"resolvConf":                "",
		"nodeStatusUpdateFrequency": "5s",
		"syncFrequency":             "10s",
		"fileCheckFrequency":        "10s",
		"runtimeRequestTimeout":     "2m",
		"shutdownGracePeriod":       "0s",
		// The node's disk is the host's disk. If that is nearly full, evicting Pods does not help, and
		// deleted images could not be pulled again because there is no registry. So the kubelet must not
		// evict Pods early.
		"evictionHard": object{
			"memory.available":  "100Mi",
			"nodefs.available":  "1%",
			"imagefs.available": "1%",
			"nodefs.inodesFree": "1%",
		},
		"imageGCHighThresholdPercent": 100,
		"featureGates":                n.FeatureGates,
	}
	if n.RestartPause != 0 {
		configuration["crashLoopBackOff"] = object{"maxContainerRestartPeriod": n.RestartPause.String()}
	}
	content, err := yaml.Marshal(configuration)
	if err != nil {
		return nil, fmt.Errorf("render the kubelet configuration of %s: %w", n.Name, err)
	}
	return content, nil
}

func (n Node) containerdConfiguration(programs Programs) string {
	// restrict_oom_score_adj is set because containerd cannot lower a process's OOM score without
	// CAP_SYS_RESOURCE. disable_apparmor is set because AppArmor profiles would have to be loaded into
	// the host's kernel.
	return fmt.Sprintf(`version = 3
root = '/var/lib/containerd'
state = '/run/containerd'
imports = []
disabled_plugins = ['io.containerd.snapshotter.v1.btrfs', 'io.containerd.snapshotter.v1.devmapper',
  'io.containerd.snapshotter.v1.zfs', 'io.containerd.snapshotter.v1.blockfile',
  'io.containerd.snapshotter.v1.erofs', 'io.containerd.differ.v1.erofs']

[grpc]
  address = '%[1]s'

[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = '%[2]s'

[plugins.'io.containerd.cri.v1.runtime']
  enable_cdi = %[3]t
  cdi_spec_dirs = ['/etc/cdi', '/var/run/cdi']
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ['%[4]s']
    conf_dir = '%[5]s'
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = 'runc'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = 'io.containerd.runc.v2'
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        BinaryName = '%[6]s'
        SystemdCgroup = false
`, containerdSocket, n.PauseImage, !n.DisableCDI, path.Dir(programs("bridge")), CNIDir, programs("runc"))
}

func (n Node) networkConfiguration() ([]byte, error) {
	content, err := json.MarshalIndent(object{
		"cniVersion": "1.0.0",
		"name":       "cluster",
		"plugins": []object{{
			"type":        "bridge",
			"bridge":      "cni0",
			"isGateway":   true,
			"hairpinMode": true,
			"ipMasq":      false,
			"ipam": object{
				"type":    "host-local",
				"dataDir": "/run/cni-ipam", // in memory: a power cut ends every lease
				"ranges":  [][]object{{{"subnet": n.PodNetwork}}},
				"routes":  []object{{"dst": "0.0.0.0/0"}},
			},
		}},
	}, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("render the Pod network of %s: %w", n.Name, err)
	}
	return content, nil
}

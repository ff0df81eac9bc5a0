package components

import (
	"encoding/json"
	"fmt"
	"maps"
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
		gates := maps.Clone(n.FeatureGates)
		if gates == nil {
			gates = map[string]bool{}
		}
		gates["KubeletCrashLoopBackOffMax"] = true // off by default before Kubernetes 1.35
		configuration["featureGates"] = gates
		configuration["crashLoopBackOff"] = object{"maxContainerRestartPeriod": n.RestartPause.String()}
	}
	content, err := yaml.Marshal(configuration)
	if err != nil {
		return nil, fmt.Errorf("render the kubelet configuration of %s: %w", n.Name, err)
	}
	return content, nil
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

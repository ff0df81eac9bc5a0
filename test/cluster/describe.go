package cluster

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/components"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/machine"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/pki"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/toolchain"
)

// describe writes the files from which every machine boots: its machine.Spec, configuration files
// and credentials. It also writes the administrator's kubeconfig.
func (c *Cluster) describe(options Options) error {
	credentials, err := c.newCredentials()
	if err != nil {
		return err
	}
	admin, err := credentials.kubeconfig("admin", "system:masters")
	if err != nil {
		return err
	}
	if err := os.WriteFile(c.Kubeconfig(), admin, 0o600); err != nil {
		return fmt.Errorf("write the kubeconfig: %w", err)
	}
	if err := c.describeControlPlane(options, credentials); err != nil {
		return err
	}
	for i, node := range options.Nodes {
		if err := c.describeNode(options, i+1, node, credentials); err != nil {
			return err
		}
	}
	return nil
}

// addMachine fills in the fields of spec that every machine needs. It writes spec and the given
// files to the machine's folder on the host. index is the machine's number in the cluster's
// network.
func (c *Cluster) addMachine(spec *machine.Spec, index int, files map[string][]byte) error {
	network := c.state.Network
	spec.Dir = machineDir(c.name, spec.Name)
	spec.CgroupBases = c.state.CgroupBases
	spec.Mounts = append(spec.Mounts, machine.Mount{Source: c.programs.CacheDir, Target: machine.ToolsDir})
	spec.Network.Bridge, spec.Network.HostLink = network.bridge(), network.link(index)
	spec.Network.Address, spec.Network.Gateway = network.address(index)+"/24", network.gateway()
	if err := spec.Save(); err != nil {
		return err
	}
	id := strings.Repeat("0", 28) + fmt.Sprintf("%02x%02x", network.Slot, index)
	files["/etc/machine-id"] = []byte(id + "\n")
	files["/etc/hosts"] = fmt.Appendf(nil, "127.0.0.1 localhost\n%s %s\n", network.address(index), spec.Name)
	for path, content := range files {
		if err := writeToDisk(spec, path, content); err != nil {
			return err
		}
	}
	for _, program := range []string{"kubectl", "ctr", "runc", "containerd-shim-runc-v2"} {
		target, err := c.programs.inMachine(program)
		if err != nil {
			return err
		}
		link := filepath.Join(spec.Layer("usr"), "local", "bin", program)
		if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
			return err
		}
		if err := os.Symlink(target, link); err != nil {
			return fmt.Errorf("put %s on machine %s: %w", program, spec.Name, err)
		}
	}
	c.machines[spec.Name] = spec
	return nil
}

// writeToDisk writes a file that the machine will see at path, by writing into the machine's
// private layer over the host's top-level folder. It cannot write below /var, which is no such
// layer.
func writeToDisk(spec *machine.Spec, path string, content []byte) error {
	top, rest, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	onHost := filepath.Join(spec.Layer(top), rest)
	if err := os.MkdirAll(filepath.Dir(onHost), 0o755); err != nil {
		return fmt.Errorf("write %s of machine %s: %w", path, spec.Name, err)
	}
	mode := os.FileMode(0o644)
	if strings.HasSuffix(path, ".key") || strings.HasSuffix(path, ".conf") {
		mode = 0o600
	}
	if err := os.WriteFile(onHost, content, mode); err != nil {
		return fmt.Errorf("write %s of machine %s: %w", path, spec.Name, err)
	}
	return nil
}

// programPaths returns the path of a program as the machines see it. For a program that was not
// built, a bug in this package, it returns /not-built/NAME. The service with that path then fails
// to start.
func (c *Cluster) programPaths(name string) string {
	path, err := c.programs.inMachine(name)
	if err != nil {
		return "/not-built/" + name
	}
	return path
}

func (c *Cluster) describeControlPlane(options Options, credentials *credentials) error {
	network := c.state.Network
	files, err := credentials.controlPlaneFiles(network.address(0))
	if err != nil {
		return err
	}
	plane := components.ControlPlane{Address: network.address(0), FeatureGates: options.FeatureGates, Alone: options.ControlPlaneOnly}
	if !options.ReleaseDefaults {
		plane.RuntimeConfig = releaseOf(options.Kubernetes).runtimeConfig()
	}
	spec := &machine.Spec{Name: controlPlane, Services: plane.Services(c.programPaths)}
	spec.Network.Loopback = []string{components.KubernetesService + "/32"} // replaces kube-proxy for the Service "kubernetes"
	for i := range options.Nodes {
		spec.Network.Routes = append(spec.Network.Routes, machine.Route{Destination: network.pods(i + 1), Via: network.address(i + 1)})
	}
	return c.addMachine(spec, 0, files)
}

func (c *Cluster) describeNode(options Options, index int, wanted NodeOptions, credentials *credentials) error {
	network := c.state.Network
	node := components.Node{
		Name: wanted.Name, Address: network.address(index), PodNetwork: network.pods(index), FeatureGates: options.FeatureGates,
		Labels: wanted.Labels, DisableCDI: wanted.DisableCDI, KubeletRoot: wanted.KubeletRoot, PauseImage: toolchain.PauseImage,
		RestartPause: options.RestartPause, Containerd: options.Containerd,
	}
	files, err := node.Files(c.programPaths)
	if err != nil {
		return err
	}
	kubelet, err := credentials.kubeconfig("system:node:"+wanted.Name, "system:nodes")
	if err != nil {
		return err
	}
	files[components.KubernetesDir+"/kubelet.conf"] = kubelet
	files[components.PKIDir+"/ca.crt"] = credentials.authority.Certificate()
	spec := &machine.Spec{Name: wanted.Name, BootHook: wanted.BootHook, Services: node.Services(c.programPaths)}
	for _, mount := range wanted.Mounts {
		target := mount.Target
		if target == "" {
			target = mount.Source
		}
		spec.Mounts = append(spec.Mounts, machine.Mount{Source: mount.Source, Target: target, Writable: mount.Writable})
	}
	spec.Network.HostRoutes = []string{network.pods(index)}
	spec.Network.Routes = []machine.Route{{Destination: components.ServiceNetwork, Via: network.address(0)}}
	for other := range options.Nodes {
		if other+1 != index {
			spec.Network.Routes = append(spec.Network.Routes, machine.Route{Destination: network.pods(other + 1), Via: network.address(other + 1)})
		}
	}
	return c.addMachine(spec, index, files)
}

// credentials issues the certificates that the cluster's components use with each other.
type credentials struct {
	authority *pki.Authority
	server    string
	cluster   string
}

func (c *Cluster) newCredentials() (*credentials, error) {
	authority, err := pki.NewAuthority("kubernetes-ca")
	if err != nil {
		return nil, err
	}
	server := fmt.Sprintf("https://%s:%d", c.state.Network.address(0), components.APIServerPort)
	return &credentials{authority: authority, server: server, cluster: c.name}, nil
}

func (c *credentials) kubeconfig(user string, groups ...string) ([]byte, error) {
	client, err := c.authority.Client(user, groups...)
	if err != nil {
		return nil, err
	}
	return c.authority.Kubeconfig(c.server, c.cluster, client)
}

func (c *credentials) controlPlaneFiles(address string) (map[string][]byte, error) {
	files := map[string][]byte{components.PKIDir + "/ca.crt": c.authority.Certificate()}
	addPair := func(name string, pair pki.Pair, err error) error {
		files[components.PKIDir+"/"+name+".crt"], files[components.PKIDir+"/"+name+".key"] = pair.Certificate, pair.Key
		return err
	}
	addresses := []net.IP{net.ParseIP(address), net.ParseIP(components.KubernetesService), net.IPv4(127, 0, 0, 1)}
	names := []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"}
	server, err := c.authority.Server("kube-apiserver", addresses, names)
	if err := addPair("apiserver", server, err); err != nil {
		return nil, err
	}
	client, err := c.authority.Client("kube-apiserver-kubelet-client", "system:masters")
	if err := addPair("apiserver-kubelet", client, err); err != nil {
		return nil, err
	}
	frontAuthority, err := pki.NewAuthority("front-proxy-ca")
	if err != nil {
		return nil, err
	}
	files[components.PKIDir+"/front-proxy-ca.crt"] = frontAuthority.Certificate()
	front, err := frontAuthority.Client("front-proxy")
	if err := addPair("front-proxy", front, err); err != nil {
		return nil, err
	}
	private, public, err := pki.NewSigner()
	if err != nil {
		return nil, err
	}
	files[components.PKIDir+"/service-account.key"], files[components.PKIDir+"/service-account.pub"] = private, public
	for name, user := range map[string]string{"controller-manager": "system:kube-controller-manager", "scheduler": "system:kube-scheduler"} {
		if files[components.KubernetesDir+"/"+name+".conf"], err = c.kubeconfig(user); err != nil {
			return nil, err
		}
	}
	return files, nil
}

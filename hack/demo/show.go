package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// devices is a template for kubectl. It prints one line for each whole GPU in the ResourceSlices
// and leaves out partitions.
const devices = `{{range .items}}{{$node := .spec.nodeName}}{{range .spec.devices}}` +
	`{{if eq .attributes.type.string "gpu"}}` +
	`{{$node}}  {{.name}}  {{.attributes.productName.string}}  {{.capacity.memory.value}}  ` +
	`NUMA {{(index .attributes "resource.kubernetes.io/numaNode").int}}  {{.attributes.uuid.string}}{{"\n"}}` +
	`{{end}}{{end}}{{end}}`

// showCluster starts a cluster with the simulated node, installs the chart, and shows a Pod that
// claims a GPU.
func (d *demo) showCluster(ctx context.Context, sim *clusterharness.Simulator) error {
	root, s := d.root, d.screen
	s.title("A real Kubernetes cluster with that node")
	if err := cluster.Down(ctx, d.name); err != nil {
		return err
	}
	c, err := cluster.Up(ctx, cluster.Options{Name: d.name, Nodes: []cluster.NodeOptions{sim.Node("node1", model)},
		Output: s.background("cluster")})
	if err != nil {
		return err
	}
	k := kubectl{cluster: c, screen: s}
	if _, err := k.show(ctx, "get", "nodes", "-o", "wide"); err != nil {
		return err
	}

	s.title("The image, built from the Dockerfile")
	archive, err := clusterharness.BuildImage(ctx, root, s.background("image"))
	if err != nil {
		return err
	}
	if err := c.LoadImage(ctx, archive); err != nil {
		return err
	}

	s.title("The driver, installed by helm")
	arguments := clusterharness.InstallArguments(root)
	cmd, err := c.ClientCommand(ctx, "helm", arguments...)
	if err != nil {
		return err
	}
	if _, err := s.run(cmd, "helm "+short(root, arguments...)); err != nil {
		return err
	}
	if _, err := k.show(ctx, "get", "resourceslices"); err != nil {
		return err
	}
	if _, err := k.showAs(ctx, "kubectl get resourceslices -o go-template=…   # whole GPUs; their partitions are offered too",
		"get", "resourceslices", "-o", "go-template="+devices); err != nil {
		return err
	}
	return d.showPod(ctx, k, sim.SMI != "")
}

// showPod applies the first example of the documentation, a Pod that claims one GPU. It returns an
// error if the Pod sees another GPU than the one that is allocated to its claim.
func (d *demo) showPod(ctx context.Context, k kubectl, withSMI bool) error {
	root := d.root
	k.screen.title("A Pod that claims a GPU")
	example, err := os.ReadFile(filepath.Join(root, "docs/examples/one-gpu.yaml"))
	if err != nil {
		return err
	}
	// The cluster has no image registry. So the manifest names a small image that every node has,
	// instead of Debian's.
	manifest := filepath.Join(d.folder(), "one-gpu.yaml")
	if err := os.WriteFile(manifest, []byte(strings.ReplaceAll(string(example), "debian:bookworm-slim", cluster.TestImage)),
		0o600); err != nil {
		return err
	}
	for _, arguments := range [][]string{
		{"apply", "-f", manifest},
		{"wait", "pod/one-gpu", "--for=condition=Ready", "--timeout=60s"},
	} {
		if _, err := k.showAs(ctx, "kubectl "+short(root, arguments...), arguments...); err != nil {
			_, describeErr := k.show(ctx, "describe", "pod/one-gpu")
			return errors.Join(err, describeErr)
		}
	}
	look := k.lookByDeviceNodes
	if withSMI {
		look = k.lookBySMI
	}
	seen, err := look(ctx)
	if err != nil {
		return err
	}
	allocated, err := k.allocated(ctx)
	if err != nil {
		return err
	}
	if len(seen) != 1 || seen[0] != allocated {
		return fmt.Errorf("the Pod saw the GPUs %v, but the scheduler allocated %s", seen, allocated)
	}
	k.screen.title("The Pod saw one GPU, the one that the scheduler allocated: " + allocated)
	k.screen.print(fmt.Sprintf("To look around, run\n  export KUBECONFIG=%s PATH=%s:$PATH\nTo remove everything, run\n  make "+
		"demo-down\n", k.cluster.Kubeconfig(), k.programs()))
	return nil
}

// lookBySMI returns the UUIDs of the GPUs that nvidia-smi sees in the Pod.
func (k kubectl) lookBySMI(ctx context.Context) ([]string, error) {
	if _, err := k.show(ctx, "exec", "one-gpu", "--", "nvidia-smi"); err != nil {
		return nil, err
	}
	printed, err := k.show(ctx, "exec", "one-gpu", "--", "nvidia-smi", "-L")
	return regexp.MustCompile(`GPU-[0-9a-f-]{36}`).FindAllString(printed, -1), err
}

// lookByDeviceNodes returns the UUIDs of the GPUs whose device nodes the Pod has. It takes the GPU
// of each device node from the output of the plugin's inventory command.
func (k kubectl) lookByDeviceNodes(ctx context.Context) ([]string, error) {
	printed, err := k.show(ctx, "exec", "one-gpu", "--", "sh", "-c", "ls -l /dev/nvidia*")
	if err != nil {
		return nil, err
	}
	inventory, err := k.show(ctx, "-n", clusterharness.Namespace, "exec", "daemonset/"+clusterharness.Release+"-kubelet-plugin",
		"--", "gpu-kubelet-plugin", "inventory")
	if err != nil {
		return nil, err
	}
	owners := map[string]string{}
	for _, row := range regexp.MustCompile(`(?m)(\d+) +(GPU-[0-9a-f-]{36})$`).FindAllStringSubmatch(inventory, -1) {
		owners[row[1]] = row[2]
	}
	var seen []string
	for _, node := range regexp.MustCompile(`(?m)/dev/nvidia(\d+)$`).FindAllStringSubmatch(printed, -1) {
		seen = append(seen, cmp.Or(owners[node[1]], "of "+node[0]))
	}
	return seen, nil
}

// kubectl runs kubectl on the demo's cluster, and prints the command and its output on the screen.
type kubectl struct {
	cluster *cluster.Cluster
	screen  *screen
}

func (k kubectl) show(ctx context.Context, arguments ...string) (string, error) {
	return k.showAs(ctx, "kubectl "+strings.Join(arguments, " "), arguments...)
}

func (k kubectl) showAs(ctx context.Context, shown string, arguments ...string) (string, error) {
	cmd, err := k.cluster.ClientCommand(ctx, "kubectl", arguments...)
	if err != nil {
		return "", err
	}
	return k.screen.run(cmd, shown)
}

// programs returns the folder that holds kubectl.
func (k kubectl) programs() string {
	path, err := k.cluster.Programs().Path("kubectl")
	if err != nil {
		return ""
	}
	return filepath.Dir(path)
}

// get reads an object from the API server into object. It prints nothing.
func (k kubectl) get(ctx context.Context, object any, arguments ...string) error {
	out, err := k.cluster.Kubectl(ctx, append([]string{"get", "-o", "json"}, arguments...)...)
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(out), object)
}

// allocated returns the UUID of the GPU that is allocated to the Pod's claim, as the ResourceSlice
// has it.
func (k kubectl) allocated(ctx context.Context) (string, error) {
	var pod corev1.Pod
	if err := k.get(ctx, &pod, "pod", "one-gpu"); err != nil {
		return "", err
	}
	if len(pod.Status.ResourceClaimStatuses) != 1 || pod.Status.ResourceClaimStatuses[0].ResourceClaimName == nil {
		return "", fmt.Errorf("pod one-gpu has no ResourceClaim: %+v", pod.Status.ResourceClaimStatuses)
	}
	var claim resourceapi.ResourceClaim
	if err := k.get(ctx, &claim, "resourceclaim", *pod.Status.ResourceClaimStatuses[0].ResourceClaimName); err != nil {
		return "", err
	}
	if claim.Status.Allocation == nil || len(claim.Status.Allocation.Devices.Results) != 1 {
		return "", fmt.Errorf("ResourceClaim %s is not allocated one device: %+v", claim.Name, claim.Status.Allocation)
	}
	result := claim.Status.Allocation.Devices.Results[0]
	var slices resourceapi.ResourceSliceList
	if err := k.get(ctx, &slices, "resourceslices"); err != nil {
		return "", err
	}
	for _, slice := range slices.Items {
		for _, device := range slice.Spec.Devices {
			if slice.Spec.Driver == result.Driver && slice.Spec.Pool.Name == result.Pool && device.Name == result.Device {
				return *device.Attributes["uuid"].StringValue, nil
			}
		}
	}
	return "", fmt.Errorf("no ResourceSlice has device %s of pool %s", result.Device, result.Pool)
}

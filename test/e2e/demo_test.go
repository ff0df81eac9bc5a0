package e2e

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// TestDemo runs what `make demo` and `make demo-down` run. It uses a cluster name of its own, so
// that it does not end a running demo.
func TestDemo(t *testing.T) {
	t.Parallel()
	sim := simulator(t)
	b, err := built()
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "demo")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "./hack/demo")
	build.Dir = b.root
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the demo: %v\n%s", err, out)
	}
	t.Run("nvidia-smi", func(t *testing.T) {
		if sim.SMI == "" {
			t.Skip("SKIPPED: the real nvidia-smi is not available; only the demo without it runs")
		}
		d := demonstration{t, program, b.root, "demo-test"}
		shown := d.show()
		if !strings.Contains(section(shown, "The output of NVIDIA's nvidia-smi"), "NVIDIA-SMI ") {
			t.Error("nvidia-smi of the standalone node was not shown")
		}
		last := shown[strings.LastIndex(shown, "nvidia-smi -L\n"):]
		d.checkPod(shown, regexp.MustCompile(`(?m)^GPU \d+: .*UUID: (GPU-[0-9a-f-]{36})`).FindAllStringSubmatch(last, -1))
		d.checkClient()
	})
	t.Run("without nvidia-smi", func(t *testing.T) {
		d := demonstration{t, program, b.root, "demo-nosmi"}
		shown := d.show("--without-nvidia-smi")
		if !strings.Contains(shown, "NO NVIDIA-SMI") {
			t.Error("the demo did not say that nvidia-smi is missing")
		}
		pod := section(shown, "A Pod that claims a GPU")
		nodes := regexp.MustCompile(`(?m)/dev/nvidia(\d+)$`).FindAllStringSubmatch(pod, -1)
		if len(nodes) != 1 {
			t.Fatalf("the Pod's device nodes of GPUs are %v, want one:\n%s", nodes, pod)
		}
		d.checkPod(shown, regexp.MustCompile(`(?m) `+nodes[0][1]+` +(GPU-[0-9a-f-]{36})$`).FindAllStringSubmatch(pod, -1))
	})
}

// demonstration is one run of the demo program, with the cluster name that it uses.
type demonstration struct {
	*testing.T
	program, root, name string
}

// show runs `demo up` and returns its output. When the test ends, `demo down` must remove
// everything that `demo up` created.
func (d demonstration) show(flags ...string) string {
	d.Helper()
	d.Cleanup(d.takeAway)
	out, err := d.run(d.Context(), append(flags, "up")...)
	if err != nil {
		d.Fatalf("demo up: %v\n%s", err, out)
	}
	inventory := section(out, "What the plugin would offer")
	if gpus := regexp.MustCompile(`(?m)^gpu-.*GPU-[0-9a-f-]{36}$`).FindAllString(inventory, -1); len(gpus) != 8 {
		d.Errorf("the inventory shows %d GPUs, want 8:\n%s", len(gpus), inventory)
	}
	return out
}

func (d demonstration) run(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, d.program, append([]string{"--name", d.name}, args...)...)
	cmd.Dir = d.root
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// checkPod checks that the GPU that the Pod saw is the one that the demo printed as allocated.
func (d demonstration) checkPod(shown string, saw [][]string) {
	d.Helper()
	said := regexp.MustCompile(`the scheduler allocated: (GPU-[0-9a-f-]{36})`).FindStringSubmatch(shown)
	if len(said) != 2 || len(saw) != 1 || saw[0][1] != said[1] {
		d.Errorf("the Pod saw %v, but the demo printed the allocation %v:\n%s", saw, said, shown)
	}
}

// waitingPod asks for more GPUs than the node has.
const waitingPod = `
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: nine}
spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com, count: 9}}]}}
---
apiVersion: v1
kind: Pod
metadata: {name: nine}
spec:
  containers: [{name: main, image: none, resources: {claims: [{name: gpu}]}}]
  resourceClaims: [{name: gpu, resourceClaimName: nine}]
`

// checkClient asks kubectl-gpu about the demo's cluster, as a newcomer and a person on call would.
// An archive must give the same answers.
func (d demonstration) checkClient() {
	d.Helper()
	c, err := cluster.Open(d.name)
	if err != nil {
		d.Fatal(err)
	}
	dir := d.TempDir()
	program, manifest, archive := filepath.Join(dir, "kubectl-gpu"), filepath.Join(dir, "pod.yaml"), filepath.Join(dir, "gather.tar.gz")
	build := exec.CommandContext(d.Context(), "go", "build", "-o", program, "./cmd/kubectl-gpu")
	build.Dir = d.root
	if out, err := build.CombinedOutput(); err != nil {
		d.Fatalf("build kubectl-gpu: %v\n%s", err, out)
	}
	if err := os.WriteFile(manifest, []byte(waitingPod), 0o600); err != nil {
		d.Fatal(err)
	}
	if _, err := c.Kubectl(d.Context(), "apply", "-f", manifest); err != nil {
		d.Fatal(err)
	}
	if _, err := c.Kubectl(d.Context(), "wait", "pod/nine", "--for=condition=PodScheduled=false", "--timeout=60s"); err != nil {
		d.Fatal(err)
	}
	ask := func(args ...string) string {
		cmd := exec.CommandContext(d.Context(), program, args...)
		cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig())
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		findings := args[0] == "doctor" && errors.As(err, &exit) && exit.ExitCode() == 3
		if err != nil && !findings {
			d.Errorf("kubectl gpu %v: %v\n%s", args, err, out)
		}
		d.Logf("$ kubectl gpu %s\n%s", strings.Join(args, " "), out)
		return string(out)
	}
	node := c.Nodes()[0].Name()
	for _, step := range []struct {
		args []string
		want string
	}{
		{[]string{"status"}, node},
		{[]string{"status", node}, "a  GPU: default/one-gpu-"},
		{[]string{"explain", "pod", "one-gpu"}, "is on node " + node},
		{[]string{"explain", "pod", "nine"}, "ask for 7 instead of 9 devices in request gpu"},
		{[]string{"doctor"}, ""},
		{[]string{"gather", "--pods", "--logs", "50", "-f", archive}, "logs/"},
	} {
		if out := ask(step.args...); !strings.Contains(out, step.want) {
			d.Errorf("kubectl gpu %v lacks %q", step.args, step.want)
		}
	}
	for _, args := range [][]string{{"status", node}, {"explain", "pod", "nine", "-n", "default"}} {
		if live, archived := ask(args...), ask(append(args, "--archive", archive)...); live != archived {
			d.Errorf("kubectl gpu %v says something else about an archive", args)
		}
	}
}

func (d demonstration) takeAway() {
	if out, err := d.run(context.WithoutCancel(d.Context()), "down"); err != nil {
		d.Errorf("demo down: %v\n%s", err, out)
	}
	clusters, err := cluster.List()
	if err != nil || slices.Contains(clusters, d.name) {
		d.Errorf("after demo down the clusters %v exist, want not the demo's: %v", clusters, err)
	}
	if _, err := os.Stat(filepath.Join(d.root, "build", d.name)); !errors.Is(err, fs.ErrNotExist) {
		d.Errorf("after demo down its folder is still there: %v", err)
	}
}

// section returns the part of the demo's output below a title.
func section(shown, title string) string {
	_, after, _ := strings.Cut(shown, "== "+title)
	own, _, _ := strings.Cut(after, "\033[1m==")
	return own
}

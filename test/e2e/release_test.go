package e2e

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// released is one line of a release's digests.txt: an artifact's repository, tag and digest.
type released struct{ repository, tag, digest string }

// releaseFolder returns the folder that this environment variable names, and the image and the
// chart of the release in it. It skips the test if the variable is not set.
func releaseFolder(t *testing.T, variable string) (folder string, image, chart released) {
	t.Helper()
	folder = os.Getenv(variable)
	if folder == "" {
		t.Skipf("SKIPPED: %s names no release (make test-release-e2e sets it)", variable)
	}
	raw, err := os.ReadFile(filepath.Join(folder, "digests.txt"))
	if err != nil {
		t.Fatal(err)
	}
	var all []released
	for line := range strings.FieldsSeq(string(raw)) {
		reference, digest, _ := strings.Cut(line, "@")
		colon := strings.LastIndex(reference, ":")
		all = append(all, released{reference[:colon], reference[colon+1:], digest})
	}
	if len(all) != 2 {
		t.Fatalf("%s/digests.txt:\n%s", folder, raw)
	}
	return folder, all[0], all[1]
}

// startRegistry starts a real image registry on these addresses of the host. It returns its port.
func (w *world) startRegistry(t *testing.T, addresses ...string) string {
	t.Helper()
	program := w.buildReleaseTool(t, "./registry")
	registry := exec.CommandContext(t.Context(), program, addresses...)
	registry.Stderr = os.Stderr
	out, err := registry.StdoutPipe()
	if err == nil {
		err = registry.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = registry.Process.Kill(); _ = registry.Wait() })
	lines := bufio.NewScanner(out)
	if !lines.Scan() {
		t.Fatal("the registry did not print its port")
	}
	return lines.Text()
}

// buildReleaseTool builds a program of hack/release, which is a Go module of its own.
func (w *world) buildReleaseTool(t *testing.T, name string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "program")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, name)
	build.Dir = filepath.Join(w.root, "hack", "release")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build %s of hack/release: %v\n%s", name, err, out)
	}
	return program
}

// A user verifies a release in a registry and installs it with helm. The node's containerd pulls
// the image by the digest in the chart, through a mirror of the registry that the release names.
// Before, neither containerd nor the user accepts what an attacker changed. Afterwards the user
// upgrades to the next release and goes back while Pods run.
func TestReleaseInstallsFromARegistry(t *testing.T) {
	t.Parallel()
	folder, image, chart := releaseFolder(t, "RELEASE")
	const node = "node1"
	w := bringUp(t, "release", simulator(t).Node(node, "l40s-x2"))
	gateway := w.node(t, node).Address()
	gateway = gateway[:strings.LastIndex(gateway, ".")] + ".1" // the host, as nodes see it
	port := w.startRegistry(t, "127.0.0.1")
	on := startMirror(t, gateway, "127.0.0.1:"+port)

	registry, project, _ := strings.Cut(strings.TrimSuffix(image.repository, "/gpu-dra-driver"), "/")
	r := w.signRelease(t, folder, image.tag, "127.0.0.1:"+port+"/"+project)
	r.push(t)
	configure := fmt.Sprintf(`mkdir -p /etc/containerd/certs.d/%[1]s
printf '[host."http://%[2]s"]\ncapabilities = ["pull", "resolve"]\n' >/etc/containerd/certs.d/%[1]s/hosts.toml`,
		registry, on.address)
	w.on(t, node, "sh", "-ec", configure)

	t.Run("a changed image is refused", func(t *testing.T) { w.tenant(t).refusesChangedImage(on, r.folder, image) })
	t.Run("a chart that changed on the way is refused", func(t *testing.T) { w.refusesChangedChart(t, on, r.folder, project, chart) })
	t.Run("a replaced chart is found before its installation", func(t *testing.T) { w.findsReplacedChart(t, r, chart) })

	w.deploys(t, node, r, image, chart, "install", "--create-namespace",
		"--set", "driverRoot=/var/lib/nvmlsim/driver,hostPaths.sys=/var/lib/nvmlsim/sys,hostPaths.proc=/var/lib/nvmlsim/proc")
	t.Run("an upgrade to the next release and the way back, with Pods running", func(t *testing.T) {
		w.needSMI(t)
		nextFolder, nextImage, nextChart := releaseFolder(t, "NEXT_RELEASE")
		next := w.signRelease(t, nextFolder, nextImage.tag, r.registry)
		next.push(t)
		if out, err := next.verify(t); err != nil {
			t.Fatalf("verify the next release: %v\n%s", err, out)
		}
		u := w.tenant(t)
		u.gpus(1)
		u.holder("older", 1, onNode(node))
		older := u.holding("older")
		w.deploys(t, node, next, nextImage, nextChart, "upgrade", "--reset-then-reuse-values")
		u.holder("newer", 1, onNode(node))
		newer := u.holding("newer")
		w.deploys(t, node, r, image, chart, "upgrade", "--reset-then-reuse-values")
		u.undisturbed(older, newer)
		u.removeAll()
		u.noFailedPrepare()
		w.clean(t, node)
	})
}

// deploys installs this release from its registry with helm, or upgrades to it. verb and more are
// helm's arguments. It checks that the node's plugin then runs the release's image.
func (w *world) deploys(t *testing.T, node string, r signedRelease, image, chart released, verb string, more ...string) {
	t.Helper()
	helm, err := w.ClientCommand(t.Context(), "helm", append([]string{
		verb, clusterharness.Release, r.chart(), "--version", chart.tag, "--plain-http", "--namespace", clusterharness.Namespace,
		"--wait=legacy", "--timeout", "10m",
	}, more...)...)
	if err != nil {
		t.Fatal(err)
	}
	out, err := helm.CombinedOutput()
	if err != nil {
		t.Fatalf("%s release %s: %v\n%s\n%s", verb, chart.tag, err, out, w.pluginLogs(t))
	}
	if !strings.Contains(string(out), chart.digest) {
		t.Errorf("helm did not %s to the chart with digest %s:\n%s", verb, chart.digest, out)
	}
	pod := w.instance(t, node)
	for _, status := range pod.Status.ContainerStatuses {
		if status.ImageID != image.repository+"@"+image.digest {
			t.Errorf("the plugin runs image %s, want %s@%s", status.ImageID, image.repository, image.digest)
		}
	}
	version := w.mustExec(t, clusterharness.Namespace, pod.Name, "", "gpu-kubelet-plugin", "version")
	if strings.TrimSpace(version) != image.tag {
		t.Errorf("the plugin has version %q, want %s", version, image.tag)
	}
}

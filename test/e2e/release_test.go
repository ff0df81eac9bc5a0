package e2e

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// released is one line of a release's digests.txt: an artifact's repository, tag and digest.
type released struct{ repository, tag, digest string }

// releaseFolder returns a release's folder and its image and chart, or skips the test if no release
// has been made.
func releaseFolder(t *testing.T) (folder string, image, chart released) {
	t.Helper()
	folder = os.Getenv("RELEASE")
	if folder == "" {
		t.Skip("SKIPPED: RELEASE names no release (make test-release-e2e sets it)")
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
// Before, neither containerd nor the user accepts what an attacker changed.
func TestReleaseInstallsFromARegistry(t *testing.T) {
	t.Parallel()
	folder, image, chart := releaseFolder(t)
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

	install, err := w.ClientCommand(t.Context(), "helm", "install", clusterharness.Release, r.chart(),
		"--version", chart.tag, "--plain-http", "--namespace", clusterharness.Namespace, "--create-namespace",
		"--set", "driverRoot=/var/lib/nvmlsim/driver,hostPaths.sys=/var/lib/nvmlsim/sys,hostPaths.proc=/var/lib/nvmlsim/proc",
		"--wait=legacy", "--timeout", "10m")
	if err != nil {
		t.Fatal(err)
	}
	out, err := install.CombinedOutput()
	if err != nil {
		t.Fatalf("install the release: %v\n%s\n%s", err, out, w.pluginLogs(t))
	}
	if !strings.Contains(string(out), chart.digest) {
		t.Errorf("helm did not install the chart with digest %s:\n%s", chart.digest, out)
	}
	pods, err := w.Client.CoreV1().Pods(clusterharness.Namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil || len(pods.Items) != 1 {
		t.Fatalf("%d Pods of the driver, want one: %v", len(pods.Items), err)
	}
	for _, status := range pods.Items[0].Status.ContainerStatuses {
		if status.ImageID != image.repository+"@"+image.digest {
			t.Errorf("the plugin runs image %s, want %s@%s", status.ImageID, image.repository, image.digest)
		}
	}
	version := w.mustExec(t, clusterharness.Namespace, pods.Items[0].Name, "", "gpu-kubelet-plugin", "version")
	if strings.TrimSpace(version) != image.tag {
		t.Errorf("the plugin has version %q, want %s", version, image.tag)
	}
}

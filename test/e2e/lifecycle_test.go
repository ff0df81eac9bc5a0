package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// fleet maps each node of the suite to its number of GPUs.
var fleet = map[string]int{"gpu1": 8, "gpu2": 1}

// TestLifecycle upgrades, uninstalls and reinstalls the chart while Pods use GPUs.
func TestLifecycle(t *testing.T) {
	t.Parallel()
	sim := simulator(t)
	w := bringUpWith(t, cluster.Options{
		Name: "e2e-life", Nodes: []cluster.NodeOptions{sim.Node("gpu1", "dgx-h100"), sim.Node("gpu2", "t4-x1")},
		// This is the kubelet's default. A plugin instance that was killed twice stays away long enough
		// for the test to see that the other plugin instance serves.
		RestartPause: 5 * time.Minute,
	})
	w.needSMI(t)
	bare := w.traces(t)
	w.install(t)
	for node, n := range fleet {
		w.offers(t, node, n)
	}
	t.Run("an upgrade and the way back, under load", w.testUpgrade)
	t.Run("two instances side by side", w.testSideBySide)
	t.Run("claims are held", func(t *testing.T) {
		u := w.tenant(t)
		u.gpus(1, 2)
		u.holder("held", 2, onNode("gpu1"))
		t.Run("an uninstallation is refused", func(t *testing.T) { w.testRefused(t, u.as(t)) })
		t.Run("an uninstallation without hooks leaves what held claims need", func(t *testing.T) { w.testWithoutHooks(t, u.as(t)) })
		t.Run("a forced uninstallation leaves what held claims need", func(t *testing.T) { w.testForced(t, u.as(t), bare) })
	})
	t.Run("an uninstallation removes everything", func(t *testing.T) { w.testUninstalled(t, bare) })
}

// nextVersion is the version that testUpgrade gives to the chart and the image of this checkout,
// because no release exists to upgrade from.
const nextVersion = "0.99.0"

// testUpgrade upgrades to the next version's chart and image and goes back, which replaces every
// plugin twice. No user who creates and deletes Pods may notice.
func (w *world) testUpgrade(t *testing.T) {
	chart := w.nextRelease(t)
	u := w.tenant(t)
	u.gpus(1)
	u.holder("stays", 1, onNode("gpu1"))
	stays := u.holding("stays")
	watches, logs, since := map[string]*sliceWatch{}, map[string]func() []string{}, time.Now()
	for node := range fleet {
		watches[node], logs[node] = w.watchSlices(t, node), w.kubeletLog(t, node)
	}
	l := u.load(map[string]int{"gpu1": 3, "gpu2": 1})
	l.completed(2)
	upgrade := clusterharness.InstallArguments(w.root, "--set", "image.tag="+nextVersion)
	upgrade[slices.Index(upgrade, clusterharness.Chart(w.root))] = chart
	back := []string{"rollback", clusterharness.Release, "--namespace", clusterharness.Namespace, "--wait=legacy", "--timeout", "10m"}
	var newer holding
	for _, step := range []struct {
		version   string
		arguments []string
	}{{nextVersion, upgrade}, {"test", back}} {
		if out, err := w.Helm(t.Context(), step.arguments...); err != nil {
			t.Fatalf("helm to version %s: %v\n%s\n%s", step.version, err, out, w.pluginLogs(t))
		}
		for node := range fleet {
			plugin := w.instance(t, node).Name
			runs := w.mustExec(t, clusterharness.Namespace, plugin, "", "gpu-kubelet-plugin", "version")
			if strings.TrimSpace(runs) != step.version {
				t.Errorf("the plugin of node %s has version %q, want %q", node, runs, step.version)
			}
		}
		l.completed(1)
		if step.version == nextVersion {
			u.holder("newer", 1, onNode("gpu1"))
			newer = u.holding("newer")
		}
	}
	l.stop()
	u.undisturbed(newer)
	u.noFailedPrepare()
	for node, watch := range watches {
		watch.alwaysOffered(fleet[node], since)
	}
	u.undisturbed(stays)
	u.removeAll()
	for node := range fleet {
		w.clean(t, node)
		// Events report only failures of Prepare, so the test also searches the kubelet's log for
		// failures of Unprepare.
		for _, line := range logs[node]() {
			if strings.Contains(line, "prepare dynamic resources: ") {
				t.Errorf("the kubelet of node %s: %s", node, line)
			}
		}
	}
}

// nextRelease packages the chart of this checkout as nextVersion, and loads its image on the nodes.
// It returns the path of the chart's archive.
func (w *world) nextRelease(t *testing.T) string {
	t.Helper()
	image, err := cluster.BuildImage(t.Context(), cluster.ImageBuild{
		Dockerfile: filepath.Join(w.root, "Dockerfile"), Tag: strings.TrimSuffix(clusterharness.Image, "test") + nextVersion,
		Arguments: map[string]string{"VERSION": nextVersion},
	}, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.LoadImage(t.Context(), image); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if _, err := w.Helm(t.Context(), "package", clusterharness.Chart(w.root), "--version", nextVersion, "--app-version", nextVersion,
		"--destination", dir); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "gpu-dra-driver-"+nextVersion+".tgz")
}

// noFailedPrepare checks that no Event of the kubelet reports a failed Prepare.
func (u tenant) noFailedPrepare() {
	u.t.Helper()
	list, err := u.Client.CoreV1().Events(u.namespace).List(u.t.Context(), metav1.ListOptions{})
	if err != nil {
		u.t.Fatal(err)
	}
	started := 0
	for _, e := range list.Items {
		switch e.Reason {
		case "Started":
			started++
		case "FailedPrepareDynamicResources":
			u.t.Errorf("Pod %s: %d times %s: %s", e.InvolvedObject.Name, e.Count, e.Reason, e.Message)
		}
	}
	if started == 0 {
		u.t.Errorf("no Event reports a started container, so missing failure Events prove nothing")
	}
}

// testSideBySide keeps both plugin instances of a rolling update running. The newer one must serve
// the kubelet, and if it dies, the older one must.
func (w *world) testSideBySide(t *testing.T) {
	const node = "gpu1"
	u := w.tenant(t)
	for i := range 4 {
		u.claim(fmt.Sprint("claim-", i), oneGPU)
	}
	claimed := func(i int) string {
		name := fmt.Sprint("pod-", i)
		u.pod(name, fromClaim("gpu", fmt.Sprint("claim-", i)), onNode(node))
		return name
	}
	u.holding(claimed(0))
	watch, since := w.watchSlices(t, node), time.Now()
	older, newer := w.overlap(t, node, "logVerbosity=5")

	// The newer plugin instance must also unprepare claims that the older one prepared.
	u.holding(claimed(1))
	w.said(t, newer, "Prepared claim", "claim-1")
	u.remove("pod-0")
	w.said(t, newer, "Unprepared claim", "claim-0")
	// Kill the newer plugin instance twice, because the kubelet restarts a container at once after its
	// first end.
	for range 2 {
		kill(t, mainProcess(t, "GPU_DRA_POD_UID", string(newer.UID)))
	}
	u.holding(claimed(2))
	w.said(t, older, "Prepared claim", "claim-2")
	u.remove("pod-1")
	w.said(t, older, "Unprepared claim", "claim-1")
	mainProcess(t, "GPU_DRA_POD_UID", string(newer.UID))
	u.holding(claimed(3))
	if n := len(w.records(t, node)); n != 2 {
		t.Errorf("the node has %d records for 2 claims", n)
	}
	w.controllers(t, "start")
	eventually(t, 90*time.Second, "the older plugin instance is gone", func() (bool, string) {
		left := w.instances(t, node)
		return len(left) == 1 && left[0].UID == newer.UID, fmt.Sprint(len(left))
	})
	w.instance(t, node)
	w.offers(t, node, fleet[node])
	u.remove("pod-2", "pod-3")
	watch.alwaysOffered(fleet[node], since)
	w.clean(t, node)
}

// overlap starts a rolling update and stops it while both plugin instances are ready. It stops the
// Kubernetes controllers, so that nothing ends the older one.
func (w *world) overlap(t *testing.T, node, value string) (older, newer corev1.Pod) {
	t.Helper()
	older = w.instance(t, node)
	t.Cleanup(func() {
		if t.Failed() {
			w.controllers(t, "start")
		}
	})
	args := append(
		slices.DeleteFunc(clusterharness.InstallArguments(w.root, "--set", value),
			func(a string) bool { return strings.HasPrefix(a, "--wait=") }),
		"--wait=false",
	)
	if out, err := w.Helm(t.Context(), args...); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	eventually(t, 60*time.Second, "a newer plugin instance exists", func() (bool, string) {
		pods := w.instances(t, node)
		return len(pods) == 2, fmt.Sprint(len(pods))
	})
	w.controllers(t, "stop")
	eventually(t, 60*time.Second, "both plugin instances are ready", func() (bool, string) {
		pods := w.instances(t, node)
		for _, p := range pods {
			if p.UID != older.UID {
				newer = p
			}
			if !isReady(&p) || p.DeletionTimestamp != nil {
				return false, fmt.Sprint(p.Name, p.Status.Conditions)
			}
		}
		return len(pods) == 2, fmt.Sprint(len(pods))
	})
	return older, newer
}

// said fails the test unless this plugin instance has logged the message in the parameter what
// about the claim.
func (w *world) said(t *testing.T, instance corev1.Pod, what, claim string) {
	t.Helper()
	out, err := w.Kubectl(t.Context(), "-n", clusterharness.Namespace, "logs", instance.Name)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out) {
		if strings.Contains(line, `"`+what+`"`) && strings.Contains(line, "/"+claim+`"`) {
			return
		}
	}
	t.Errorf("plugin %s did not log %q about claim %s", instance.Name, what, claim)
}

// controllers stops or starts the kube-controller-manager. verb is "stop" or "start".
func (w *world) controllers(t *testing.T, verb string) {
	t.Helper()
	controlPlane, err := w.Node("control-plane")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), enough) // a cleanup calls this too
	defer cancel()
	if err := controlPlane.Service(ctx, verb, "kube-controller-manager"); err != nil {
		t.Fatal(err)
	}
}

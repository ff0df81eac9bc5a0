package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/stand"
)

// The nodes of the suite and how many GPUs they have.
var fleet = map[string]int{"gpu1": 8, "gpu2": 1}

// What an administrator does with the release while users work: upgrade it, try to remove it, remove it, install it again.
func TestLifecycle(t *testing.T) {
	sim := simulator(t)
	w := bringUp(t, "e2e-life", sim.Node("gpu1", "dgx-h100"), sim.Node("gpu2", "t4-x1"))
	w.needSMI(t)
	bare := w.traces(t)
	w.install(t)
	for node, n := range fleet {
		w.offers(t, node, n)
	}
	t.Run("an upgrade under load", w.testUpgrade)
	t.Run("two instances side by side", w.testSideBySide)
	t.Run("claims are held", func(t *testing.T) {
		u := w.tenant(t)
		u.gpus(1, 2)
		u.holder("held", 2, onNode("gpu1"))
		t.Run("an uninstallation is refused", func(t *testing.T) { w.testRefused(t, u.as(t)) })
		t.Run("an uninstallation by force leaves what they need", func(t *testing.T) { w.testForced(t, u.as(t), bare) })
	})
	t.Run("an uninstallation removes everything", func(t *testing.T) { w.testUninstalled(t, bare) })
}

// Nobody who creates and deletes Pods notices that every plugin is replaced, twice.
func (w *world) testUpgrade(t *testing.T) {
	u := w.tenant(t)
	u.gpus(1)
	u.holder("stays", 1, onNode("gpu1"))
	stays := u.holding("stays")
	watches, since := map[string]*sliceWatch{}, time.Now()
	for node := range fleet {
		watches[node] = w.watchSlices(t, node)
	}
	l := u.load(map[string]int{"gpu1": 3, "gpu2": 1})
	l.completed(2)
	for _, verbosity := range []string{"5", "6"} {
		before := map[string]corev1.Pod{}
		for node := range fleet {
			before[node] = w.instance(t, node)
		}
		w.install(t, "--set", "logVerbosity="+verbosity)
		for node := range fleet {
			if now := w.instance(t, node); now.UID == before[node].UID {
				t.Errorf("the upgrade did not replace the plugin of node %s", node)
			}
		}
		l.completed(1)
	}
	l.stop()
	u.noFailedPrepare()
	for node, watch := range watches {
		watch.alwaysOffered(fleet[node], since)
	}
	u.undisturbed(stays)
	u.removeAll()
	for node := range fleet {
		w.clean(t, node)
	}
}

// noFailedPrepare makes sure that the kubelet never had to say that a claim could not be prepared.
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
		u.t.Errorf("no Event tells of a container that started: Events cannot prove anything")
	}
}

// Both instances of a rolling update serve the kubelet for as long as they are there; if the newer one dies, the older one goes on.
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

	// What the older one prepared the newer one gives back.
	u.holding(claimed(1))
	w.said(t, newer, "Prepared the claim", "claim-1")
	u.remove("pod-0")
	w.said(t, newer, "Unprepared the claim", "claim-0")
	// Twice, because the kubelet starts a container that ended for the first time again at once.
	for range 2 {
		kill(t, mainProcess(t, "GPU_DRA_POD_UID", string(newer.UID)))
	}
	u.holding(claimed(2))
	w.said(t, older, "Prepared the claim", "claim-2")
	u.remove("pod-1")
	w.said(t, older, "Unprepared the claim", "claim-1")
	mainProcess(t, "GPU_DRA_POD_UID", string(newer.UID))
	u.holding(claimed(3))
	if n := len(w.records(t, node)); n != 2 {
		t.Errorf("the node has %d records for 2 claims", n)
	}
	w.controllers(t, "start")
	eventually(t, 90*time.Second, "the older instance goes", func() (bool, string) {
		left := w.instances(t, node)
		return len(left) == 1 && left[0].UID == newer.UID, fmt.Sprint(len(left))
	})
	w.instance(t, node)
	w.offers(t, node, fleet[node])
	u.remove("pod-2", "pod-3")
	watch.alwaysOffered(fleet[node], since)
	w.clean(t, node)
}

// overlap begins a rolling update and stops it where the older and the newer instance are both ready: nobody tells the older one to go while the
// controllers do not run.
func (w *world) overlap(t *testing.T, node, value string) (older, newer corev1.Pod) {
	t.Helper()
	older = w.instance(t, node)
	t.Cleanup(func() {
		if t.Failed() {
			w.controllers(t, "start")
		}
	})
	args := append(slices.DeleteFunc(stand.InstallArguments(w.root, "--set", value), func(a string) bool { return a == "--wait" }), "--wait=false")
	if out, err := w.Helm(t.Context(), args...); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	eventually(t, 60*time.Second, "a newer instance is made", func() (bool, string) {
		pods := w.instances(t, node)
		return len(pods) == 2, fmt.Sprint(len(pods))
	})
	w.controllers(t, "stop")
	eventually(t, 60*time.Second, "both instances are ready", func() (bool, string) {
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

// said makes sure that an instance has logged something of a claim.
func (w *world) said(t *testing.T, instance corev1.Pod, what, claim string) {
	t.Helper()
	out, err := w.Kubectl(t.Context(), "-n", stand.Namespace, "logs", instance.Name)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out) {
		if strings.Contains(line, `"`+what+`"`) && strings.Contains(line, "/"+claim+`"`) {
			return
		}
	}
	t.Errorf("%s did not say %q of %s", instance.Name, what, claim)
}

// controllers stops or starts the controllers of Kubernetes itself.
func (w *world) controllers(t *testing.T, verb string) {
	t.Helper()
	controlPlane, err := w.Node("control-plane")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute) // also in a cleanup
	defer cancel()
	if err := controlPlane.Service(ctx, verb, "kube-controller-manager"); err != nil {
		t.Fatal(err)
	}
}

// uninstall is helm uninstall, with all that it prints.
func (w *world) uninstall(t *testing.T) (string, error) {
	t.Helper()
	cmd, err := w.ClientCommand(t.Context(), "helm", "uninstall", stand.Release, "--namespace", stand.Namespace, "--timeout", "3m")
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// testRefused: the administrator learns who holds what, and nothing has changed.
func (w *world) testRefused(t *testing.T, u tenant) {
	held := u.holding("held")
	claim := u.claimOf(t, u.namespace, "held", "gpu")
	watch, since, before := w.watchSlices(t, "gpu1"), time.Now(), w.instance(t, "gpu1")

	out, err := w.uninstall(t)
	if err == nil {
		t.Fatalf("helm uninstalled the driver under a held claim:\n%s", out)
	}
	for _, want := range []string{claim.Namespace + "/" + claim.Name, "helm rollback", "--no-hooks"} {
		if !strings.Contains(out, want) {
			t.Errorf("helm does not say %q, who holds what and which ways out there are:\n%s", want, out)
		}
	}
	u.undisturbed(held)
	if now := w.instance(t, "gpu1"); now.UID != before.UID {
		t.Error("the plugin was replaced")
	}
	u.killContainer("held")
	u.restarted(held)
	u.holder("new", 1, onNode("gpu1"))
	u.holding("new")
	u.remove("new")
	// The release goes on being used.
	if out, err := w.Helm(t.Context(), "rollback", stand.Release, w.lastRevision(t), "--namespace", stand.Namespace); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	w.install(t, "--set", "logVerbosity=4")
	u.undisturbed(u.now("held"))
	watch.alwaysOffered(fleet["gpu1"], since)
}

// lastRevision is the release's, as helm numbers them.
func (w *world) lastRevision(t *testing.T) string {
	t.Helper()
	out, err := w.Helm(t.Context(), "history", stand.Release, "--namespace", stand.Namespace, "--max", "1", "--output", "json")
	if err != nil {
		t.Fatal(err)
	}
	var revisions []struct {
		Revision int `json:"revision"`
	}
	if err := json.Unmarshal([]byte(out), &revisions); err != nil || len(revisions) != 1 {
		t.Fatalf("%v in\n%s", err, out)
	}
	return strconv.Itoa(revisions[0].Revision)
}

// testForced: what a running Pod needs stays on its node, nothing stays elsewhere, and an installation takes over what it finds.
func (w *world) testForced(t *testing.T, u tenant, bare map[string][]string) {
	held := u.holding("held")
	w.install(t, "--set", "uninstall.force=true")
	if out, err := w.uninstall(t); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if n := len(w.instances(t, "gpu1")) + len(w.instances(t, "gpu2")); n != 0 {
		t.Errorf("%d plugins are left", n)
	}
	left := w.traces(t)
	if !slices.Equal(left["gpu2"], bare["gpu2"]) {
		t.Errorf("node gpu2, where no claim is held, has\n%s\nbefore the installation it had\n%s", strings.Join(left["gpu2"], "\n"), strings.Join(bare["gpu2"], "\n"))
	}
	for _, need := range []string{baseSpec, claimSpecPath(held.claimUID), pluginDir + "/bin/nvidia-cdi-hook"} {
		if !slices.Contains(left["gpu1"], need) {
			t.Errorf("%s is gone, which Pod held needs", need)
		}
	}
	if n := len(w.records(t, "gpu1")); n != 1 {
		t.Errorf("there are %d records of the one claim", n)
	}
	// Nothing may be allocated where nothing can be prepared.
	for node := range fleet {
		if n := len(w.slices(t, node)); n != 0 {
			t.Errorf("node %s still offers %d slices", node, n)
		}
	}
	u.stillWorks(held)
	u.killContainer("held")
	eventually(t, 60*time.Second, "the container starts again without a plugin", func() (bool, string) {
		now := u.get("held").Status.ContainerStatuses[0]
		return now.Ready && now.ContainerID != held.container, u.events(t, u.namespace, "held")
	})
	u.stillWorks(held)

	u.delete("held") // its claim cannot be given back without a plugin
	w.install(t)
	u.gone("held")
	w.clean(t, "gpu1")
}

// stillWorks makes sure that a Pod sees its GPUs; no slice tells which those are.
func (u tenant) stillWorks(h holding) {
	u.t.Helper()
	if seen := u.visible(h.pod, ""); !slices.Equal(seen, h.gpus) {
		u.t.Errorf("Pod %s sees %v, it was given %v", h.pod, seen, h.gpus)
	}
}

// testUninstalled: nodes and API server are as before the first installation, and the next one works.
func (w *world) testUninstalled(t *testing.T, bare map[string][]string) {
	u := w.tenant(t)
	u.gpus(8)
	u.holder("used", 8)
	u.holding("used")
	u.remove("used")
	// Left by a Pod that ended without its plugin: what nobody else would remove.
	for node, have := range w.traces(t) {
		if slices.Equal(have, bare[node]) {
			t.Errorf("node %s has no trace of the installed driver: they are looked for in the wrong places", node)
		}
	}
	if out, err := w.uninstall(t); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for node, left := range w.traces(t) {
		for _, path := range left {
			if !slices.Contains(bare[node], path) {
				t.Errorf("%s is left on node %s", path, node)
			}
		}
		for _, path := range bare[node] {
			if !slices.Contains(left, path) {
				t.Errorf("%s was not ours and is gone from node %s", path, node)
			}
		}
		if n := len(w.slices(t, node)); n != 0 {
			t.Errorf("%d ResourceSlices of node %s are left", n, node)
		}
	}
	objects, err := w.Kubectl(t.Context(), "get", "--all-namespaces", "--output", "name", "--selector", "app.kubernetes.io/instance="+stand.Release,
		"daemonsets,pods,jobs,configmaps,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings,deviceclasses,validatingadmissionpolicies,validatingadmissionpolicybindings,resourceslices")
	if err != nil {
		t.Fatal(err)
	}
	if objects != "" {
		t.Errorf("objects are left:\n%s", objects)
	}

	w.install(t)
	w.offers(t, "gpu1", fleet["gpu1"])
	u.holder("again", 8)
	u.holding("again")
	u.remove("again")
	w.clean(t, "gpu1")
}

// traces lists the files of each node where a driver might leave something.
func (w *world) traces(t *testing.T) map[string][]string {
	t.Helper()
	found := map[string][]string{}
	for node := range fleet {
		out := w.on(t, node, "sh", "-c", `find /etc /opt /srv /usr/local /usr/bin /dev `+filepath.Dir(pluginDir)+` `+registrarDir+` `+cdiRoot+`/ `+stand.NodeRoot+` \
			-path /dev/pts -prune -o -path /dev/shm -prune -o -path /opt/cluster -prune -o ! -path `+cdiRoot+`/ -print 2>/dev/null | sort`)
		found[node] = strings.Fields(out)
	}
	return found
}

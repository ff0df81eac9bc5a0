package e2e

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/stand"
)

// uninstall is helm uninstall, with all that it prints, until the supervisor's Pods are gone too, which end after the hook.
func (w *world) uninstall(t *testing.T, more ...string) (string, error) {
	t.Helper()
	args := append([]string{"uninstall", stand.Release, "--namespace", stand.Namespace, "--timeout", "10m", "--wait", "--cascade", "foreground"}, more...)
	cmd, err := w.ClientCommand(t.Context(), "helm", args...)
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.CombinedOutput()
	if err == nil {
		// Helm has been seen to come back while one was still there that had been told to go, and an installation right after it took that for its own.
		eventually(t, time.Minute, "the chart's DaemonSets are gone", func() (bool, string) {
			left, err := w.Client.AppsV1().DaemonSets(stand.Namespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/instance=" + stand.Release})
			if err != nil {
				return false, err.Error()
			}
			return len(left.Items) == 0, fmt.Sprint(len(left.Items))
		})
	}
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
	if n := len(w.records(t, "gpu1")); n != 1 {
		t.Errorf("there are %d records of the one claim", n)
	}
	// Nothing may be allocated where nothing can be prepared.
	for node := range fleet {
		if n := len(w.slices(t, node)); n != 0 {
			t.Errorf("node %s still offers %d slices", node, n)
		}
	}
	u.goesOnWithoutPlugin(held)

	u.delete("held") // its claim cannot be given back without a plugin
	w.install(t)
	u.gone("held")
	w.clean(t, "gpu1")
}

// goesOnWithoutPlugin makes sure that all is there that a Pod's containers need, and that they can be started again.
func (u tenant) goesOnWithoutPlugin(h holding) {
	u.t.Helper()
	left := u.traces(u.t)["gpu1"]
	for _, need := range []string{baseSpec, claimSpecPath(h.claimUID), pluginDir + "/bin/nvidia-cdi-hook"} {
		if !slices.Contains(left, need) {
			u.t.Errorf("%s is gone, which Pod %s needs", need, h.pod)
		}
	}
	u.stillWorks(h)
	u.killContainer(h.pod)
	eventually(u.t, 60*time.Second, "the container starts again without a plugin", func() (bool, string) {
		now := u.get(h.pod).Status.ContainerStatuses[0]
		return now.Ready && now.ContainerID != h.container, u.events(u.t, u.namespace, h.pod)
	})
	u.stillWorks(h)
}

// testWithoutHooks: nobody is asked, and the next installation finds what there is.
func (w *world) testWithoutHooks(t *testing.T, u tenant) {
	held := u.holding("held")
	if out, err := w.uninstall(t, "--no-hooks"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for node := range fleet {
		eventually(t, 60*time.Second, "the plugin of node "+node+" is gone", func() (bool, string) {
			n := len(w.instances(t, node))
			return n == 0, fmt.Sprint(n)
		})
	}
	u.goesOnWithoutPlugin(held)
	now := u.get("held").Status.ContainerStatuses[0]
	w.install(t)
	for node, n := range fleet {
		w.offers(t, node, n)
	}
	u.sameClaim(held, u.holding("held"))
	if after := u.get("held").Status.ContainerStatuses[0]; after.ContainerID != now.ContainerID {
		t.Error("the installation disturbed the Pod's container")
	}
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

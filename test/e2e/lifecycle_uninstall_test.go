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

	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// uninstall runs helm uninstall and returns its output. Foreground deletion makes helm also wait
// for the MPS supervisor's Pods, which end after the hook.
func (w *world) uninstall(t *testing.T, more ...string) (string, error) {
	t.Helper()
	args := append(
		[]string{"uninstall", clusterharness.Release, "--namespace", clusterharness.Namespace, "--timeout", "10m", "--wait", "--cascade",
			"foreground"},
		more...)
	cmd, err := w.ClientCommand(t.Context(), "helm", args...)
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.CombinedOutput()
	if err == nil {
		// Helm sometimes returns while a deleted DaemonSet still exists. An installation right after that
		// would adopt the dying DaemonSet.
		eventually(t, time.Minute, "the chart's DaemonSets are gone", func() (bool, string) {
			left, err := w.Client.AppsV1().
				DaemonSets(clusterharness.Namespace).
				List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/instance=" + clusterharness.Release})
			if err != nil {
				return false, err.Error()
			}
			return len(left.Items) == 0, fmt.Sprint(len(left.Items))
		})
	}
	return string(out), err
}

// testRefused expects that helm refuses an uninstallation while a claim holds a device. The
// administrator must learn which claims these are, and nothing may change.
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
			t.Errorf("helm's output lacks %q:\n%s", want, out)
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
	// After the refusal the release must still be usable: roll it back and upgrade it.
	if out, err := w.Helm(t.Context(), "rollback", clusterharness.Release, w.lastRevision(t), "--namespace",
		clusterharness.Namespace); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	w.install(t, "--set", "logVerbosity=4")
	u.undisturbed(u.now("held"))
	watch.alwaysOffered(fleet["gpu1"], since)
}

// lastRevision returns the number of the release's last revision in helm.
func (w *world) lastRevision(t *testing.T) string {
	t.Helper()
	out, err := w.Helm(t.Context(), "history", clusterharness.Release, "--namespace", clusterharness.Namespace, "--max", "1", "--output",
		"json")
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

// testForced forces an uninstallation. A running Pod must keep what it needs on its node, nothing
// may stay on the other node, and a new installation must take over the Pod's claim.
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
		t.Errorf(
			"node gpu2, where no claim is held, has\n%s\nbefore the installation it had\n%s",
			strings.Join(left["gpu2"], "\n"),
			strings.Join(bare["gpu2"], "\n"),
		)
	}
	if n := len(w.records(t, "gpu1")); n != 1 {
		t.Errorf("there are %d records, want one for the one claim", n)
	}
	// No slice may be left, because no claim may be allocated where no plugin can prepare it.
	for node := range fleet {
		if n := len(w.slices(t, node)); n != 0 {
			t.Errorf("node %s still offers %d slices", node, n)
		}
	}
	u.goesOnWithoutPlugin(held)

	u.delete("held") // its claim cannot be unprepared without a plugin
	w.install(t)
	u.gone("held")
	w.clean(t, "gpu1")
}

// goesOnWithoutPlugin checks that all files exist that a Pod's containers need, and that its
// container can restart without a plugin.
func (u tenant) goesOnWithoutPlugin(h holding) {
	u.t.Helper()
	left := u.traces(u.t)["gpu1"]
	for _, need := range []string{baseSpec, claimSpecPath(h.claimUID), cdiHook} {
		if !slices.ContainsFunc(left, func(path string) bool { ok, _ := filepath.Match(need, path); return ok }) {
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

// testWithoutHooks uninstalls without hooks, so that no hook checks for claims in use. The next
// installation must take over the running Pod's claim.
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

// stillWorks checks that a Pod still sees its GPUs, although no ResourceSlice lists the GPUs any
// more.
func (u tenant) stillWorks(h holding) {
	u.t.Helper()
	if seen := u.visible(h.pod, ""); !slices.Equal(seen, h.gpus) {
		u.t.Errorf("Pod %s sees %v, it was allocated %v", h.pod, seen, h.gpus)
	}
}

// testUninstalled expects that nodes and API server are as before the first installation, and that
// the next installation works.
func (w *world) testUninstalled(t *testing.T, bare map[string][]string) {
	u := w.tenant(t)
	u.gpus(8)
	u.holder("used", 8)
	u.holding("used")
	u.remove("used")
	// While the driver is installed, traces must see files of it. Otherwise the comparison below
	// proves nothing.
	for node, have := range w.traces(t) {
		if slices.Equal(have, bare[node]) {
			t.Errorf("traces sees no file of the installed driver on node %s, so it looks in the wrong directories", node)
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
				t.Errorf("%s existed before the installation and is gone from node %s", path, node)
			}
		}
		if n := len(w.slices(t, node)); n != 0 {
			t.Errorf("%d ResourceSlices of node %s are left", n, node)
		}
	}
	objects, err := w.Kubectl(
		t.Context(),
		"get",
		"--all-namespaces",
		"--output",
		"name",
		"--selector",
		"app.kubernetes.io/instance="+clusterharness.Release,
		"daemonsets,pods,jobs,configmaps,serviceaccounts,roles,rolebindings,"+
			"clusterroles,clusterrolebindings,deviceclasses,validatingadmissionpolicies,validatingadmissionpolicybindings,resourceslices",
	)
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

// traces lists the files in those directories of each node in which a driver might leave something.
// The links in /dev/char stay on purpose, for containers of others, until a reboot.
func (w *world) traces(t *testing.T) map[string][]string {
	t.Helper()
	found := map[string][]string{}
	for node := range fleet {
		out := w.on(
			t,
			node,
			"sh",
			"-c",
			`find /etc /opt /srv /usr/local /usr/bin /dev `+filepath.Dir(pluginDir)+` `+registrarDir+` `+cdiRoot+`/ `+clusterharness.NodeRoot+` \
			/var/lib/gpu-dra-driver /run/gpu-dra-driver \
			-path /dev/pts -prune -o -path /dev/char -prune -o -path /dev/shm -prune -o -path /opt/cluster -prune \
			-o -path "*/nvmlsim/proc/1" -prune \
			-o ! -path `+cdiRoot+`/ -print 2>/dev/null | sort`,
		)
		found[node] = strings.Fields(out)
	}
	return found
}

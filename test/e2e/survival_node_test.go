package e2e

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// republishWithin limits the time from the plugin's registration with a new kubelet until the
// node's slices are back. The kubelet deletes the slices at its start.
const republishWithin = 2 * time.Second

func (w *world) testKubeletEnds(t *testing.T, u tenant) {
	u.holder("one", 1)
	u.holder("two", 2)
	one, two := u.holding("one"), u.holding("two")
	for _, verb := range []string{"restart", "kill"} {
		t.Run(verb, func(t *testing.T) {
			u := u.as(t)
			watch, since := w.watchSlices(t, survivor), time.Now()
			registered := w.registrations(t)
			if err := w.node(t, survivor).Service(t.Context(), verb, "kubelet"); err != nil {
				t.Fatal(err)
			}
			u.holder("new-"+verb, 1)
			u.holding("new-" + verb)
			u.undisturbed(one, two)
			w.republished(t, watch, since, registered())
			u.remove("new-" + verb)
		})
	}
}

// republished fails the test unless the kubelet deleted the node's slices after the time since, and
// all whole GPUs were published again within republishWithin.
func (w *world) republished(t *testing.T, watch *sliceWatch, since, registered time.Time) {
	t.Helper()
	w.offers(t, survivor, survivorGPUs)
	var deleted, back time.Time
	for _, o := range watch.history(since) {
		switch {
		case o.gpus != survivorGPUs:
			deleted, back = o.at, time.Time{}
		case back.IsZero():
			back = o.at
		}
	}
	if deleted.IsZero() {
		t.Error("the kubelet did not delete the node's slices: nothing was republished")
		return
	}
	// If the kubelet deleted the slices after the registration, the time counts from the deletion.
	from := registered
	if deleted.After(from) {
		from = deleted
	}
	took := back.Sub(from)
	t.Logf(
		"slices deleted %s, plugin registered %s, slices back %s: %s later",
		deleted.Format(time.StampMilli),
		registered.Format(time.StampMilli),
		back.Format(time.StampMilli),
		took,
	)
	if took > republishWithin {
		t.Errorf("the node's slices were back %s after the kubelet had registered the plugin again, want at most %s", took, republishWithin)
	}
}

var connected = regexp.MustCompile(`^I(\d{4} \d\d:\d\d:\d\d\.\d+) .*"Connection changed".*driverName="gpu\.nvidia\.com".*connected=true`)

// registrations starts to watch the kubelet's log. The returned function returns the time at which
// the kubelet last connected to the plugin since then.
func (w *world) registrations(t *testing.T) func() time.Time {
	t.Helper()
	lines := w.kubeletLog(t, survivor)
	return func() time.Time {
		t.Helper()
		var last time.Time
		for _, line := range lines() {
			match := connected.FindStringSubmatch(line)
			if match == nil {
				continue
			}
			at, err := time.ParseInLocation("2006 0102 15:04:05.000000", fmt.Sprint(time.Now().Year(), " ", match[1]), time.Local)
			if err != nil {
				t.Fatal(err)
			}
			last = at
		}
		if last.IsZero() {
			t.Fatal("the kubelet's log reports no registration")
		}
		return last
	}
}

// ownedWithin limits the time from the registration of a Node until its slices belong to it.
const ownedWithin = 10 * time.Second

// testNodeRegistersAgain deletes the Node while Pods have GPUs. The garbage collector deletes its
// slices, and they must come back when the kubelet registers the Node with another UID.
func (w *world) testNodeRegistersAgain(t *testing.T, u tenant) {
	u.holder("one", 1)
	u.holder("two", 2)
	one, two, instance := u.holding("one"), u.holding("two"), w.instance(t, survivor)
	nodes := w.Client.CoreV1().Nodes()
	if err := nodes.Delete(t.Context(), survivor, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, 30*time.Second, "the slices are deleted with their Node", func() (bool, string) {
		n := len(w.slices(t, survivor))
		return n == 0, fmt.Sprint(n, " slices")
	})
	if err := w.node(t, survivor).RestartKubelet(t.Context()); err != nil {
		t.Fatal(err)
	}
	var uid types.UID
	eventually(t, 30*time.Second, "the Node registers again", func() (bool, string) {
		node, err := nodes.Get(t.Context(), survivor, metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		uid = node.UID
		return true, ""
	})
	took := eventually(t, ownedWithin, "the slices belong to the new Node", func() (bool, string) {
		var owners []string
		foreign := false
		for _, s := range w.slices(t, survivor) {
			foreign = foreign || s.OwnerReferences[0].UID != uid
			owners = append(owners, string(s.OwnerReferences[0].UID))
		}
		return !foreign && len(w.gpus(t, survivor)) == survivorGPUs, fmt.Sprint(owners)
	})
	t.Logf("the slices belonged to the new Node %s after it had registered", took.Round(time.Millisecond))
	if took > ownedWithin {
		t.Errorf("the slices belonged to the new Node after %s, want at most %s", took, ownedWithin)
	}
	u.undisturbed(one, two)
	w.sameInstance(t, instance)
	u.holder("next", 1)
	u.holding("next")
	u.undisturbed(one, two)
}

func (w *world) testContainerdEnds(t *testing.T, u tenant) {
	u.holder("one", 1)
	u.holder("two", 2)
	one, two := u.holding("one"), u.holding("two")
	for _, verb := range []string{"restart", "kill"} {
		if err := w.node(t, survivor).Service(t.Context(), verb, "containerd"); err != nil {
			t.Fatal(err)
		}
		// After a refused connection, the kubelet waits before it connects to containerd again.
		eventually(t, 30*time.Second, "the kubelet reaches containerd", func() (bool, string) {
			out, err := w.exec(t, u.namespace, one.pod, "", "nvidia-smi", "-L")
			return err == nil, out
		})
		u.undisturbed(one, two)
	}
	u.killContainer("two")
	u.restarted(two)
	u.undisturbed(one)
	u.holder("new", 1)
	u.holding("new")
}

// testSpecsDeleted deletes CDI specs, and expects that the plugin restores them. A container that
// restarts needs them, and the kubelet does not prepare its claim again.
func (w *world) testSpecsDeleted(t *testing.T, u tenant) {
	u.holder("two", 2)
	t.Run("while the plugin runs", func(t *testing.T) {
		u := u.as(t)
		two := u.holding("two")
		w.deleteSpecs(t, two)
		u.killContainer("two")
		u.restarted(two)
		w.specsAreBack(t, two)
	})
	t.Run("while the plugin is dead", func(t *testing.T) {
		u := u.as(t)
		two := u.holding("two")
		k := w.killPlugin(t)
		w.deleteSpecs(t, two)
		u.killContainer("two")
		w.back(t, k)
		u.restarted(two)
		w.specsAreBack(t, two)
	})
}

func (w *world) deleteSpecs(t *testing.T, of holding) {
	t.Helper()
	w.on(t, survivor, "rm", baseSpec, claimSpecPath(of.claimUID))
}

func (w *world) specsAreBack(t *testing.T, of ...holding) {
	t.Helper()
	eventually(t, 10*time.Second, "the CDI specs exist again", func() (bool, string) {
		have := w.on(t, survivor, "find", cdiRoot+"/", "-type", "f")
		for _, want := range of {
			if !strings.Contains(have, claimSpecPath(want.claimUID)) {
				return false, have
			}
		}
		return strings.Contains(have, baseSpec), have
	})
}

// testPowerCut cuts the node's power. All running Pods must come back with their devices: of a
// Deployment, of a DaemonSet, and bare ones. The result is the UID of the claim of a Pod that is
// deleted while the power is off. The kubelet unprepares that claim later.
func (w *world) testPowerCut(t *testing.T, u tenant) (deletedClaim string) {
	u.apply(t, u.namespace, controllers())
	u.holder("bare", 2)
	u.holder("deleted", 1)
	var before []holding
	for _, pod := range u.controlled(3) {
		before = append(before, u.holding(pod))
	}
	bare, deleted := u.holding("bare"), u.holding("deleted")
	before = append(before, bare)
	records := w.recordWatch(t)
	// The claim of Pod late is in the middle of Prepare when the power is cut.
	u.holder("late", 1)
	next(t, records, fsnotify.Create, 1)
	_ = records.Close()

	node := w.node(t, survivor)
	if err := node.PowerCut(t.Context()); err != nil {
		t.Fatal(err)
	}
	u.forget("deleted")
	since := time.Now()
	if err := node.Boot(t.Context()); err != nil {
		t.Fatal(err)
	}
	u.restarted(before...)
	u.holding("late")
	w.specsAreBack(t, before...)
	t.Logf("everything was back %s after the node's power", time.Since(since).Round(time.Millisecond))
	w.recordsAreOfThisBoot(t, len(before)+1, deleted.claimUID)

	if _, err := w.Kubectl(t.Context(), "-n", u.namespace, "delete", "deployment/deployed", "daemonset/everywhere", "--cascade=foreground",
		"--timeout=6m"); err != nil {
		t.Fatal(err)
	}
	return deleted.claimUID
}

// testGivenBack waits until the claim with the UID that testPowerCut returned is unprepared. Its
// Pod was deleted while the power was off.
func (w *world) testGivenBack(t *testing.T, claimUID string) {
	if claimUID == "" {
		t.Skip("SKIPPED: the power cut failed")
	}
	eventually(t, 150*time.Second, "the claim of a Pod that was deleted while the power was off is unprepared", func() (bool, string) {
		return !w.hasRecord(t, survivor, claimUID), fmt.Sprint(w.records(t, survivor))
	})
}

// recordsAreOfThisBoot fails the test unless the node has the checkpoint records of exactly n
// claims, all written after the boot. It ignores the record of the claim with the UID deletedClaim,
// which may still exist.
func (w *world) recordsAreOfThisBoot(t *testing.T, n int, deletedClaim string) {
	t.Helper()
	boot := strings.TrimSpace(w.on(t, survivor, "cat", "/proc/sys/kernel/random/boot_id"))
	paths := slices.DeleteFunc(w.records(t, survivor), func(path string) bool { return strings.HasPrefix(filepath.Base(path), deletedClaim) })
	if len(paths) != n {
		t.Errorf("the node has %d records, want %d", len(paths), n)
	}
	for _, path := range paths {
		r, err := readRecord(path)
		if err != nil {
			t.Error(err)
		}
		if r.BootID != boot || r.State != "Prepared" {
			t.Errorf("%s: state %s of boot %s, want Prepared of boot %s", filepath.Base(path), r.State, r.BootID, boot)
		}
	}
}

// controlled returns the names of the Pods that the Deployment and the DaemonSet created, once
// there are n.
func (u tenant) controlled(n int) []string {
	u.t.Helper()
	var names []string
	eventually(u.t, 60*time.Second, fmt.Sprintf("the controllers have created %d Pods", n), func() (bool, string) {
		list, err := u.Client.CoreV1().Pods(u.namespace).List(u.t.Context(), metav1.ListOptions{LabelSelector: "controlled=yes"})
		if err != nil {
			return false, err.Error()
		}
		names = nil
		for _, p := range list.Items {
			names = append(names, p.Name)
		}
		return len(names) == n, fmt.Sprint(names)
	})
	return names
}

// controllers is the manifest of a Deployment of two Pods and a DaemonSet. Each Pod has a GPU.
func controllers() string {
	return controller("Deployment", "deployed", "replicas: 2") + controller("DaemonSet", "everywhere", "")
}

func controller(kind, name, more string) string {
	return fmt.Sprintf(`
apiVersion: apps/v1
kind: %[1]s
metadata: {name: %[2]s}
spec:
  %[3]s
  selector: {matchLabels: {app: %[2]s}}
  template:
    metadata: {labels: {app: %[2]s, controlled: "yes"}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
        - name: main
          image: %[4]s
          imagePullPolicy: Never
          command: [sh, -c, "trap 'exit 0' TERM; sleep infinity & wait"]
          resources: {claims: [{name: gpu}]}
      resourceClaims: [{name: gpu, resourceClaimTemplateName: gpus-1}]
---
`, kind, name, more, cluster.TestImage)
}

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
)

// killed is a plugin that a test has ended by SIGKILL. before is the plugin's Pod as it was before
// the kill.
type killed struct{ before corev1.Pod }

// pluginProcess returns the main process of the node's plugin, and the plugin's Pod.
func (w *world) pluginProcess(t *testing.T) (*os.Process, corev1.Pod) {
	t.Helper()
	instance := w.instance(t, survivor)
	return mainProcess(t, "GPU_DRA_POD_UID", string(instance.UID)), instance
}

// killPlugin ends the node's plugin by SIGKILL.
func (w *world) killPlugin(t *testing.T) killed {
	t.Helper()
	process, before := w.pluginProcess(t)
	kill(t, process)
	return killed{before}
}

// replacePlugin deletes the plugin's Pod and waits for the next one, which has no restart back-off.
// After 30 s without a plugin the kubelet would delete the node's slices.
func (w *world) replacePlugin(t *testing.T) {
	t.Helper()
	old := w.instance(t, survivor)
	if err := w.Client.CoreV1().Pods(old.Namespace).Delete(t.Context(), old.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, 90*time.Second, "the plugin is replaced", func() (bool, string) {
		now := w.instance(t, survivor)
		return now.UID != old.UID, now.Name
	})
}

// back waits until the killed plugin runs in a new container, and is ready.
func (w *world) back(t *testing.T, k killed) {
	t.Helper()
	old := k.before.Status.ContainerStatuses[0].ContainerID
	eventually(t, 90*time.Second, "the killed plugin runs again", func() (bool, string) {
		now := w.instance(t, survivor)
		status := now.Status.ContainerStatuses[0]
		return status.ContainerID != old && status.Ready, fmt.Sprintf("%+v", status)
	})
}

// testKilledWhileHeld kills the plugin while Pods have GPUs. Running Pods must notice nothing, a
// Pod that ends meanwhile must free its GPU, and a new Pod must get one.
func (w *world) testKilledWhileHeld(t *testing.T, u tenant) {
	u.holder("one", 1)
	u.holder("two", 2)
	u.holder("ends", 1)
	one, two := u.holding("one"), u.holding("two")
	ends := u.holding("ends")
	watch, since := w.watchSlices(t, survivor), time.Now()

	k := w.killPlugin(t)
	u.delete("ends")
	u.holder("new", 1)
	u.gone("ends")
	fresh := u.holding("new")
	w.back(t, k)

	u.undisturbed(one, two)
	watch.alwaysOffered(survivorGPUs, since)
	for uid, want := range map[string]bool{one.claimUID: true, two.claimUID: true, fresh.claimUID: true, ends.claimUID: false} {
		if got := w.hasRecord(t, survivor, uid); got != want {
			t.Errorf("claim %s has a record: %t, want %t", uid, got, want)
		}
	}
}

// testKilledWhileWaiting kills the plugin while a Prepare waits for a GPU's lock, which the test
// holds. Afterwards that Prepare must wait again.
func (w *world) testKilledWhileWaiting(t *testing.T, u tenant) {
	u.holder("held", 2)
	held := u.holding("held")
	unlock := w.lockGPUs(t)
	defer unlock()

	u.holder("waits", 1)
	eventually(t, 30*time.Second, "the Pod is scheduled", func() (bool, string) {
		return u.get("waits").Spec.NodeName != "", fmt.Sprint(u.events(t, u.namespace, "waits"))
	})
	uid := string(u.claimOf(t, u.namespace, "waits", "gpu").UID)
	eventually(t, 30*time.Second, "a Prepare waits for its GPU", func() (bool, string) {
		return w.isLocked(t, uid), fmt.Sprint(u.events(t, u.namespace, "waits"))
	})
	if w.hasRecord(t, survivor, uid) || !w.hasRecord(t, survivor, held.claimUID) {
		t.Error("want a record of the claim that is held, and none of the one that waits for its GPU")
	}
	k := w.killPlugin(t)
	w.back(t, k)
	u.undisturbed(held)
	if p := u.get("waits"); isReady(p) {
		t.Error("the Pod runs although its GPU is locked, so no Prepare waited")
	}
	unlock()
	u.holding("waits")
	u.undisturbed(held)
}

// locks returns the plugin's locks on the node, which the test takes as another plugin instance
// would.
func (w *world) locks(t *testing.T) *lock.Set {
	t.Helper()
	locks, err := lock.NewSet(filepath.Join(w.hostDir(t, survivor, pluginDir), "state", "claims.lock"))
	if err != nil {
		t.Fatal(err)
	}
	return locks
}

// isLocked reports whether a call has the claim's lock.
func (w *world) isLocked(t *testing.T, claim string) bool {
	t.Helper()
	ended, end := context.WithCancel(t.Context())
	end()
	guard, err := w.locks(t).Acquire(ended, claim)
	if err == nil {
		guard.Release()
		return false
	}
	if busy := new(lock.BusyError); !errors.As(err, &busy) {
		t.Fatal(err)
	}
	return true
}

// lockGPUs locks all GPUs. unlock may be called twice.
func (w *world) lockGPUs(t *testing.T) (unlock func()) {
	t.Helper()
	guard, err := w.locks(t).Acquire(t.Context(), slices.Collect(maps.Keys(w.gpus(t, survivor)))...)
	if err != nil {
		t.Fatal(err)
	}
	return guard.Release
}

// recordWatch watches the directory of the claims' checkpoint records on the node.
func (w *world) recordWatch(t *testing.T) *fsnotify.Watcher {
	t.Helper()
	return w.watchFiles(t, filepath.Join(w.hostDir(t, survivor, pluginDir), "state", "claims"))
}

func (w *world) watchFiles(t *testing.T, dir string) *fsnotify.Watcher {
	t.Helper()
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = watcher.Close() })
	if err := watcher.Add(dir); err != nil {
		t.Fatal(err)
	}
	return watcher
}

// next waits for the n-th file that appears (fsnotify.Create) or disappears (fsnotify.Remove) in
// the watched directory from now on, and returns its path. The directory has the claims' checkpoint
// records or the CDI specs.
func next(t *testing.T, watcher *fsnotify.Watcher, op fsnotify.Op, n int) string {
	t.Helper()
	deadline := time.After(enough)
	for {
		select {
		case event := <-watcher.Events:
			if name := filepath.Base(event.Name); !event.Has(op) || strings.HasPrefix(name, ".") || !strings.HasSuffix(name, ".json") {
				continue
			}
			if n--; n == 0 {
				return event.Name
			}
		case err := <-watcher.Errors:
			t.Fatal(err)
		case <-deadline:
			t.Fatalf("no file %s within %s", op, enough)
		}
	}
}

// testKilledBetween kills the plugin after it has written a claim's CDI spec and before it writes
// the claim's checkpoint record. The test repeats this up to eight times, because the kill may come
// too late.
func (w *world) testKilledBetween(t *testing.T, u tenant) {
	u.holder("held", 1)
	held := u.holding("held")
	const rounds = 8
	for round := range rounds {
		w.replacePlugin(t)
		name := fmt.Sprint("round-", round)
		process, before := w.pluginProcess(t)
		// Watch the directory through the plugin's process, because the test cannot use the node's path.
		specs := w.watchFiles(t, fmt.Sprintf("/proc/%d/root%s", process.Pid, cdiRoot))
		u.holder(name, 1)
		path := next(t, specs, fsnotify.Create, 1)
		kill(t, process)
		_ = specs.Close()
		_, uid, _ := strings.Cut(strings.TrimSuffix(filepath.Base(path), ".json"), "-claim_")
		records := slices.DeleteFunc(w.records(t, survivor), func(r string) bool { return !strings.HasPrefix(filepath.Base(r), uid) })
		w.back(t, killed{before})
		if now := u.holding(name); now.claimUID != uid {
			t.Fatalf("%s is the CDI spec of another claim than %s", path, now.claimUID)
		}
		u.undisturbed(held)
		u.remove(name)
		if len(records) == 0 {
			t.Logf("round %d: killed between spec and record", round)
			u.remove("held")
			return
		}
		t.Logf("round %d: the kill came too late, the records %v exist", round, records)
	}
	t.Errorf("in %d rounds the plugin was never caught between a claim's spec and its record", rounds)
}

// testKilledInBursts starts eight Pods at once and later deletes them at once. It kills the plugin
// at a random moment while the Pods start, and again while they end.
func (w *world) testKilledInBursts(t *testing.T, u tenant) {
	seed := fromEnvironment(t, "E2E_SEED", uint64(time.Now().UnixNano()))
	bursts := fromEnvironment(t, "E2E_BURSTS", 1)
	t.Logf("to repeat these kills: E2E_SEED=%d; for more bursts: E2E_BURSTS", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	// killAt kills the plugin shortly after it has created or removed the checkpoint record of a
	// random one of the claims.
	killAt := func(records *fsnotify.Watcher, process *os.Process, op fsnotify.Op) {
		t.Helper()
		n, after := 1+random.IntN(survivorGPUs), time.Duration(random.IntN(5000))*time.Microsecond
		next(t, records, op, n)
		<-time.After(after)
		kill(t, process)
		t.Logf("killed %s after record %d: %s", after, n, op)
	}
	for burst := range bursts {
		w.replacePlugin(t)
		var pods []string
		for i := range survivorGPUs {
			pods = append(pods, fmt.Sprintf("burst-%d-%d", burst, i))
		}
		records := w.recordWatch(t)
		process, before := w.pluginProcess(t)
		for _, name := range pods {
			u.holder(name, 1)
		}
		killAt(records, process, fsnotify.Create)
		w.back(t, killed{before})
		u.distinct(1, pods...)

		_ = records.Close()
		records = w.recordWatch(t)
		process, before = w.pluginProcess(t)
		for _, name := range pods {
			u.delete(name)
		}
		killAt(records, process, fsnotify.Remove)
		w.back(t, killed{before})
		for _, name := range pods {
			u.gone(name)
		}
		_ = records.Close()
		w.clean(t, survivor)
	}
}

func fromEnvironment(t *testing.T, name string, otherwise uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// testKilledWithoutAnswer restarts the plugin while NVML does not answer. The plugin must still
// unprepare claims, refuse new ones with the reason, and keep the slices. Killed again, it must
// leave no process that waits for NVML.
func (w *world) testKilledWithoutAnswer(t *testing.T, u tenant) {
	w.replacePlugin(t)
	u.holder("stays", 1)
	u.holder("ends", 1)
	stays := u.holding("stays")
	u.holding("ends")
	watch, since := w.watchSlices(t, survivor), time.Now()

	process, before := w.pluginProcess(t)
	defer w.nvmlsim(t, survivor, "clear")
	w.nvmlsim(t, survivor, "slow", "nvmlInit_v2", "1h")
	kill(t, process)
	first := w.waitsForNVML(t)
	process = mainProcess(t, "GPU_DRA_POD_UID", string(before.UID))
	u.remove("ends")
	u.holder("new", 1)
	eventually(t, 60*time.Second, "the new Pod waits", func() (bool, string) {
		events := u.events(t, u.namespace, "new")
		return strings.Contains(events, "FailedPrepareDynamicResources") && strings.Contains(events, "the node is not ready"), events
	})
	kill(t, process)
	eventually(t, 60*time.Second, "only a process of the newest plugin waits for NVML", func() (bool, string) {
		now := w.waitsForNVML(t)
		return len(now) == 1 && now[0] != first[0], fmt.Sprintf("%v, before %v", now, first)
	})
	w.nvmlsim(t, survivor, "clear")

	u.holding("new")
	w.back(t, killed{before})
	u.undisturbed(stays)
	watch.alwaysOffered(survivorGPUs, since)
}

// waitsForNVML waits until the plugin has child processes that scan the hardware, and returns their
// IDs. They block while NVML does not answer.
func (w *world) waitsForNVML(t *testing.T) (pids []string) {
	t.Helper()
	eventually(t, 60*time.Second, "the plugin waits for NVML", func() (bool, string) {
		out, err := w.node(t, survivor).Exec(t.Context(), "pgrep", "--full", "gpu-kubelet-plugin scan$")
		pids = strings.Fields(out)
		return len(pids) > 0, fmt.Sprint(err)
	})
	return pids
}

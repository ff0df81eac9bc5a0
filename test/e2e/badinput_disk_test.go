package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// testBrokenRecords corrupts the checkpoint records of the claims of running Pods, and then
// restarts the plugin.
func (w *world) testBrokenRecords(t *testing.T) {
	ns := w.namespace(t)
	kinds := map[string]struct {
		damage func(record string) string
		says   string
	}{
		"truncated": {func(r string) string { return r[:len(r)/2] }, "is unreadable"},
		"empty":     {func(string) string { return "" }, "it is empty"},
		"flipped":   {func(r string) string { return strings.Replace(r, "Prepared", "Preparee", 1) }, "checksum"},
		"planted":   {func(r string) string { return r + "\n" }, "it belongs to user 65534"}, // valid, but not owned by the driver's user
		"future":    {func(r string) string { return strings.Replace(r, `"minReader":1`, `"minReader":99`, 1) }, "format version 99"},
	}
	for kind := range kinds {
		w.apply(t, ns, claimYAML(kind, "")+podOnClaim(kind, badNode, kind))
	}
	intact := map[string]string{}
	for kind, k := range kinds {
		w.running(t, ns, kind)
		file := w.recordOf(t, ns, kind)
		intact[kind] = w.on(t, badNode, "cat", file)
		broken := k.damage(intact[kind])
		if broken == intact[kind] {
			t.Fatalf("the record was not damaged: %s", broken)
		}
		w.write(t, badNode, file, broken)
		if kind == "planted" {
			w.on(t, badNode, "chown", "65534", file)
		}
	}

	// A GPU whose claim has a damaged checkpoint record must stay in use. The driver must refuse
	// another claim for this GPU with an error that names the claim of the damaged record.
	for kind, k := range kinds {
		w.handAllocate(t, ns, "wants-"+kind, badNode, w.allocated(t, ns, kind))
		w.apply(t, ns, podOnClaim("wants-"+kind, badNode, "wants-"+kind))
		w.refused(t, ns, "wants-"+kind, "is in use by", w.uidOf(t, ns, kind), "cannot be read", k.says)
	}
	w.counts(t, badNode, "prepare", "held")
	w.apply(t, ns, podOn("good", badNode))
	w.running(t, ns, "good")

	// The restarted plugin must report each damaged checkpoint record and prepare other claims. The
	// test restarts the kubelet too, because it caches prepared claims and would not call Prepare for
	// their next Pods.
	old := w.livePlugin(t, badNode)
	w.deletePlugin(t, old)
	if err := w.node(t, badNode).RestartKubelet(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, 60*time.Second, "another plugin is ready", func() (bool, string) {
		return w.livePlugin(t, badNode).UID != old.UID && w.readiness(t, badNode) == "ok", w.readiness(t, badNode)
	})
	for kind, k := range kinds {
		uid := w.uidOf(t, ns, kind)
		eventually(t, 60*time.Second, fmt.Sprintf("the log says %q of the %s record", k.says, kind), func() (bool, string) {
			log := w.logOf(t, badNode)
			return slices.ContainsFunc(strings.Split(log, "\n"), func(line string) bool {
				return strings.Contains(line, "its devices stay in use") && strings.Contains(line, uid) && strings.Contains(line, k.says) &&
					strings.Contains(line, "until it is unprepared") == (kind != "future") // Unprepare leaves a newer record alone
			}), log
		})
	}
	w.apply(t, ns, podOn("good-2", badNode))
	w.running(t, ns, "good-2")
	for kind := range kinds {
		w.running(t, ns, kind)
	}

	// When another Pod uses a claim whose checkpoint record is unreadable, the plugin must move that
	// file to quarantine and write a new record. It must not change a record with the format version
	// of a later release.
	w.apply(t, ns, podOnClaim("joins-empty", badNode, "empty")+podOnClaim("joins-future", badNode, "future"))
	w.running(t, ns, "joins-empty")
	w.refused(t, ns, "joins-future", "format version 99", "this version of the driver reads up to", "install the later driver again")

	// When the last Pods of the damaged claims end, the plugin must move the unreadable checkpoint
	// records to quarantine and free their GPUs. It must keep the record with the format version of a
	// later release.
	claim := w.uidOf(t, ns, "future")
	if _, err := w.Kubectl(t.Context(), "-n", ns, "delete", "--wait=false", "pod", "truncated", "empty", "joins-empty", "flipped", "planted",
		"future", "joins-future"); err != nil {
		t.Fatal(err)
	}
	eventually(t, 60*time.Second, "the claim's Events say why it is not unprepared", func() (bool, string) {
		events := w.events(t, ns, "future")
		return strings.Contains(events, "UnprepareFailed") && strings.Contains(events, "format version 99"), events
	})
	w.running(t, ns, "wants-truncated", "wants-empty", "wants-flipped", "wants-planted")
	if aside := strings.Fields(w.on(t, badNode, "ls", stateDir+"/quarantine")); len(aside) != 4 {
		t.Errorf("the quarantine has %q, want four records", aside)
	}
	w.refused(t, ns, "wants-future", "is in use by")
	w.write(
		t,
		badNode,
		fmt.Sprintf("%s/claims/%s_%s.json", stateDir, claim, w.allocated(t, ns, "wants-future")),
		intact["future"],
	) // fakes that the later driver could read its record
	w.running(t, ns, "wants-future")
	w.on(t, badNode, "sh", "-c", "rm "+stateDir+"/quarantine/*")
	w.givenBack(t, ns)
}

func (w *world) testFullDisk(t *testing.T) {
	ns := w.namespace(t)
	w.apply(t, ns, claimYAML("held", "")+podOnClaim("before", badNode, "held"))
	w.running(t, ns, "before")
	w.on(
		t,
		badNode,
		"sh",
		"-c",
		fmt.Sprintf("dd if=/dev/zero of=%[1]s/filler bs=4096 2>/dev/null; dd if=/dev/zero of=%[1]s/filler2 bs=1 2>/dev/null; df %[1]s", stateDir),
	)

	w.apply(t, ns, claimYAML("new", "")+podOnClaim("refused", badNode, "new"))
	w.refused(t, ns, "refused", "no space left on device", stateDir+"/claims", "claim "+ns+"/new")
	w.counts(t, badNode, "prepare", "record")
	w.leftNothing(t, w.uidOf(t, ns, "new"))
	// On a full disk, work that needs no disk space must continue: running Pods, another Pod of a
	// prepared claim, Unprepare.
	w.apply(t, ns, podOnClaim("joins", badNode, "held")+podOnNothing("no-gpu", badNode))
	w.running(t, ns, "before", "joins", "no-gpu")
	if got := len(w.gpus(t, badNode)); got != badGPUs {
		t.Errorf("the node offers %d devices, want %d", got, badGPUs)
	}
	uid := w.uidOf(t, ns, "held")
	w.deletePods(t, ns, "before", "joins")
	w.leftNothing(t, uid)

	w.on(t, badNode, "sh", "-c", "rm "+stateDir+"/filler*")
	w.running(t, ns, "refused")
	w.givenBack(t, ns)
}

func (w *world) testReadOnlyDisk(t *testing.T) {
	ns := w.namespace(t)
	w.apply(t, ns, claimYAML("held", "")+podOnClaim("before", badNode, "held"))
	w.running(t, ns, "before")
	// Mount a read-only view over the state directory. The plugin's container sees such a new mount,
	// but would not see new flags of an existing mount.
	w.on(
		t,
		badNode,
		"sh",
		"-ec",
		fmt.Sprintf(
			"mkdir -p /run/read-only; mount --bind %[1]s /run/read-only; mount -o remount,bind,ro /run/read-only; mount --bind /run/read-only %[1]s",
			stateDir,
		),
	)
	writable := false
	defer func() {
		if !writable {
			w.on(t, badNode, "umount", "-l", stateDir)
		}
	}()

	w.apply(t, ns, claimYAML("new", "")+podOnClaim("refused", badNode, "new")+podOnNothing("no-gpu", badNode))
	w.refused(t, ns, "refused", "read-only file system", stateDir, "claim "+ns+"/new")
	w.running(t, ns, "before", "no-gpu")
	if _, err := w.Kubectl(t.Context(), "-n", ns, "delete", "pod", "before", "--wait=false"); err != nil {
		t.Fatal(err)
	}
	eventually(t, 60*time.Second, "the claim's Events say why it is not unprepared", func() (bool, string) {
		events := w.events(t, ns, "held")
		return strings.Contains(events, "UnprepareFailed") && strings.Contains(events, "read-only file system"), events
	})

	// A plugin that starts on a read-only disk must end with one clear error. The published slices
	// must stay.
	old := w.livePlugin(t, badNode)
	w.deletePlugin(t, old)
	eventually(t, 60*time.Second, "the next plugin ends with one clear error", func() (bool, string) {
		return w.lastWords(t, old.UID, "state is not writable", "read-only file system")
	})
	if got := len(w.gpus(t, badNode)); got != badGPUs {
		t.Errorf("the node offers %d devices, want %d", got, badGPUs)
	}

	w.on(t, badNode, "umount", "-l", stateDir)
	writable = true
	w.running(t, ns, "refused")
	w.givenBack(t, ns)
}

// lastWords reports whether a plugin Pod other than the one with the UID old has ended with an
// error that contains all texts. Otherwise the returned string says how the last one ended.
func (w *world) lastWords(t *testing.T, old types.UID, texts ...string) (bool, string) {
	t.Helper()
	state := "no plugin"
	for _, p := range w.instances(t, badNode) {
		if p.UID == old || len(p.Status.ContainerStatuses) == 0 {
			continue
		}
		s := p.Status.ContainerStatuses[0]
		for _, ended := range []*corev1.ContainerStateTerminated{s.State.Terminated, s.LastTerminationState.Terminated} {
			if ended == nil {
				continue
			}
			state = fmt.Sprintf("exit code %d: %s", ended.ExitCode, ended.Message)
			if ended.ExitCode != 0 && containsAll(ended.Message, texts...) {
				return true, ""
			}
		}
	}
	return false, state
}

// leftNothing checks that the claim with this UID has no checkpoint record and no CDI spec left,
// not even an unfinished file.
func (w *world) leftNothing(t *testing.T, uid string) {
	t.Helper()
	for _, file := range w.claimFiles(t) {
		if strings.Contains(file, uid) {
			t.Errorf("%s is left", file)
		}
	}
}

func (w *world) claimFiles(t *testing.T) []string {
	t.Helper()
	return strings.Fields(
		w.on(t, badNode, "sh", "-c", fmt.Sprintf("ls -A -d %[1]s/claims/* %[1]s/claims/.[!.]* /var/run/cdi/*claim* 2>/dev/null; true", stateDir)),
	)
}

func (w *world) recordOf(t *testing.T, namespace, claim string) string {
	t.Helper()
	return fmt.Sprintf("%s/claims/%s_%s.json", stateDir, w.uidOf(t, namespace, claim), w.allocated(t, namespace, claim))
}

// write replaces a file's content on a node.
func (w *world) write(t *testing.T, node, file, content string) {
	t.Helper()
	if err := w.node(t, node).ExecStreams(t.Context(), strings.NewReader(content), nil, nil, "sh", "-c", `cat > "$0"`, file); err != nil {
		t.Fatalf("write %s on %s: %v", file, node, err)
	}
}

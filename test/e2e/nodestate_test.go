package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/stand"
)

// Where the driver keeps things on a node.
const (
	pluginDir    = "/var/lib/kubelet/plugins/gpu.nvidia.com"
	registrarDir = "/var/lib/kubelet/plugins_registry"
	cdiRoot      = "/var/run/cdi"
	baseSpec     = cdiRoot + "/k8s.gpu.nvidia.com-base.json"
)

func claimSpecPath(claimUID string) string {
	return cdiRoot + "/k8s.gpu.nvidia.com-claim_" + claimUID + ".json"
}

// hostDir is a folder of the node's /var, as the host sees it.
func (w *world) hostDir(t *testing.T, node, path string) string {
	t.Helper()
	below, ok := strings.CutPrefix(path, "/var/")
	if !ok {
		t.Fatalf("%s is not below /var", path)
	}
	return filepath.Join(w.node(t, node).VarDir(), below)
}

// leftovers lists what claims have left on a node: records, specs, locks that are held, temporary files, sockets of instances that are
// gone. GPUs' lock files, the marks of those whose MIG mode was turned on and what is known of their health are no leftovers: there are as many as GPUs. Nor is
// the one file of all claims' locks.
const leftovers = `
find "$1/state" "$2" -type f ! -path "$1/state/locks/gpu-*" ! -path "$1/state/locks/claims" ! -path "$1/state/mig/gpu-*" ! -path "$1/state/health.json" ! -path "$2/k8s.gpu.nvidia.com-base.json"
for lock in "$1"/state/locks/*; do
	[ ! -e "$lock" ] || flock --nonblock "$lock" true || echo "$lock is held"
	[ ! -e "$lock" ] || ! grep "OFDLCK.*:$(stat -c %i "$lock") " /proc/locks || echo "a part of $lock is held"
done
find "$1" "$3" \( -name "dra*.sock" -o -name "gpu.nvidia.com-*reg.sock" \) ! -name "*$4*"
ls "$1"/publisher.request* 2>/dev/null
[ -e "$2/k8s.gpu.nvidia.com-base.json" ] || echo "the base spec is missing"
true`

// clean waits until nothing of any claim is left on a node, except of the claims with these UIDs.
func (w *world) clean(t *testing.T, node string, except ...string) {
	t.Helper()
	eventually(t, 30*time.Second, "nothing of any claim is left on node "+node, func() (bool, string) {
		lines := strings.Split(w.on(t, node, "sh", "-c", leftovers, "sh", pluginDir, cdiRoot, registrarDir, string(w.instance(t, node).UID)), "\n")
		left := slices.DeleteFunc(lines, func(line string) bool {
			return line == "" || slices.ContainsFunc(except, func(uid string) bool { return uid != "" && strings.Contains(line, uid) })
		})
		return len(left) == 0, strings.Join(left, "\n")
	})
}

// instance is the plugin's Pod on a node, once there is exactly one and it is ready.
func (w *world) instance(t *testing.T, node string) corev1.Pod {
	t.Helper()
	var found corev1.Pod
	eventually(t, 90*time.Second, "one plugin is ready on node "+node, func() (bool, string) {
		pods := w.instances(t, node)
		if len(pods) != 1 {
			return false, fmt.Sprint(len(pods), " Pods")
		}
		found = pods[0]
		return isReady(&found) && found.DeletionTimestamp == nil, fmt.Sprint(found.Status.Conditions)
	})
	return found
}

func (w *world) instances(t *testing.T, node string) []corev1.Pod {
	t.Helper()
	list, err := w.Client.CoreV1().Pods(stand.Namespace).List(t.Context(), metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/component=kubelet-plugin", FieldSelector: "spec.nodeName=" + node,
	})
	if err != nil {
		t.Fatal(err)
	}
	return list.Items
}

func isReady(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// kubeletLog returns a function that returns the lines that a node's kubelet has logged since the call of kubeletLog.
func (w *world) kubeletLog(t *testing.T, node string) func() []string {
	t.Helper()
	path := w.node(t, node).Log("kubelet")
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return func() []string {
		t.Helper()
		now, err := os.ReadFile(path)
		if err != nil || len(now) < len(before) {
			t.Fatalf("%s: %d bytes after %d: %v", path, len(now), len(before), err)
		}
		return strings.Split(string(now[len(before):]), "\n")
	}
}

// record is the part of a claim's record that tests look at.
type record struct {
	State  string `json:"state"`
	BootID string `json:"bootID"`
}

func readRecord(path string) (record, error) {
	var envelope struct {
		Payload record `json:"payload"`
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return record{}, err
	}
	return envelope.Payload, json.Unmarshal(raw, &envelope)
}

// records are the paths of the node's records, on the host.
func (w *world) records(t *testing.T, node string) []string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(w.hostDir(t, node, pluginDir), "state", "claims", "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

func (w *world) hasRecord(t *testing.T, node, claimUID string) bool {
	t.Helper()
	return slices.ContainsFunc(w.records(t, node), func(path string) bool { return strings.HasPrefix(filepath.Base(path), claimUID) })
}

// mainProcess is the first process of the container that has a variable with this value in its environment. Values that are unique, such as a Pod's UID,
// tell containers of different clusters apart.
func mainProcess(t *testing.T, variable, value string) *os.Process {
	t.Helper()
	var found *os.Process
	eventually(t, 90*time.Second, fmt.Sprintf("a container with %s=%s has a process", variable, value), func() (bool, string) {
		folders, err := filepath.Glob("/proc/[0-9]*")
		if err != nil {
			t.Fatal(err)
		}
		for _, folder := range folders {
			if !isMain(folder, variable+"="+value) {
				continue
			}
			pid, err := strconv.Atoi(filepath.Base(folder))
			if err != nil {
				t.Fatal(err)
			}
			// Looked at again once it is held: a number may have passed on to another process.
			if found, err = os.FindProcess(pid); err == nil && isMain(folder, variable+"="+value) {
				return true, ""
			}
		}
		return false, fmt.Sprint(len(folders), " processes")
	})
	return found
}

// kill ends a process as kill -9 does, and waits until it is gone.
func kill(t *testing.T, process *os.Process) {
	t.Helper()
	if err := process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, 30*time.Second, "a killed process is gone", func() (bool, string) {
		err := process.Signal(syscall.Signal(0))
		return errors.Is(err, os.ErrProcessDone) || errors.Is(err, syscall.ESRCH), fmt.Sprint(err)
	})
}

func isMain(folder, entry string) bool {
	environment, err := os.ReadFile(filepath.Join(folder, "environ"))
	if err != nil || !slices.ContainsFunc(bytes.Split(environment, []byte{0}), func(have []byte) bool { return string(have) == entry }) {
		return false
	}
	pids := namespacedPIDs(folder)
	return len(pids) > 0 && pids[len(pids)-1] == "1"
}

// namespacedPIDs are a process's numbers, in the host's namespace first and in its own last.
func namespacedPIDs(folder string) []string {
	status, err := os.ReadFile(filepath.Join(folder, "status"))
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(status)) {
		if pids, ok := strings.CutPrefix(line, "NSpid:"); ok {
			return strings.Fields(pids)
		}
	}
	return nil
}

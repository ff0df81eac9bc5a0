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

	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// The driver's directories and its base CDI spec on a node.
const (
	pluginDir    = "/var/lib/kubelet/plugins/gpu.nvidia.com"
	registrarDir = "/var/lib/kubelet/plugins_registry"
	cdiRoot      = "/var/run/cdi"
	baseSpec     = cdiRoot + "/k8s.gpu.nvidia.com-base.json"
	// cdiHook is the pattern of the path of nvidia-cdi-hook.
	cdiHook = "/var/lib/gpu-dra-driver/hooks-*/nvidia-cdi-hook"
)

func claimSpecPath(claimUID string) string {
	return cdiRoot + "/k8s.gpu.nvidia.com-claim_" + claimUID + ".json"
}

// hostDir returns the directory of the host that a node sees as path, which must be below /var.
func (w *world) hostDir(t *testing.T, node, path string) string {
	t.Helper()
	below, ok := strings.CutPrefix(path, "/var/")
	if !ok {
		t.Fatalf("%s is not below /var", path)
	}
	return filepath.Join(w.node(t, node).VarDir(), below)
}

// leftovers is a script that lists what claims have left on a node: checkpoint records, CDI specs,
// metadata, locks that are held, temporary files, sockets of ended plugins. It ignores files that
// exist once per GPU, and the file of all claims' locks.
const leftovers = `
find "$1/state" "$2" -type f ! -path "$1/state/claims.lock" \
    ! -path "$1/state/mig/gpu-*" ! -path "$1/state/gpu-*.lock" ! -path "$1/state/health.json" ! -path "$2/k8s.gpu.nvidia.com-base.json"
lock=$1/state/claims.lock
[ ! -e "$lock" ] || ! grep "OFDLCK.*:$(stat -c %i "$lock") " /proc/locks || echo "a lock in $lock is held"
ls -d "$1"/metadata/* 2>/dev/null
find "$1" "$3" \( -name "dra*.sock" -o -name "gpu.nvidia.com-*reg.sock" \) ! -name "*$4*"
[ -e "$2/k8s.gpu.nvidia.com-base.json" ] || echo "the base spec is missing"
true`

// clean waits until the script leftovers prints nothing on a node. It ignores lines about the
// claims whose UIDs are in except.
func (w *world) clean(t *testing.T, node string, except ...string) {
	t.Helper()
	eventually(t, 30*time.Second, "nothing of any claim is left on node "+node, func() (bool, string) {
		lines := strings.Split(
			w.on(t, node, "sh", "-c", leftovers, "sh", pluginDir, cdiRoot, registrarDir, string(w.instance(t, node).UID)),
			"\n",
		)
		left := slices.DeleteFunc(lines, func(line string) bool {
			return line == "" || slices.ContainsFunc(except, func(uid string) bool { return uid != "" && strings.Contains(line, uid) })
		})
		return len(left) == 0, strings.Join(left, "\n")
	})
}

// instance returns the plugin's Pod on a node, once it is the only one and is ready.
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
	list, err := w.Client.CoreV1().Pods(clusterharness.Namespace).List(t.Context(), metav1.ListOptions{
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

// kubeletLog returns a function for later, which returns the lines that the node's kubelet has
// logged since the call of kubeletLog.
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

// record is the part of a claim's checkpoint record, a file on the node, that tests read.
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

// records returns the paths, on the host, of the files with the checkpoint records of a node's
// claims.
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

// mainProcess returns the first process of the container whose environment has this variable with
// this value. The value must be unique, such as a Pod's UID, because containers of other clusters
// run on this machine too.
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
			// Check the environment again after opening the process: its number may have passed to another
			// process meanwhile.
			if found, err = os.FindProcess(pid); err == nil && isMain(folder, variable+"="+value) {
				return true, ""
			}
		}
		return false, fmt.Sprint(len(folders), " processes")
	})
	return found
}

// kill ends a process by SIGKILL and waits until it is gone.
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

// namespacedPIDs returns a process's numbers, first in the host's PID namespace and last in its
// own. folder is the process's folder in /proc.
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

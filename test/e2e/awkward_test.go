package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// attachCost is the time that the simulated driver needs to open a GPU that no process has open,
// one GPU after another. It must equal the value in nodes/awkward.yaml.
const attachCost = 3 * time.Second

// procView is a directory of the node that shows the node's /proc, with the simulated driver's
// files mounted over it. The plugin looks there for processes that have a GPU open.
const procView = "/run/proc-view"

const mountProcesses = `
mkdir ` + procView + `
mount -t proc proc ` + procView + `
for file in driver devices sys/kernel/random/boot_id; do
	mount --bind ` + clusterharness.NodeRoot + `/proc/$file ` + procView + `/$file
done`

// TestAwkwardNode uses a simulated NVIDIA driver that opens GPUs slowly. That driver also refuses
// to change the MIG mode of a GPU, or to destroy a MIG instance, while another process has it open.
func TestAwkwardNode(t *testing.T) {
	t.Parallel()
	node := simulator(t).Node(h100, awkward)
	node.BootHook = append([]string{"/bin/sh", "-ec", `"$@"; ` + mountProcesses, "boot"}, node.BootHook...)
	node.Mounts = []cluster.Mount{{Source: buildProgram(t, "nvml-client"), Target: probeDir}}
	node.Labels = map[string]string{nodesLabel: awkward}
	w := bringUp(t, "e2e-awkward", node)
	w.releaseOn(t, clusterharness.Release, awkward, "--set", "hostPaths.proc="+procView, "--set", awkwardValue)

	t.Run("the first watcher lives until it has opened every GPU", w.testFirstWatcher)
	bare := w.simulated(t)
	t.Run("56 partitions, with XIDs while they are created", w.testEveryPartitionWithXIDs)
	t.Run("a client of a GPU delays only that GPU's first partition", w.testClientHoldsGPU)
	t.Run("a client of an instance delays only that instance's removal", w.testClientHoldsInstance)
	t.Run("the GPUs serve whole again and are as they were", func(t *testing.T) { w.isBare(t, bare) })
}

// simulatedGPU is the state of a GPU as the simulator's tool prints it. Reading it does not open
// the GPU.
type simulatedGPU struct {
	PCI         string `json:"pci"`
	Condition   string `json:"condition"`
	Fabric      string `json:"fabric"`
	ComputeMode uint32 `json:"computeMode"`
	MIG         struct {
		Enabled   bool                `json:"enabled"`
		Pending   bool                `json:"pending"`
		Instances []simulatedInstance `json:"instances"`
	} `json:"mig"`
}

type simulatedInstance struct {
	ID        uint32 `json:"id"`
	ProfileID uint32 `json:"profileID"`
	Placement string `json:"placement"`
	Compute   []struct {
		ID uint32 `json:"id"`
	} `json:"compute"`
}

// simulated returns the state of all GPUs of the node h100, in the order in which the simulator's
// tool prints them.
func (w *world) simulated(t *testing.T) []simulatedGPU {
	t.Helper()
	var shown struct {
		GPUs []simulatedGPU `json:"gpus"`
	}
	out := w.nvmlsim(t, h100, "show", "-o", "yaml")
	if err := yaml.Unmarshal([]byte(out), &shown); err != nil || len(shown.GPUs) == 0 {
		t.Fatalf("%v\n%s", err, out)
	}
	return shown.GPUs
}

// simulatedInstanceOf returns the GPU instance that the simulator has for the partition with this
// device name. made is false as long as the partition has no compute instance.
func (w *world) simulatedInstanceOf(t *testing.T, partition string) (_ simulatedInstance, made bool) {
	t.Helper()
	p := strings.Split(partition, "-") // gpu-0000-1b-00-0-mig-19-6
	for _, gpu := range w.simulated(t) {
		if gpu.PCI != busOf(partition) {
			continue
		}
		for _, i := range gpu.MIG.Instances {
			if fmt.Sprint(i.ProfileID) == p[6] && strings.HasPrefix(i.Placement, p[7]+":") && len(i.Compute) == 1 {
				return i, true
			}
		}
	}
	return simulatedInstance{}, false
}

// uncutNow waits until no GPU has a MIG instance. It reads the state by the simulator's tool,
// because nvidia-smi would open the GPUs.
func (w *world) uncutNow(t *testing.T) {
	t.Helper()
	eventually(t, 2*time.Minute, "no GPU has an instance", func() (bool, string) {
		gpus := w.simulated(t)
		return !slices.ContainsFunc(gpus, func(g simulatedGPU) bool { return len(g.MIG.Instances) > 0 }), fmt.Sprintf("%+v", gpus)
	})
}

// isBare runs a Pod with all GPUs, because the driver then switches MIG mode off on each of them.
// Then it waits until the simulated GPUs have the state in the parameter bare again and no file of
// any claim is left.
func (w *world) isBare(t *testing.T, bare []simulatedGPU) {
	t.Helper()
	u := w.tenant(t)
	u.gpus(8)
	u.holder("all", 8, onNode(h100))
	u.runningWithin(2*time.Minute, "all")
	w.endPods(t, u.namespace)
	want := fmt.Sprintf("%+v", bare)
	eventually(t, 30*time.Second, "the hardware is as before the claims", func() (bool, string) {
		now := fmt.Sprintf("%+v", w.simulated(t))
		return now == want, "was " + want + "\nis  " + now
	})
	w.clean(t, h100)
}

// watchers returns the IDs of the plugin's child processes that listen for NVML events.
func (w *world) watchers(t *testing.T) []string {
	t.Helper()
	out, _ := w.node(t, h100).Exec(t.Context(), "pgrep", "-f", "gpu-kubelet-plugin watch$") // pgrep fails if there is none
	return strings.Fields(out)
}

// opened returns how many GPUs the process with this pid has open, or 0 if there is no such
// process.
func (w *world) opened(t *testing.T, pid string) int {
	t.Helper()
	const count = `for fd in /proc/$1/fd/*; do readlink $fd; done 2>/dev/null | grep '/nvidia[0-9]*$' | sort -u | wc -l`
	out := w.on(t, h100, "sh", "-c", count, "sh", pid)
	return number(t, strings.TrimSpace(out))
}

// testFirstWatcher waits until the plugin's watcher process, which listens for NVML events, has all
// eight GPUs open. Opening them takes long because no other process has a GPU open. The plugin must
// not replace the watcher process meanwhile.
func (w *world) testFirstWatcher(t *testing.T) {
	var first []string
	eventually(t, time.Minute, "the plugin has a watcher process", func() (bool, string) {
		first = w.watchers(t)
		return len(first) > 0, "no process"
	})
	took := eventually(t, 16*attachCost, "the watcher has opened every GPU", func() (bool, string) {
		now := w.watchers(t)
		if !slices.Equal(now, first) {
			t.Fatalf("the watcher processes were %v and are %v before every GPU is open", first, now)
		}
		n := w.opened(t, first[0])
		return n == 8, fmt.Sprintf("%d GPUs are open", n)
	})
	t.Logf("all GPUs were open after %s", took.Round(time.Second))
	w.offersShapes(t, h100, 8, 200)
	eventually(t, 30*time.Second, "the watcher receives events, and every GPU is healthy", func() (bool, string) {
		metrics := w.get(t, h100, "metrics")
		healthy := strings.Count(metrics, `state="Healthy"} 1`)
		return healthy == 8 && strings.Contains(metrics, "\ngpu_dra_health_events_heard 1\n"), fmt.Sprint(healthy, " GPUs are healthy")
	})
	if now := w.watchers(t); !slices.Equal(now, first) {
		t.Errorf("the watcher processes were %v and are %v", first, now)
	}
}

func (w *world) testEveryPartitionWithXIDs(t *testing.T) {
	u := w.tenant(t)
	u.template("smallest", partitions(1, "1g.10gb"))
	var pods []string
	for i := range 56 {
		pods = append(pods, fmt.Sprintf("user-%d", i))
		u.pod(pods[i], onNode(h100), fromTemplate("gpu", "smallest"))
	}
	// These XIDs are application errors. The plugin must report each in an Event, and no device
	// becomes unhealthy.
	for i, pod := range u.anyRunning(4) {
		w.reportsXID(t, u.device(pod), []string{"31", "43", "45", "94"}[i])
		eventually(t, 30*time.Second, "an Event tells Pod "+pod, func() (bool, string) {
			events := u.events(t, u.namespace, pod)
			return strings.Contains(events, "GPUReport"), events
		})
	}
	u.runningWithin(5*time.Minute, pods...)
	seen := map[string]string{}
	for _, pod := range pods {
		for _, uuid := range u.migAllocated(pod, "gpu") {
			if other, twice := seen[uuid]; twice {
				t.Errorf("Pods %s and %s both have %s", other, pod, uuid)
			}
			seen[uuid] = pod
		}
	}
	if len(seen) != 56 {
		t.Errorf("the Pods have %d MIG devices, want 56", len(seen))
	}
	w.endPods(t, u.namespace)
	w.uncutNow(t)
	w.clean(t, h100)
}

// anyRunning waits until at least n of the tenant's Pods are ready, and returns the names of n
// ready Pods.
func (u tenant) anyRunning(n int) (pods []string) {
	u.t.Helper()
	eventually(u.t, 2*time.Minute, fmt.Sprintf("%d Pods run", n), func() (bool, string) {
		list, err := u.Client.CoreV1().Pods(u.namespace).List(u.t.Context(), metav1.ListOptions{})
		if err != nil {
			return false, err.Error()
		}
		pods = nil
		for i := range list.Items {
			if isReady(&list.Items[i]) {
				pods = append(pods, list.Items[i].Name)
			}
		}
		return len(pods) >= n, fmt.Sprint(pods)
	})
	return pods[:n]
}

// reportsXID repeats an XID of a partition's MIG instance until the plugin's metrics count it. The
// plugin misses XIDs while it creates the first partition of a GPU.
func (w *world) reportsXID(t *testing.T, partition, code string) {
	t.Helper()
	instance, made := w.simulatedInstanceOf(t, partition)
	if !made {
		t.Fatalf("%s does not exist", partition)
	}
	place := fmt.Sprintf("%s/%d/%d", busOf(partition), instance.ID, instance.Compute[0].ID)
	gpu, _, _ := strings.Cut(partition, "-mig-")
	counted := fmt.Sprintf(`gpu_dra_health_events_total{code="xid-%s",gpu=%q} `, code, gpu)
	eventually(t, time.Minute, "XID "+code+" of "+partition+" is counted", func() (bool, string) {
		w.nvmlsim(t, h100, "xid", place, code)
		<-time.After(time.Second)
		return strings.Contains(w.get(t, h100, "metrics"), counted), counted
	})
}

// The tests of client processes start a process that opens the GPU clientGPU. They expect that the
// GPU freeGPU works as if that process did not exist.
const (
	clientGPU = "0000:1b:00.0"
	freeGPU   = "0000:43:00.0"
)

// client starts a process on the node that opens a GPU until stop kills the process. The arguments
// in open are the GPU's PCI address and, optionally, the IDs of a GPU instance and a compute
// instance.
func (w *world) client(t *testing.T, open ...string) (pid string, stop func()) {
	t.Helper()
	const script = `export LD_LIBRARY_PATH=` + clusterharness.NodeRoot + `/driver/usr/lib/x86_64-linux-gnu
setsid ` + probeDir + `/nvml-client "$@" </dev/null >/run/nvml-client 2>&1 &
echo $!`
	pid = strings.TrimSpace(w.on(t, h100, append([]string{"sh", "-c", script, "sh"}, open...)...))
	stop = func() {
		_, _ = w.node(t, h100).Exec(context.WithoutCancel(t.Context()), "kill", "-9", pid) // the process may have ended
	}
	t.Cleanup(stop)
	eventually(t, 30*time.Second, "the client is ready", func() (bool, string) {
		out := w.on(t, h100, "cat", "/run/nvml-client")
		return strings.Contains(out, "ready"), out
	})
	return pid, stop
}

// saysClient waits for an Event about the object that has this reason and names the client process
// and its pid.
func (u tenant) saysClient(object, reason, pid string) {
	u.t.Helper()
	eventually(u.t, 2*time.Minute, fmt.Sprintf("an Event %s of %s names the client", reason, object), func() (bool, string) {
		events := u.events(u.t, u.namespace, object)
		return slices.ContainsFunc(strings.Split(events, "\n"), func(e string) bool {
			return strings.HasPrefix(e, reason+": ") && containsAll(e, "nvml-client", pid)
		}), events
	})
}

func (w *world) testClientHoldsGPU(t *testing.T) {
	u := w.tenant(t)
	u.gpus(8)
	u.holder("all", 8, onNode(h100)) // switches MIG mode off, so that each GPU's next partition is its first
	u.runningWithin(2*time.Minute, "all")
	if out := u.sh("all", "", "ls /dev/dri /dev/dri/by-path"); strings.Count(out, "\ncard") != 8 || strings.Count(out, "-render\n") != 8 {
		t.Errorf("the Pod with eight GPUs has these DRM device nodes and links:\n%s", out)
	}
	u.remove("all")
	u.template("open", device("mig.nvidia.com", clientGPU, "1g.10gb"))
	u.template("free", device("mig.nvidia.com", freeGPU, "1g.10gb"))

	pid, stop := w.client(t, clientGPU)
	u.pod("open", onNode(h100), fromTemplate("gpu", "open"))
	u.pod("free", onNode(h100), fromTemplate("gpu", "free"))
	u.running("free")
	if out := u.sh("free", "", "ls /dev/dri 2>&1 || true"); strings.Contains(out, "card") {
		t.Errorf("the Pod with a partition has DRM device nodes, which reach the whole GPU:\n%s", out)
	}
	u.saysClient("open", "FailedPrepareDynamicResources", pid)
	if u.get("open").Status.Phase != "Pending" {
		t.Errorf("Pod open runs although a client has its GPU open")
	}
	stop()
	u.runningWithin(2*time.Minute, "open", "free")
	w.endPods(t, u.namespace)
	w.uncutNow(t)
}

func (w *world) testClientHoldsInstance(t *testing.T) {
	u := w.tenant(t)
	u.claim("held", device("mig.nvidia.com", clientGPU, "1g.10gb"))
	u.template("free", device("mig.nvidia.com", freeGPU, "1g.10gb"))
	u.pod("open", onNode(h100), fromClaim("gpu", "held"))
	u.pod("free", onNode(h100), fromTemplate("gpu", "free"))
	u.runningWithin(2*time.Minute, "open", "free")
	partition := u.device("open")
	instance, made := w.simulatedInstanceOf(t, partition)
	if !made {
		t.Fatalf("%s does not exist", partition)
	}

	pid, stop := w.client(t, clientGPU, fmt.Sprint(instance.ID), fmt.Sprint(instance.Compute[0].ID))
	u.delete("open")
	u.saysClient("held", "UnprepareFailed", pid)
	u.remove("free") // the client must not delay this
	if _, there := w.simulatedInstanceOf(t, partition); !there {
		t.Errorf("%s is gone although a client has it open", partition)
	}
	if u.get("open").DeletionTimestamp == nil {
		t.Error("Pod open is not being deleted")
	}
	stop()
	u.gone("open")
	w.uncutNow(t)
	w.clean(t, h100)
}

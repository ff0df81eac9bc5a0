package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// taintedWithin limits the time from an XID of a GPU to its taint in the ResourceSlice.
const taintedWithin = time.Second

// TestHealth expects that a failed GPU gets a taint and loses it when the GPU works again, and that
// metrics, Events and the statuses of Pods report the failure. The subtest that measures times
// runs alone.
func TestHealth(t *testing.T) {
	w := start(t, "e2e-health", simulator(t).Node(h100, *nodeFile))
	w.offersShapes(t, h100, 8, 200)

	t.Run("an XID of a held GPU is reported everywhere, and so is its end", w.testIll)
	t.Run("fifty XIDs, each with its taint in time", w.testTaintsInTime)

	t.Parallel() // from here on nothing is measured
	t.Run("one lost GPU does not affect the other seven, even over a plugin restart", w.testLost)
	t.Run("a lost GPU that does not say so is tainted too", w.testLostWithoutSaying)
	t.Run("an XID of a MIG device affects only that device", w.testIllPartition)
	t.Run("the driver is upgraded while the plugin stays", w.testDriverUpgrade)
	t.Run("a Pod without toleration is evicted and gets another GPU", w.testEvicted)
	t.Run("a GPU is tainted until a check passed, and again after its reset", w.testUnvalidated)
}

// taints returns the taints of a node's devices as KEY=VALUE:EFFECT, by device name.
func (w *world) taints(t *testing.T, node string) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	for name, d := range w.devices(t, node) {
		for _, taint := range d.Taints {
			all[name] = append(all[name], fmt.Sprintf("%s=%s:%s", taint.Key, taint.Value, taint.Effect))
		}
	}
	return all
}

// becomes waits until a device has exactly these taints, and returns how long that took.
func (w *world) becomes(t *testing.T, device string, want ...string) time.Duration {
	t.Helper()
	start := time.Now()
	eventually(t, 20*time.Second, fmt.Sprintf("device %s has the taints %q", device, want), func() (bool, string) {
		got := w.taints(t, h100)[device]
		return slices.Equal(got, want), fmt.Sprint(got)
	})
	return time.Since(start)
}

// heals makes each GPU announce first that it needs a reset, and then that it needs none. By that
// the plugin ends the GPU's health findings. Then heals waits until no device has a taint.
func (w *world) heals(t *testing.T, gpus ...string) {
	t.Helper()
	for _, gpu := range gpus {
		w.nvmlsim(t, h100, "recovery", gpu, "gpu-reset", "--announce")
	}
	for _, gpu := range gpus {
		w.knows(t, gpu, "recovery-gpu-reset")
		w.nvmlsim(t, h100, "recovery", gpu, "none", "--announce")
	}
	w.untainted(t)
}

func (w *world) untainted(t *testing.T) {
	t.Helper()
	eventually(t, 20*time.Second, "no device has a taint", func() (bool, string) {
		all := w.taints(t, h100)
		return len(all) == 0, fmt.Sprint(all)
	})
}

// knows waits until the plugin's metrics show the health finding code for the GPU at this PCI
// address.
func (w *world) knows(t *testing.T, gpu, code string) {
	t.Helper()
	name := "gpu-" + strings.NewReplacer(":", "-", ".", "-").Replace(gpu)
	line := fmt.Sprintf(`gpu_dra_health_findings{code=%q,device=%q,state="Unhealthy"} 1`, code, name)
	eventually(t, 20*time.Second, "the plugin's metrics have "+line, func() (bool, string) {
		return strings.Contains(w.get(t, h100, "metrics"), line), ""
	})
}

// resourceHealth returns the health and the message of the first device in the Pod's status.
func (u tenant) resourceHealth(pod string) (corev1.ResourceHealthStatus, string) {
	u.t.Helper()
	p, err := u.Client.CoreV1().Pods(u.namespace).Get(u.t.Context(), pod, metav1.GetOptions{})
	if err != nil {
		u.t.Fatal(err)
	}
	for _, c := range p.Status.ContainerStatuses {
		for _, s := range c.AllocatedResourcesStatus {
			for _, r := range s.Resources {
				return r.Health, ptr.Deref(r.Message, "")
			}
		}
	}
	return "", "the status says nothing"
}

func (u tenant) hears(pod string, want corev1.ResourceHealthStatus, message string) {
	u.t.Helper()
	eventually(u.t, 60*time.Second, fmt.Sprintf("the status of Pod %s says %s", pod, want), func() (bool, string) {
		health, got := u.resourceHealth(pod)
		return health == want && strings.Contains(got, message), fmt.Sprintf("%s %q", health, got)
	})
}

// busOf returns the PCI address of a device's GPU, which is a part of the device's name.
func busOf(device string) string {
	p := strings.Split(device, "-") // gpu-0000-1b-00-0…
	return fmt.Sprintf("%s:%s:%s.%s", p[1], p[2], p[3], p[4])
}

func (w *world) testIll(t *testing.T) {
	u := w.tenant(t)
	u.gpus(1)
	u.holder("user", 1, onNode(h100))
	u.running("user")
	device := u.device("user")
	gpu := busOf(device)
	u.hears("user", corev1.ResourceHealthStatusHealthy, "")
	watch, since := w.watchSlices(t, h100), time.Now()

	w.nvmlsim(t, h100, "xid", gpu, "79")
	t.Logf("tainted after %s", w.becomes(t, device, "gpu.nvidia.com/xid=79:NoSchedule"))
	for name := range w.taints(t, h100) {
		if !strings.HasPrefix(name, device) {
			t.Errorf("%s has a taint too", name)
		}
	}
	eventually(t, 10*time.Second, "the GPU's partitions are tainted", func() (bool, string) {
		n := len(w.taints(t, h100))
		return n == 26, fmt.Sprint(n)
	})
	u.hears("user", corev1.ResourceHealthStatusUnhealthy, "XID 79")
	for _, on := range [][2]string{{"default", h100}, {u.namespace, "user"}} {
		eventually(t, 20*time.Second, "an Event about "+on[1], func() (bool, string) {
			events := w.events(t, on[0], on[1])
			return strings.Contains(events, "GPUUnhealthy") && strings.Contains(events, "XID 79"), events
		})
	}
	for _, line := range []string{`gpu_dra_gpu_health{code="xid-79",device="` + device + `",state="Unhealthy"} 1`,
		`gpu_dra_health_events_total{code="xid-79",gpu="` + device + `"} 1`} {
		eventually(t, 10*time.Second, "the metrics show the XID", func() (bool, string) {
			return strings.Contains(w.get(t, h100, "metrics"), line), line
		})
	}
	u.running("user") // the Pod continues

	w.heals(t, gpu)
	u.hears("user", corev1.ResourceHealthStatusHealthy, "")
	watch.alwaysOffered(8, since)
}

func (w *world) testLost(t *testing.T) {
	watch, since := w.watchSlices(t, h100), time.Now()
	device := slices.Sorted(maps.Keys(w.gpus(t, h100)))[0]
	gpu := busOf(device)
	w.nvmlsim(t, h100, "lose", gpu, "--answers", "lost")
	want := []string{"gpu.nvidia.com/gpu-lost=:NoSchedule", "gpu.nvidia.com/xid=79:NoSchedule"}
	t.Logf("lost after %s", w.becomes(t, device, want...))
	added := w.gpus(t, h100)[device].Taints
	w.restartPlugin(t, h100)
	w.becomes(t, device, want...)
	for i, taint := range w.gpus(t, h100)[device].Taints {
		if !taint.TimeAdded.Equal(added[i].TimeAdded) {
			t.Errorf("after a restart taint %s is from %s, before it was from %s", taint.Key, taint.TimeAdded, added[i].TimeAdded)
		}
	}
	w.nvmlsim(t, h100, "restore", gpu)
	w.becomes(t, device)
	watch.alwaysOffered(8, since)
}

// testLostWithoutSaying loses GPUs that answer with UNKNOWN, or not before a timeout in the driver.
// Each must be tainted, and the others stay as they are.
func (w *world) testLostWithoutSaying(t *testing.T) {
	device := slices.Sorted(maps.Keys(w.gpus(t, h100)))[1]
	for answer, xid := range map[string]string{"unknown": "79", "silent": "119"} {
		w.untainted(t)
		w.nvmlsim(t, h100, "lose", busOf(device), "--answers", answer)
		eventually(t, 60*time.Second, device+" has a taint of XID "+xid, func() (bool, string) {
			got := w.taints(t, h100)[device]
			return slices.Contains(got, "gpu.nvidia.com/xid="+xid+":NoSchedule"), fmt.Sprint(got)
		})
		for name := range w.taints(t, h100) {
			if busOf(name) != busOf(device) {
				t.Errorf("a GPU answers %s, and %s has a taint too", answer, name)
			}
		}
		w.nvmlsim(t, h100, "restore", busOf(device))
		w.heals(t, busOf(device)) // the last XID may arrive after the first good answer
	}
}

func (w *world) testIllPartition(t *testing.T) {
	u := w.tenant(t)
	u.template("small", partitions(1, "1g.10gb"))
	for _, pod := range []string{"one", "two"} {
		u.pod(pod, onNode(h100), fromTemplate("gpu", "small"))
	}
	u.running("one", "two")
	one, two := u.device("one"), u.device("two")
	if busOf(one) != busOf(two) {
		t.Fatalf("%s and %s are not of one GPU", one, two)
	}
	instance := w.instanceAt(t, one)
	w.nvmlsim(t, h100, "xid", busOf(one)+"/"+instance+"/0", "95")
	w.becomes(t, one, "gpu.nvidia.com/xid=95:NoSchedule")
	u.hears("one", corev1.ResourceHealthStatusUnhealthy, "XID 95")
	u.hears("two", corev1.ResourceHealthStatusHealthy, "")
	if got := w.taints(t, h100)[two]; len(got) > 0 {
		t.Errorf("partition %s of the same GPU has the taints %q", two, got)
	}
	w.nvmlsim(t, h100, "xid", busOf(one), "95")
	w.becomes(t, two, "gpu.nvidia.com/xid=95:NoSchedule")
	u.hears("two", corev1.ResourceHealthStatusUnhealthy, "XID 95")
	w.heals(t, busOf(one))
	u.hears("one", corev1.ResourceHealthStatusHealthy, "")
	u.hears("two", corev1.ResourceHealthStatusHealthy, "")
}

// instanceAt returns the ID of a partition's GPU instance, as nvidia-smi lists it.
func (w *world) instanceAt(t *testing.T, device string) string {
	t.Helper()
	p := strings.Split(device, "-") // gpu-0000-1b-00-0-mig-19-6
	profile, start := p[6], p[7]
	for line := range strings.SplitSeq(w.smi(t, h100, "mig", "-lgi"), "\n") {
		fields := strings.Fields(strings.Trim(line, "| "))
		// The columns are: GPU, MIG, name, profile ID, instance ID, start:size.
		if len(fields) == 6 && fields[3] == profile && strings.HasPrefix(fields[5], start+":") {
			return fields[4]
		}
	}
	t.Fatalf("%s is not among the GPU instances", device)
	return ""
}

func (w *world) testTaintsInTime(t *testing.T) {
	const injections = 50
	devices := slices.Sorted(maps.Keys(w.gpus(t, h100)))
	watch, since := w.watchSlices(t, h100), time.Now()
	var took []time.Duration
	for len(took) < injections {
		var ill []string
		for _, device := range devices[:min(len(devices), injections-len(took))] {
			at := time.Now()
			w.nvmlsim(t, h100, "xid", busOf(device), "79")
			took = append(took, watch.taintedAt(device).Sub(at))
			ill = append(ill, busOf(device))
		}
		w.heals(t, ill...)
		watch.untainted() // otherwise taintedAt would see the old taint
	}
	slices.Sort(took)
	t.Logf("from the injection to the taint: median %s, longest %s of %d", took[len(took)/2], took[len(took)-1], len(took))
	if longest := took[len(took)*99/100]; longest > taintedWithin {
		t.Errorf("99 %% of the taints were there only after %s, want at most %s", longest, taintedWithin)
	}
	watch.alwaysOffered(8, since)
}

// taintedAt waits until the watch sees any taint on a device, and returns the time.
func (s *sliceWatch) taintedAt(device string) time.Time {
	s.t.Helper()
	deadline := time.Now().Add(enough)
	for !slices.Contains(s.tainted(), device) {
		if time.Now().After(deadline) {
			s.t.Fatalf("%s has no taint", device)
		}
		<-time.After(5 * time.Millisecond)
	}
	return time.Now()
}

// untainted waits until the watch sees no taint on any device.
func (s *sliceWatch) untainted() {
	s.t.Helper()
	eventually(s.t, 20*time.Second, "the watch sees no taint", func() (bool, string) {
		tainted := s.tainted()
		return len(tainted) == 0, fmt.Sprint(tainted)
	})
}

// tainted returns the names of the devices that have a taint.
func (s *sliceWatch) tainted() (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, slice := range s.slices {
		for _, d := range slice.Spec.Devices {
			if len(d.Taints) > 0 {
				names = append(names, d.Name)
			}
		}
	}
	return names
}

// reload loads another version of the NVIDIA driver. It fails while a process has the driver open.
func (w *world) reload(t *testing.T, version string) error {
	t.Helper()
	_, err := w.node(t, h100).Exec(t.Context(), w.sim.Tool, "--root", clusterharness.NodeRoot, "driver", "reload", "--version", version)
	return err
}

func (w *world) testDriverUpgrade(t *testing.T) {
	const version = "595.45.04"
	before := w.livePlugin(t, h100)
	if err := w.reload(t, version); err == nil {
		t.Fatal("the driver can be unloaded while the plugin has it open, so this test proves nothing")
	}
	if _, err := w.Kubectl(t.Context(), "annotate", "node", h100, "gpu.nvidia.com/release-driver=true"); err != nil {
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, "no process has the driver open", func() (bool, string) {
		err := w.reload(t, version)
		return err == nil, fmt.Sprint(err)
	})
	u := w.tenant(t)
	u.tolerant()
	u.pod("early", onNode(h100), fromTemplate("gpu", "tolerant"))
	eventually(t, 60*time.Second, "a Pod's Event says why it waits", func() (bool, string) {
		events := w.events(t, u.namespace, "early")
		return strings.Contains(events, "released for a driver upgrade"), events
	})
	if _, err := w.Kubectl(t.Context(), "annotate", "node", h100, "gpu.nvidia.com/release-driver-"); err != nil {
		t.Fatal(err)
	}
	eventually(t, 30*time.Second, "the node offers GPUs with the new driver", func() (bool, string) {
		for _, d := range w.gpus(t, h100) {
			if v := d.Attributes["driverVersionString"].StringValue; v == nil || *v != version {
				return false, fmt.Sprint(ptr.Deref(v, ""))
			}
		}
		return true, ""
	})
	u.running("early")
	gpu := u.device("early")
	w.nvmlsim(t, h100, "xid", busOf(gpu), "79")
	w.becomes(t, gpu, "gpu.nvidia.com/xid=79:NoSchedule")
	w.heals(t, busOf(gpu))
	w.sameInstance(t, before)
}

func (w *world) testEvicted(t *testing.T) {
	w.install(t, "--set", "health.effects.unhealthy=NoExecute")
	w.offersShapes(t, h100, 8, 200)
	u := w.tenant(t)
	u.gpus(1)
	// The toleration names its effect, because the eviction controller of Kubernetes 1.36 requires
	// that.
	u.template(
		"tolerant",
		`requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com, tolerations: [{key: gpu.nvidia.com/xid, operator: Exists, `+
			`effect: NoExecute}]}}]`,
	)
	u.pod("stays", onNode(h100), fromTemplate("gpu", "tolerant"))
	u.pod("goes", onNode(h100), fromTemplate("gpu", gpusTemplate(1)))
	u.running("stays", "goes")
	stays, goes := u.device("stays"), u.device("goes")
	for _, device := range []string{stays, goes} {
		w.nvmlsim(t, h100, "xid", busOf(device), "79")
	}
	eventually(t, 60*time.Second, "the Pod that does not tolerate the taint is evicted", func() (bool, string) {
		_, err := u.Client.CoreV1().Pods(u.namespace).Get(t.Context(), "goes", metav1.GetOptions{})
		return err != nil, w.events(t, u.namespace, "goes")
	})
	u.running("stays")
	u.pod("again", onNode(h100), fromTemplate("gpu", gpusTemplate(1)))
	u.running("again")
	if got := u.device("again"); got == goes || got == stays {
		t.Errorf("the Pod was allocated the failed GPU %s", got)
	}
	for _, device := range []string{stays, goes} {
		w.nvmlsim(t, h100, "recovery", busOf(device), "gpu-reset", "--announce")
	}
	for _, device := range []string{stays, goes} {
		w.knows(t, busOf(device), "recovery-gpu-reset")
		w.nvmlsim(t, h100, "recovery", busOf(device), "none", "--announce")
		w.becomes(t, device)
	}
}

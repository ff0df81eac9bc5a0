package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestHealthFaults combines GPU faults with faults of NVML, the API server and the plugin.
// Afterwards the published taints must match the state of the hardware.
func TestHealthFaults(t *testing.T) {
	t.Parallel()
	sim := simulator(t)
	w := start(t, "e2e-ailing", sim.Node(h100, "dgx-h100"))
	w.offersShapes(t, h100, 8, 200)
	devices := slices.Sorted(maps.Keys(w.gpus(t, h100)))

	t.Run("a thousand events in a second are a few writes", func(t *testing.T) { w.testStorm(t, devices[0], devices[1]) })
	t.Run("only the GPU on which NVML hangs is unknown", func(t *testing.T) { w.testHang(t, devices[2]) })
	t.Run("without events polling finds the fault", func(t *testing.T) { w.testDeaf(t, devices[3]) })
	t.Run("a GPU is unplugged and plugged in again", func(t *testing.T) { w.testPulled(t, devices[4]) })
	t.Run("the hardware's state is published after an API server outage", func(t *testing.T) { w.testAway(t, devices[5], devices[6]) })
	t.Run("an unannounced reset or a driver reload ends findings that need a reset", func(t *testing.T) { w.testResetSeen(t, devices[3]) })
	t.Run("a kill of the plugin changes nothing", func(t *testing.T) { w.testKilledWhileIll(t, devices[7]) })
}

func (w *world) testStorm(t *testing.T, noisy, ill string) {
	watch, since := w.watchSlices(t, h100), time.Now()
	go w.nvmlsim(t, h100, "xid", busOf(noisy), "31", "--count", "1000", "--over", "1s")
	w.nvmlsim(t, h100, "xid", busOf(ill), "79")
	t.Logf("tainted after %s", w.becomes(t, ill, "gpu.nvidia.com/xid=79:NoSchedule"))
	eventually(t, 20*time.Second, "all events are counted", func() (bool, string) {
		line := fmt.Sprintf(`gpu_dra_health_events_total{code="xid-31",gpu=%q} 1000`, noisy)
		return strings.Contains(w.get(t, h100, "metrics"), line+"\n"), line
	})
	w.heals(t, busOf(ill))
	if n := len(watch.history(since)); n > 12 {
		t.Errorf("the slices were written %d times, want a few", n-1)
	}
	if got := w.taints(t, h100)[noisy]; len(got) > 0 {
		t.Errorf("XIDs of applications put taints on the GPU: %q", got)
	}
	watch.alwaysOffered(8, since)
}

func (w *world) testHang(t *testing.T, device string) {
	watch, since := w.watchSlices(t, h100), time.Now()
	w.nvmlsim(t, h100, "slow", "nvmlDeviceGetFieldValues", "1h", "--gpu", busOf(device))
	eventually(t, 60*time.Second, "the GPU is unknown", func() (bool, string) {
		got := w.taints(t, h100)[device]
		return slices.Equal(got, []string{"gpu.nvidia.com/unmonitored=:None"}), fmt.Sprint(got)
	})
	for name := range w.taints(t, h100) {
		if !strings.HasPrefix(name, device) {
			t.Errorf("%s has a taint too, although only another GPU hangs", name)
		}
	}
	ns := w.namespace(t)
	w.handAllocate(t, ns, "on-hung", h100, device)
	w.apply(t, ns, podOnClaim("on-hung", h100, "on-hung"))
	w.refused(t, ns, "on-hung", "device "+device+", which cannot be prepared: the GPU does not answer")
	w.nvmlsim(t, h100, "clear")
	w.becomes(t, device)
	w.running(t, ns, "on-hung")
	w.deletePods(t, ns)
	watch.alwaysOffered(8, since)
}

func (w *world) testDeaf(t *testing.T, device string) {
	w.nvmlsim(t, h100, "fail", "nvmlEventSetWait_v2", "NVML_ERROR_UNKNOWN")
	eventually(t, 30*time.Second, "the metrics say that the watcher receives no events", func() (bool, string) {
		return strings.Contains(w.get(t, h100, "metrics"), "gpu_dra_health_events_heard 0"), ""
	})
	w.nvmlsim(t, h100, "recovery", busOf(device), "gpu-reset")
	if took := w.becomes(t, device, "gpu.nvidia.com/unhealthy=recovery-gpu-reset:NoSchedule"); took > 6*time.Second {
		t.Errorf("polling found the fault only after %s", took)
	}
	w.nvmlsim(t, h100, "recovery", busOf(device), "none")
	w.becomes(t, device)
	w.nvmlsim(t, h100, "clear")
	// The plugin's watcher process, which listens for NVML events, replaces its event sets within half
	// a minute and misses events until then. So the test repeats the XID.
	eventually(t, 60*time.Second, "the watcher receives events again", func() (bool, string) {
		w.nvmlsim(t, h100, "xid", busOf(device), "95")
		<-time.After(time.Second)
		got := w.taints(t, h100)[device]
		return slices.Equal(got, []string{"gpu.nvidia.com/xid=95:NoSchedule"}), fmt.Sprint(got)
	})
	eventually(t, 10*time.Second, "the metrics say that the watcher receives events", func() (bool, string) {
		return strings.Contains(w.get(t, h100, "metrics"), "gpu_dra_health_events_heard 1"), ""
	})
	w.heals(t, busOf(device))
}

func (w *world) testPulled(t *testing.T, device string) {
	w.nvmlsim(t, h100, "unplug", busOf(device), "--quiet")
	eventually(t, 90*time.Second, "the GPU is withdrawn", func() (bool, string) {
		gpus := w.gpus(t, h100)
		return len(gpus) == 7, fmt.Sprint(slices.Sorted(maps.Keys(gpus)), w.taints(t, h100)[device])
	})
	w.nvmlsim(t, h100, "plug", busOf(device))
	eventually(t, 90*time.Second, "the GPU is offered again", func() (bool, string) {
		gpus := w.gpus(t, h100)
		return len(gpus) == 8 && len(w.taints(t, h100)) == 0, fmt.Sprint(slices.Sorted(maps.Keys(gpus)), w.taints(t, h100)[device])
	})
	// The new GPU's events arrive only when another watcher process has taken over. So the test
	// repeats the XID.
	eventually(t, 30*time.Second, "the watcher receives events of this GPU and all others", func() (bool, string) {
		w.nvmlsim(t, h100, "xid", busOf(device), "31")
		metrics := w.get(t, h100, "metrics")
		counted := fmt.Sprintf(`gpu_dra_health_events_total{code="xid-31",gpu=%q} `, device)
		return strings.Contains(metrics, counted) && strings.Contains(metrics, "\ngpu_dra_health_events_heard 1\n"), metrics
	})
}

func (w *world) testAway(t *testing.T, ill, healed string) {
	long(t) // it mostly waits for the end of the outage
	w.nvmlsim(t, h100, "xid", busOf(healed), "95")
	w.becomes(t, healed, "gpu.nvidia.com/xid=95:NoSchedule")
	apiserver := w.node(t, "control-plane")
	if err := apiserver.Service(t.Context(), "stop", "kube-apiserver"); err != nil {
		t.Fatal(err)
	}
	w.nvmlsim(t, h100, "xid", busOf(ill), "79")
	w.nvmlsim(t, h100, "recovery", busOf(healed), "gpu-reset")
	<-time.After(15 * time.Second)
	w.nvmlsim(t, h100, "recovery", busOf(healed), "none")
	<-time.After(105 * time.Second)
	if err := apiserver.Service(t.Context(), "start", "kube-apiserver"); err != nil {
		t.Fatal(err)
	}
	eventually(t, 60*time.Second, "the published taints match the hardware's state", func() (bool, string) {
		if _, err := w.Client.Discovery().ServerVersion(); err != nil {
			return false, err.Error()
		}
		all := w.taints(t, h100)
		return strings.Join(all[ill], " ") == "gpu.nvidia.com/xid=79:NoSchedule" && len(all[healed]) == 0, fmt.Sprint(all[ill], all[healed])
	})
	w.heals(t, busOf(ill))
}

func (w *world) testResetSeen(t *testing.T, device string) {
	for what, again := range map[string][][]string{"a reset": {{"reset", busOf(device)}},
		"a reload": {{"driver", "away", "--force"}, {"driver", "back"}}} {
		w.nvmlsim(t, h100, "xid", busOf(device), "95")
		w.becomes(t, device, "gpu.nvidia.com/xid=95:NoSchedule")
		<-time.After(6 * time.Second) // polling meanwhile must not end the finding
		w.becomes(t, device, "gpu.nvidia.com/xid=95:NoSchedule")
		for _, args := range again {
			w.nvmlsim(t, h100, args...)
		}
		eventually(t, 60*time.Second, what+" ends it", func() (bool, string) {
			got := w.taints(t, h100)
			return len(got) == 0, fmt.Sprint(got[device])
		})
	}
	w.offersShapes(t, h100, 8, 200)
}

func (w *world) testKilledWhileIll(t *testing.T, device string) {
	w.nvmlsim(t, h100, "xid", busOf(device), "79")
	w.becomes(t, device, "gpu.nvidia.com/xid=79:NoSchedule")
	eventually(t, 10*time.Second, "the GPU's partitions are tainted", func() (bool, string) {
		n := len(w.taints(t, h100))
		return n == 26, fmt.Sprint(n)
	})
	before := w.gpus(t, h100)[device].Taints[0]
	watch, since := w.watchSlices(t, h100), time.Now()
	old := w.instance(t, h100)
	restarts := old.Status.ContainerStatuses[0].RestartCount
	w.on(t, h100, "sh", "-c", `kill -9 $(pgrep -o -f "^/usr/bin/gpu-kubelet-plugin")`)
	eventually(t, 60*time.Second, "the plugin runs again", func() (bool, string) {
		p := w.instance(t, h100)
		return p.Status.ContainerStatuses[0].RestartCount > restarts && isReady(&p), fmt.Sprint(p.Status.ContainerStatuses[0].RestartCount)
	})
	w.becomes(t, device, "gpu.nvidia.com/xid=79:NoSchedule")
	if now := w.gpus(t, h100)[device].Taints[0]; !now.TimeAdded.Equal(before.TimeAdded) {
		t.Errorf("after the restart the taint is from %s, before it was from %s", now.TimeAdded, before.TimeAdded)
	}
	if n := len(watch.history(since)); n > 1 {
		t.Errorf("the slices were written %d times after a restart, want not at all", n-1)
	}
	w.heals(t, busOf(device))
	watch.alwaysOffered(8, since)
}

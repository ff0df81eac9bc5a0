package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestHealthFaults: what listens and what is told fail too, and afterwards the published state is the hardware's.
func TestHealthFaults(t *testing.T) {
	t.Parallel()
	sim := simulator(t)
	w := start(t, "e2e-ailing", sim.Node(h100, "dgx-h100"))
	w.offersShapes(t, h100, 8, 200)
	devices := slices.Sorted(maps.Keys(w.gpus(t, h100)))

	t.Run("a thousand events in a second are a few writes", func(t *testing.T) { w.testStorm(t, devices[0], devices[1]) })
	t.Run("a GPU on which NVML hangs is unknown, and no other", func(t *testing.T) { w.testHang(t, devices[2]) })
	t.Run("without events questions find what is wrong", func(t *testing.T) { w.testDeaf(t, devices[3]) })
	t.Run("a GPU that is taken out and put in again", func(t *testing.T) { w.testPulled(t, devices[4]) })
	t.Run("an API server that was away gets the hardware's state", func(t *testing.T) { w.testAway(t, devices[5], devices[6]) })
	t.Run("a reset that nobody announces ends what takes one, and a reload of the driver too", func(t *testing.T) { w.testResetSeen(t, devices[3]) })
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
		t.Errorf("the slices were written %d times", n-1)
	}
	if got := w.taints(t, h100)[noisy]; len(got) > 0 {
		t.Errorf("applications' errors taint: %q", got)
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
			t.Errorf("%s has a taint, too", name)
		}
	}
	w.nvmlsim(t, h100, "clear")
	w.becomes(t, device)
	watch.alwaysOffered(8, since)
}

func (w *world) testDeaf(t *testing.T, device string) {
	w.nvmlsim(t, h100, "fail", "nvmlEventSetWait_v2", "NVML_ERROR_UNKNOWN")
	eventually(t, 30*time.Second, "nobody hears", func() (bool, string) {
		return strings.Contains(w.get(t, h100, "metrics"), "gpu_dra_health_events_heard 0"), ""
	})
	w.nvmlsim(t, h100, "recovery", busOf(device), "gpu-reset")
	if took := w.becomes(t, device, "gpu.nvidia.com/unhealthy=recovery-gpu-reset:NoSchedule"); took > 6*time.Second {
		t.Errorf("a question found it after %s", took)
	}
	w.nvmlsim(t, h100, "recovery", busOf(device), "none")
	w.becomes(t, device)
	w.nvmlsim(t, h100, "clear")
	// Sets of events are made anew with pauses of up to half a minute; what comes before that is not heard.
	eventually(t, 60*time.Second, "events are heard again", func() (bool, string) {
		w.nvmlsim(t, h100, "xid", busOf(device), "95")
		<-time.After(time.Second)
		got := w.taints(t, h100)[device]
		return slices.Equal(got, []string{"gpu.nvidia.com/xid=95:NoSchedule"}), fmt.Sprint(got)
	})
	eventually(t, 10*time.Second, "the metrics say so", func() (bool, string) {
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
	eventually(t, 90*time.Second, "it is offered again", func() (bool, string) {
		gpus := w.gpus(t, h100)
		return len(gpus) == 8 && len(w.taints(t, h100)) == 0, fmt.Sprint(slices.Sorted(maps.Keys(gpus)), w.taints(t, h100)[device])
	})
	// NVML is taken anew for a GPU that has come, and what events say in just that moment nobody hears.
	eventually(t, 30*time.Second, "it is listened to, and all others", func() (bool, string) {
		w.nvmlsim(t, h100, "xid", busOf(device), "31")
		metrics := w.get(t, h100, "metrics")
		counted := fmt.Sprintf(`gpu_dra_health_events_total{code="xid-31",gpu=%q} `, device)
		return strings.Contains(metrics, counted) && strings.Contains(metrics, "\ngpu_dra_health_events_heard 1\n"), metrics
	})
}

func (w *world) testAway(t *testing.T, ill, healed string) {
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
	eventually(t, 60*time.Second, "the published state is the hardware's", func() (bool, string) {
		if _, err := w.Client.Discovery().ServerVersion(); err != nil {
			return false, err.Error()
		}
		all := w.taints(t, h100)
		return strings.Join(all[ill], " ") == "gpu.nvidia.com/xid=79:NoSchedule" && len(all[healed]) == 0, fmt.Sprint(all[ill], all[healed])
	})
	w.heals(t, busOf(ill))
}

func (w *world) testResetSeen(t *testing.T, device string) {
	for what, again := range map[string][][]string{"a reset": {{"reset", busOf(device)}}, "a reload": {{"driver", "away", "--force"}, {"driver", "back"}}} {
		w.nvmlsim(t, h100, "xid", busOf(device), "95")
		w.becomes(t, device, "gpu.nvidia.com/xid=95:NoSchedule")
		<-time.After(6 * time.Second) // it has been asked meanwhile, and nothing of that ends it
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
	eventually(t, 10*time.Second, "its partitions are tainted", func() (bool, string) {
		n := len(w.taints(t, h100))
		return n == 26, fmt.Sprint(n)
	})
	before := w.gpus(t, h100)[device].Taints[0]
	watch, since := w.watchSlices(t, h100), time.Now()
	old := w.instance(t, h100)
	restarts := old.Status.ContainerStatuses[0].RestartCount
	w.on(t, h100, "sh", "-c", `kill -9 $(pgrep -o -f "^/usr/bin/gpu-kubelet-plugin")`)
	eventually(t, 60*time.Second, "the plugin is there again", func() (bool, string) {
		p := w.instance(t, h100)
		return p.Status.ContainerStatuses[0].RestartCount > restarts && isReady(&p), fmt.Sprint(p.Status.ContainerStatuses[0].RestartCount)
	})
	w.becomes(t, device, "gpu.nvidia.com/xid=79:NoSchedule")
	if now := w.gpus(t, h100)[device].Taints[0]; !now.TimeAdded.Equal(before.TimeAdded) {
		t.Errorf("it is from %s, before from %s", now.TimeAdded, before.TimeAdded)
	}
	if n := len(watch.history(since)); n > 1 {
		t.Errorf("the slices were written %d times for a restart", n-1)
	}
	w.heals(t, busOf(device))
	watch.alwaysOffered(8, since)
}

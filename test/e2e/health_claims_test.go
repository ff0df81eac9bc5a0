package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// lateDriver is a file on a node. While it exists, the node boots without an NVIDIA driver.
const lateDriver = "/var/lib/late-driver"

// TestHealthClaims prepares and unprepares claims while GPUs report errors, and while the NVIDIA
// driver is unloaded and loaded again.
func TestHealthClaims(t *testing.T) {
	t.Parallel()
	sim := simulator(t)
	node := sim.Node(h100, "dgx-h100")
	node.BootHook = append(
		[]string{"/bin/sh", "-ec", `[ ! -e ` + lateDriver + ` ] || set -- "$@" --no-driver --no-devices --no-uvm; "$@"`, "boot"},
		node.BootHook...)
	w := bringUp(t, "e2e-illuse", node)
	w.install(t, "--set-json", sharesValue(shareRules...))
	w.offersSome(t)

	t.Run("claims are prepared and given back while events come", w.testClaimsMeanwhile)
	t.Run("the driver is reloaded while claims are held", w.testReloadUnderClaims)
	t.Run("the driver is loaded without a GPU that a claim has, and numbers the others anew", w.testRenumbering)
	t.Run("a node boots without its driver, its Pods end, and the driver comes back", w.testDriverAfterPods)
}

// offersSome waits until the node h100 publishes eight whole GPUs and no device has a taint that
// keeps claims away.
func (w *world) offersSome(t *testing.T) {
	t.Helper()
	eventually(t, 60*time.Second, "eight GPUs are offered without a taint that keeps claims away", func() (bool, string) {
		for name, taints := range w.taints(t, h100) {
			for _, taint := range taints {
				if !strings.HasSuffix(taint, ":None") {
					return false, name + " " + taint
				}
			}
		}
		got := len(w.gpus(t, h100))
		return got == 8, fmt.Sprint(got)
	})
}

// kinds creates three claim templates: for a whole GPU, for a partition, and for a share of a GPU.
func (u tenant) kinds() {
	u.t.Helper()
	u.template("whole", device("gpu.nvidia.com", whole1, ""))
	u.template("part", device("mig.nvidia.com", whole4, "1g.10gb"))
	u.template("share", shared("shared.gpu.nvidia.com", timeSliced, "", ""))
}

func (u tenant) ofEachKind(prefix string, parts ...func(*corev1.Pod)) (pods []string) {
	u.t.Helper()
	for _, kind := range []string{"whole", "part", "share"} {
		name := prefix + "-" + kind
		u.pod(name, append([]func(*corev1.Pod){onNode(h100), fromTemplate("gpu", kind), container("main", "gpu")}, parts...)...)
		pods = append(pods, name)
	}
	return pods
}

func (w *world) testClaimsMeanwhile(t *testing.T) {
	const rounds = 4
	u := w.tenant(t)
	u.kinds()
	gpus := slices.Sorted(maps.Keys(w.gpus(t, h100)))
	ctx, stop := context.WithCancel(t.Context())
	var storm sync.WaitGroup
	storms := 0
	storm.Go(func() {
		tool := []string{w.sim.Tool, "--root", clusterharness.NodeRoot, "xid"}
		for ; ctx.Err() == nil; storms++ {
			for i, gpu := range gpus {
				code := []string{"31", "43", "144"}[(i+storms)%3]
				if _, err := w.node(t, h100).Exec(ctx, append(tool, busOf(gpu), code, "--count", "50", "--over", "50ms")...); err != nil &&
					ctx.Err() == nil {
					t.Errorf("inject XIDs: %v", err)
				}
			}
		}
	})
	for round := range rounds {
		pods := u.ofEachKind(fmt.Sprintf("r%d", round))
		u.running(pods...)
		// The device that the second Pod's claim holds fails for good. The claim must be unprepared in
		// that state.
		ill := u.device(pods[1])
		w.nvmlsim(t, h100, "xid", busOf(ill), "95")
		w.becomesGrave(t, ill, "gpu.nvidia.com/xid=95:NoSchedule")
		w.deletePods(t, u.namespace, pods...)
		w.nvmlsim(t, h100, "recovery", busOf(ill), "gpu-reset", "--announce")
		w.knows(t, busOf(ill), "recovery-gpu-reset")
		w.nvmlsim(t, h100, "recovery", busOf(ill), "none", "--announce")
		w.offersSome(t)
	}
	stop()
	storm.Wait()
	t.Logf("%d events while %d claims came and went", 50*storms*len(gpus), 3*rounds)
	w.uncut(t, h100)
	w.clean(t, h100)
}

// becomesGrave waits until the device with this name has the taint in the parameter want. Other
// taints of the device do not matter.
func (w *world) becomesGrave(t *testing.T, device, want string) {
	t.Helper()
	eventually(t, 20*time.Second, device+" has the taint "+want, func() (bool, string) {
		got := w.taints(t, h100)[device]
		return slices.Contains(got, want), fmt.Sprint(got)
	})
}

// release sets the Node annotation that makes the plugin release the GPUs for a driver upgrade. If
// on is false, it removes the annotation.
func (w *world) release(t *testing.T, on bool) {
	t.Helper()
	value := "gpu.nvidia.com/release-driver-"
	if on {
		value = "gpu.nvidia.com/release-driver=true"
	}
	if _, err := w.Kubectl(t.Context(), "annotate", "node", h100, value); err != nil {
		t.Fatal(err)
	}
}

func (w *world) testReloadUnderClaims(t *testing.T) {
	u := w.tenant(t)
	u.kinds()
	pods := u.ofEachKind("held", lasting)
	u.running(pods...)
	plugin := w.livePlugin(t, h100)
	devices := map[string]string{}
	for _, pod := range pods {
		devices[pod] = u.device(pod)
		u.hears(pod, corev1.ResourceHealthStatusHealthy, "")
	}
	w.nvmlsim(t, h100, "xid", busOf(devices[pods[0]]), "95")
	w.becomesGrave(t, devices[pods[0]], "gpu.nvidia.com/xid=95:NoSchedule")

	w.release(t, true)
	eventually(t, 60*time.Second, "the driver can be unloaded", func() (bool, string) {
		_, err := w.node(t, h100).Exec(t.Context(), w.sim.Tool, "--root", clusterharness.NodeRoot, "driver", "reload")
		return err == nil, fmt.Sprint(err)
	})
	w.release(t, false)
	u.isCut(h100, pods[1])
	w.offersSome(t) // the reload has ended the finding that needed a reset
	containers := u.containers(pods)
	for _, pod := range pods {
		u.killContainer(pod)
	}
	u.inNewContainers(containers)
	for _, pod := range pods {
		if got := u.device(pod); got != devices[pod] {
			t.Errorf("Pod %s has device %s, it had %s", pod, got, devices[pod])
		}
		u.hears(pod, corev1.ResourceHealthStatusHealthy, "")
	}
	if log := w.logOf(t, h100); strings.Contains(log, "DeviceLost") || strings.Contains(log, "is lost:") {
		t.Errorf("a device that was created again is reported as lost:\n%s", log)
	}
	w.sameInstance(t, plugin)
	w.endPods(t, u.namespace)
	w.uncut(t, h100)
	w.clean(t, h100)
}

// testRenumbering loses a claim's GPU and loads the driver again. The GPU of another claim then has
// the lost one's number, and the kubelet restarts the containers of both without a Prepare.
func (w *world) testRenumbering(t *testing.T) {
	u := w.tenant(t)
	gpus, pods := slices.Sorted(maps.Keys(w.gpus(t, h100))), []string{"first", "second"}
	for i, pod := range pods {
		u.template(pod, device("gpu.nvidia.com", busOf(gpus[i]), ""))
		u.pod(pod, onNode(h100), fromTemplate("gpu", pod), container("main", "gpu"), lasting)
	}
	u.running(pods...)
	node := func(pod string) string {
		spec := fmt.Sprintf("%s/k8s.gpu.nvidia.com-claim_%s.json", cdiRoot, u.claimOf(t, u.namespace, pod, "gpu").UID)
		return strings.TrimSpace(w.on(t, h100, "sh", "-c", "grep -o '/dev/nvidia[0-9][0-9]*' "+spec+" 2>/dev/null | sort -u; true"))
	}
	if first, second := node("first"), node("second"); first != "/dev/nvidia0" || second != "/dev/nvidia1" {
		t.Fatalf("the claims have %q and %q", first, second)
	}
	lost := busOf(u.device("first"))
	w.nvmlsim(t, h100, "lose", lost)
	w.nvmlsim(t, h100, "driver", "reload", "--force")
	eventually(t, 30*time.Second, "the lost GPU's claim has no CDI spec, and the other has its number", func() (bool, string) {
		first, second := node("first"), node("second")
		return first == "" && second == "/dev/nvidia0", fmt.Sprintf("%q, %q", first, second)
	})
	before := u.containers(pods)
	for _, pod := range pods {
		u.killContainer(pod)
	}
	u.inNewContainers(map[string]string{"second": before["second"]})
	if got, want := u.visible("second", "main"), u.allocated("second", "gpu"); !slices.Equal(got, want) {
		t.Errorf("the second Pod sees %v, it was given %v", got, want)
	}
	eventually(t, 60*time.Second, "the container whose GPU is lost does not start", func() (bool, string) {
		status := u.get("first").Status.ContainerStatuses[0]
		if status.State.Running != nil && status.ContainerID != before["first"] {
			t.Fatalf("it was started:\n%s", u.sh("first", "", "nvidia-smi -L"))
		}
		events := u.events(t, u.namespace, "first")
		return strings.Contains(events, "unresolvable CDI devices"), events
	})

	eventually(t, 20*time.Second, "the new driver says that it lacks the GPU", func() (bool, string) {
		taints := w.taints(t, h100)[u.device("first")]
		return !slices.Contains(taints, illTaint) && slices.Contains(taints, "gpu.nvidia.com/gpu-lost=:NoSchedule"), fmt.Sprint(taints)
	})
	w.nvmlsim(t, h100, "plug", lost)
	u.inNewContainers(map[string]string{"first": before["first"]})
	if got, want := u.visible("first", "main"), u.allocated("first", "gpu"); !slices.Equal(got, want) {
		t.Errorf("the first Pod sees %v, it was given %v", got, want)
	}
	w.endPods(t, u.namespace)
	w.offersSome(t)
	w.clean(t, h100)
}

func (w *world) testDriverAfterPods(t *testing.T) {
	u := w.tenant(t)
	u.kinds()
	pods := u.ofEachKind("before", lasting)
	u.running(pods...)
	ill := u.device(pods[0])
	w.nvmlsim(t, h100, "xid", busOf(ill), "79")
	w.becomesGrave(t, ill, illTaint)

	w.on(t, h100, "touch", lateDriver)
	node := w.node(t, h100)
	if err := node.PowerCut(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := node.Boot(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.on(t, h100, "rm", lateDriver)
	w.saysWhy(t, h100, "is not under the driver root")
	w.endPods(t, u.namespace) // the Pods end before the driver is back
	for _, args := range [][]string{{"driver", "back"}, {"layout", "devices"}, {"layout", "devices", "--uvm"}} {
		w.nvmlsim(t, h100, args...)
	}
	w.offersSome(t) // the reboot has ended all findings
	w.uncut(t, h100)
	after := u.ofEachKind("after")
	u.running(after...)
	for _, pod := range after {
		u.hears(pod, corev1.ResourceHealthStatusHealthy, "")
	}
	w.endPods(t, u.namespace)
	w.uncut(t, h100)
	w.clean(t, h100)
}

// TestHealthWithoutTaints uses a cluster that drops taints. The driver must withdraw a failed
// device instead, unless a claim holds it.
func TestHealthWithoutTaints(t *testing.T) {
	long(t)
	t.Parallel()
	w := bringUpWith(t, cluster.Options{
		Name: "e2e-notaints", Nodes: []cluster.NodeOptions{simulator(t).Node(h100, "dgx-h100")},
		FeatureGates: map[string]bool{"DRADeviceTaints": false, "DRADeviceTaintRules": false},
	})
	w.install(t)
	w.offersShapes(t, h100, 8, 200)
	u := w.tenant(t)
	u.gpus(1)
	u.holder("user", 1, onNode(h100))
	u.running("user")
	held := u.device("user")
	all := slices.Sorted(maps.Keys(w.gpus(t, h100)))
	free := all[slices.IndexFunc(all, func(name string) bool { return name != held })]

	for _, device := range []string{held, free} {
		w.nvmlsim(t, h100, "xid", busOf(device), "79")
	}
	gone := func(want ...string) {
		t.Helper()
		eventually(t, 20*time.Second, fmt.Sprintf("%q are withdrawn with all their partitions", want), func() (bool, string) {
			now := w.devices(t, h100)
			var missing, parts []string
			for _, name := range all {
				if _, offered := now[name]; !offered {
					missing = append(missing, name)
				}
			}
			for name := range now {
				if slices.ContainsFunc(want, func(gpu string) bool { return strings.HasPrefix(name, gpu+"-") }) {
					parts = append(parts, name)
				}
			}
			slices.Sort(want)
			return slices.Equal(missing, want) && len(parts) == 0, fmt.Sprint(missing, parts)
		})
	}
	eventually(t, 20*time.Second, "the partitions of the held GPU are withdrawn, and the GPU itself stays published", func() (bool, string) {
		now := w.devices(t, h100)
		_, there := now[held]
		n := 0
		for name := range now {
			if strings.HasPrefix(name, held+"-") {
				n++
			}
		}
		_, offered := now[free]
		return there && n == 0 && !offered, fmt.Sprint(there, n, offered)
	})
	u.hears("user", corev1.ResourceHealthStatusUnhealthy, "XID 79")
	w.deletePods(t, u.namespace, "user")
	gone(held, free)
	for _, s := range w.slices(t, h100) {
		for _, d := range s.Spec.Devices {
			if len(d.Taints) > 0 {
				t.Fatalf("the cluster does not drop taints, so this test proves nothing: %+v", d.Taints)
			}
		}
	}
	for _, device := range []string{held, free} {
		w.nvmlsim(t, h100, "recovery", busOf(device), "gpu-reset", "--announce")
		w.knows(t, busOf(device), "recovery-gpu-reset")
		w.nvmlsim(t, h100, "recovery", busOf(device), "none", "--announce")
	}
	w.offersShapes(t, h100, 8, 200)
}

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// killOnNode sends SIGKILL to those processes of the node h100 whose program path or command line
// contains what.
func (w *world) killOnNode(t *testing.T, what string) {
	t.Helper()
	const script = `
for p in /proc/[0-9]*; do
	case "$(readlink $p/exe) $(tr '\0' ' ' <$p/cmdline 2>/dev/null)" in *"$1"*) [ ${p#/proc/} = $$ ] || kill -9 ${p#/proc/} ;; esac
done; true`
	w.on(t, h100, "/bin/sh", "-c", script, "sh", what)
}

// testDaemonsOutlive expects that a computing client of MPS survives everything that happens to the
// plugin. When its MPS daemon is killed, the next daemon must serve programs in the same Pod.
func (w *world) testDaemonsOutlive(t *testing.T) {
	u := w.tenant(t)
	u.template(
		"mps",
		shared("gpu.nvidia.com", whole1, "", gpuConfig("sharing: {strategy: MPS, mpsConfig: {defaultPinnedDeviceMemoryLimit: 10Gi}}")),
	)
	u.template("share", shared("shared.gpu.nvidia.com", fractioned, "capacity: {requests: {memory: 18Gi}}", ""))
	u.template("sliced", shared("shared.gpu.nvidia.com", timeSliced, "", slicing("Long")))
	u.pod("mps", onNode(h100), fromTemplate("gpu", "mps"))
	u.pod("share", onNode(h100), fromTemplate("gpu", "share"))
	u.pod("sliced", onNode(h100), fromTemplate("gpu", "sliced"))
	u.running("mps", "share", "sliced")
	for _, pod := range []string{"mps", "share"} {
		u.keepsComputing(pod, "")
	}
	before, host := w.daemons(t), w.supervisor(t)
	same := func(after string) {
		t.Helper()
		for _, pod := range []string{"mps", "share"} {
			u.stillComputes(pod, "")
		}
		if now := fmt.Sprint(w.daemons(t)); now != fmt.Sprint(before) || len(before) != 2 {
			t.Errorf("after %s the daemons are %s, they were %v", after, now, before)
		}
		if now := w.supervisor(t); now.UID != host.UID {
			t.Errorf("%s replaced the supervisor", after)
		}
		if now := w.timeSlice(t, timeSliced); now != "Long" {
			t.Errorf("after %s the time slice is %s", after, now)
		}
	}
	plugin := w.instance(t, h100)
	w.killOnNode(t, "/usr/bin/gpu-kubelet-plugin")
	eventually(t, 60*time.Second, "the plugin runs again", func() (bool, string) {
		now := w.instance(t, h100)
		return now.Status.ContainerStatuses[0].ContainerID != plugin.Status.ContainerStatuses[0].ContainerID, ""
	})
	same("a kill of the plugin")
	// The upgrade also changes the template of the Pod of the MPS supervisor, but must not replace
	// that Pod, because its end would kill all MPS daemons. Only an admin replaces it.
	w.install(t, "--reuse-values", "--set", "logVerbosity=5", "--set", "mps.logVerbosity=4")
	same("an upgrade")
	// Another claim must get a share of the device of which the Pod named share has one, although the
	// plugin was replaced in between.
	u.pod("joins", onNode(h100), fromTemplate("gpu", "share"))
	u.running("joins")
	u.isHeldTo("joins", 18<<10, 0)
	same("another claim")

	// Another program changes the compute mode and the time slice that the driver has set for claims.
	// The plugin must set them again.
	w.smi(t, h100, "-i", w.index(t, fractioned), "-c", "DEFAULT")
	w.setTimeSlice(t, timeSliced, 1)
	eventually(t, 60*time.Second, "compute mode and time slice are what the claims need", func() (bool, string) {
		now := w.computeMode(t, fractioned) + " " + w.timeSlice(t, timeSliced)
		return now == "Exclusive_Process Long", now
	})
	same("a change by hand")

	w.killOnNode(t, "nvidia-cuda-mps-control")
	w.killOnNode(t, "nvidia-cuda-mps-server")
	u.isServedAgain("mps", "share", "joins")
	// Kill the supervisor of the MPS daemons. The container runtime then ends the daemons too, and the
	// next supervisor must start them again for the containers that still run.
	before = w.daemons(t)
	w.killOnNode(t, "gpu-mps supervise")
	u.isServedAgain("mps", "share", "joins")
	for id, now := range w.daemons(t) {
		if now.PID == before[id].PID {
			t.Errorf("daemon %s is still process %d after its supervisor was killed", id, now.PID)
		}
	}
	if err := w.Client.CoreV1().Pods(host.Namespace).Delete(t.Context(), host.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, 60*time.Second, "there is another supervisor", func() (bool, string) {
		now := w.supervisor(t)
		return now.UID != host.UID && slices.Contains(now.Spec.Containers[0].Args, "--v=4"), fmt.Sprint(now.Spec.Containers[0].Args)
	})
	u.isServedAgain("mps", "share", "joins")
	w.endPods(t, u.namespace)
	for _, address := range []string{whole1, fractioned, timeSliced} {
		w.unset(t, address, "Default")
	}
	w.unshared(t)
}

// isServedAgain waits until there are exactly two MPS daemons and both are ready, and until new
// programs in these Pods are clients of MPS with their memory limits.
func (u tenant) isServedAgain(pods ...string) {
	u.t.Helper()
	eventually(u.t, 60*time.Second, "every daemon is ready", func() (bool, string) {
		all := u.daemons(u.t)
		for _, d := range all {
			if d.State != "Ready" {
				return false, fmt.Sprint(all)
			}
		}
		return len(all) == 2, fmt.Sprint(all)
	})
	for _, pod := range pods {
		want := uint64(18 << 10)
		if pod == "mps" {
			want = 10 << 10
		}
		eventually(u.t, 30*time.Second, "a program in Pod "+pod+" is a client again", func() (bool, string) {
			out, err := u.exec(u.t, u.namespace, pod, "", "nvidia-cuda-mps-control", "nvmlsim-cuda")
			lines := said(u.t, out)
			i := slices.IndexFunc(lines, func(l computed) bool { return l.Event == "attached" })
			return err == nil && i >= 0 && lines[i].Mode == "mps" && lines[i].Devices[0].Limit == want, out
		})
	}
}

// testSharingPowerCut cuts the node's power while Pods use devices, one claim for each way of
// sharing and one for a GPU alone. After the boot each Pod must run with its device and its limits
// again. The second time the node boots on another host, with other GPUs of the same model.
func (w *world) testSharingPowerCut(t *testing.T) {
	u := w.tenant(t)
	u.template(
		"mps",
		shared("gpu.nvidia.com", whole1, "", gpuConfig("sharing: {strategy: MPS, mpsConfig: {defaultPinnedDeviceMemoryLimit: 10Gi}}")),
	)
	u.template("cut", strings.Replace(shared("mig.nvidia.com", whole2, "", migConfig("sharing: {strategy: MPS}")),
		"selectors: [", `selectors: [{cel: {expression: 'device.attributes["gpu.nvidia.com"].profile == "2g.20gb"'}}, `, 1))
	u.template("share", shared("shared.gpu.nvidia.com", fractioned, "capacity: {requests: {memory: 18Gi, cores: 20}}", ""))
	u.template("sliced", shared("shared.gpu.nvidia.com", timeSliced, "", slicing("Long")))
	u.template("alone", shared("gpu.nvidia.com", whole3, "", ""))
	pods := []string{"alone", "mps", "cut", "share", "share2", "sliced"}
	for _, pod := range pods {
		u.pod(pod, onNode(h100), fromTemplate("gpu", strings.TrimSuffix(pod, "2")), container("main", "gpu"), lasting)
	}
	u.running(pods...)
	for _, moved := range []bool{false, true} {
		before, gpus := u.containers(pods), u.sh("alone", "", "nvidia-smi -L")
		node := w.node(t, h100)
		if err := node.PowerCut(t.Context()); err != nil {
			t.Fatal(err)
		}
		if moved {
			w.moveHost(t, node)
		}
		if err := node.Boot(t.Context()); err != nil {
			t.Fatal(err)
		}
		u.inNewContainers(before)
		if now := u.sh("alone", "", "nvidia-smi -L"); (now != gpus) != moved {
			t.Errorf("moved %v: a Pod had\n%s\nand has\n%s", moved, gpus, now)
		}
		u.isHeldTo("share", 18<<10, 20)
		u.isHeldTo("share2", 18<<10, 20)
		if c := u.computes("mps", ""); c.Mode != "mps" || c.Devices[0].Limit != 10<<10 {
			t.Errorf("moved %v: after the power cut a program got %+v", moved, c)
		}
		if c := u.computes("cut", ""); c.Mode != "mps" {
			t.Errorf("moved %v: after the power cut a program on a MIG device got %+v", moved, c)
		}
		if now := w.timeSlice(t, timeSliced); now != "Long" {
			t.Errorf("moved %v: after the power cut the time slice is %s", moved, now)
		}
	}
	w.endPods(t, u.namespace)
	w.unshared(t)
	for _, address := range []string{whole1, fractioned, timeSliced} {
		w.unset(t, address, "Default")
	}
}

// moveHost lets a node without power boot on another host: with other GPUs and nothing of the
// simulated driver's state.
func (w *world) moveHost(t *testing.T, node *cluster.Node) {
	t.Helper()
	of := func(path string) string { return filepath.Join(node.VarDir(), strings.TrimPrefix(path, "/var/")) }
	marked := os.WriteFile(of(clusterharness.OtherHost), []byte("-2"), 0o600)
	if err := errors.Join(os.RemoveAll(of(clusterharness.NodeRoot)), marked); err != nil {
		t.Fatal(err)
	}
}

// testSharingUninstalled expects that an uninstallation leaves no file and no process of MPS. The
// supervisor of the MPS daemons ends last and removes the files.
func (w *world) testSharingUninstalled(t *testing.T) {
	if out, err := w.uninstall(t); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	left := w.on(
		t,
		h100,
		"sh",
		"-c",
		`ls -d "$1" 2>/dev/null; grep -l -e gpu-mps -e nvidia-cuda-mps /proc/[0-9]*/comm 2>/dev/null; true`,
		"sh",
		pluginDir,
	)
	if left != "" {
		t.Errorf("an uninstallation leaves\n%s", left)
	}
}

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// killOnNode ends the processes of a node whose program or command line has this in it, as kill -9 does.
func (w *world) killOnNode(t *testing.T, what string) {
	t.Helper()
	const script = `
for p in /proc/[0-9]*; do
	case "$(readlink $p/exe) $(tr '\0' ' ' <$p/cmdline 2>/dev/null)" in *"$1"*) [ ${p#/proc/} = $$ ] || kill -9 ${p#/proc/} ;; esac
done; true`
	w.on(t, h100, "/bin/sh", "-c", script, "sh", what)
}

// testDaemonsOutlive: a client that computes notices nothing of what happens to the plugin. What happens to its daemon it notices, and then goes on.
func (w *world) testDaemonsOutlive(t *testing.T) {
	u := w.tenant(t)
	u.template("mps", shared("gpu.nvidia.com", whole1, "", gpuConfig("sharing: {strategy: MPS, mpsConfig: {defaultPinnedDeviceMemoryLimit: 10Gi}}")))
	u.template("share", shared("shared.gpu.nvidia.com", fractioned, "capacity: {requests: {memory: 18Gi}}", ""))
	u.template("turns", shared("shared.gpu.nvidia.com", inTurns, "", slicing("Long")))
	u.pod("mps", onNode(h100), fromTemplate("gpu", "mps"))
	u.pod("share", onNode(h100), fromTemplate("gpu", "share"))
	u.pod("turns", onNode(h100), fromTemplate("gpu", "turns"))
	u.running("mps", "share", "turns")
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
		if now := w.timeSlice(t, inTurns); now != "Long" {
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
	// The supervisor's Pod is to be another one, too; but that is for whoever deletes it to decide.
	w.install(t, "--reuse-values", "--set", "logVerbosity=5", "--set", "mps.logVerbosity=4")
	same("an upgrade")
	// A second claim joins what the first has, with the new plugin.
	u.pod("joins", onNode(h100), fromTemplate("gpu", "share"))
	u.running("joins")
	u.isHeldTo("joins", 18<<10, 0)
	same("another claim")

	// What somebody changes below the claims is set again.
	w.smi(t, h100, "-i", w.index(t, fractioned), "-c", "DEFAULT")
	w.setTimeSlice(t, inTurns, 1)
	eventually(t, 60*time.Second, "compute mode and time slice are what the claims need", func() (bool, string) {
		now := w.computeMode(t, fractioned) + " " + w.timeSlice(t, inTurns)
		return now == "Exclusive_Process Long", now
	})
	same("a change by hand")

	w.killOnNode(t, "nvidia-cuda-mps-control")
	w.killOnNode(t, "nvidia-cuda-mps-server")
	u.isServedAgain("mps", "share", "joins")
	// The container runtime ends the daemons with their supervisor, and the next one starts them for the containers that are there.
	before = w.daemons(t)
	w.killOnNode(t, "gpu-mps supervise")
	u.isServedAgain("mps", "share", "joins")
	for id, now := range w.daemons(t) {
		if now.PID == before[id].PID {
			t.Errorf("daemon %s is process %d still, after its supervisor was killed", id, now.PID)
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
	for _, address := range []string{whole1, fractioned, inTurns} {
		w.unset(t, address, "Default")
	}
	w.unshared(t)
}

// isServedAgain waits until all daemons run and programs in these Pods have the limits that they had.
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

// testSharingPowerCut has one claim of each kind held when the node loses its power.
func (w *world) testSharingPowerCut(t *testing.T) {
	u := w.tenant(t)
	u.template("mps", shared("gpu.nvidia.com", whole1, "", gpuConfig("sharing: {strategy: MPS, mpsConfig: {defaultPinnedDeviceMemoryLimit: 10Gi}}")))
	u.template("cut", strings.Replace(shared("mig.nvidia.com", whole2, "", migConfig("sharing: {strategy: MPS}")),
		"selectors: [", `selectors: [{cel: {expression: 'device.attributes["gpu.nvidia.com"].profile == "2g.20gb"'}}, `, 1))
	u.template("share", shared("shared.gpu.nvidia.com", fractioned, "capacity: {requests: {memory: 18Gi, cores: 20}}", ""))
	u.template("turns", shared("shared.gpu.nvidia.com", inTurns, "", slicing("Long")))
	pods := []string{"mps", "cut", "share", "share2", "turns"}
	for _, pod := range pods {
		u.pod(pod, onNode(h100), fromTemplate("gpu", strings.TrimSuffix(pod, "2")), container("main", "gpu"), lasting)
	}
	u.running(pods...)
	before := u.containers(pods)
	node := w.node(t, h100)
	if err := node.PowerCut(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := node.Boot(t.Context()); err != nil {
		t.Fatal(err)
	}
	u.inNewContainers(before)
	u.isHeldTo("share", 18<<10, 20)
	u.isHeldTo("share2", 18<<10, 20)
	if c := u.computes("mps", ""); c.Mode != "mps" || c.Devices[0].Limit != 10<<10 {
		t.Errorf("after the power cut a program got %+v", c)
	}
	if c := u.computes("cut", ""); c.Mode != "mps" {
		t.Errorf("after the power cut a program on a MIG device got %+v", c)
	}
	if now := w.timeSlice(t, inTurns); now != "Long" {
		t.Errorf("after the power cut the time slice is %s", now)
	}
	w.endPods(t, u.namespace)
	w.unshared(t)
	for _, address := range []string{whole1, fractioned, inTurns} {
		w.unset(t, address, "Default")
	}
}

// testSharingUninstalled: the supervisor goes last and takes everything along.
func (w *world) testSharingUninstalled(t *testing.T) {
	if out, err := w.uninstall(t); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	left := w.on(t, h100, "sh", "-c", `ls -d "$1" /dev/shm/gpu-dra-driver-mps 2>/dev/null; grep -l -e gpu-mps -e nvidia-cuda-mps /proc/[0-9]*/comm 2>/dev/null; true`, "sh", pluginDir)
	if left != "" {
		t.Errorf("an uninstallation leaves\n%s", left)
	}
}

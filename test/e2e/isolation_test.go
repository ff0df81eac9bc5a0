package e2e

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
)

// probe runs the program testdata/probe.c in a container. The parameter what is the program's
// action on each name: open the file, or load the library. The result maps each name to OK or the
// error that the program reports.
func (u tenant) probe(pod, container, what string, names ...string) map[string]string {
	u.t.Helper()
	out := u.mustExec(u.t, u.namespace, pod, container, append([]string{probeDir + "/probe", what}, names...)...)
	verdicts := map[string]string{}
	for line := range strings.Lines(out) {
		name, verdict, _ := strings.Cut(strings.TrimSpace(line), " ")
		verdicts[name] = verdict
	}
	return verdicts
}

// expect runs probe in a container and fails the test unless the results are those in want.
func (u tenant) expect(pod, container, what string, want map[string]string) {
	u.t.Helper()
	got := u.probe(pod, container, what, slices.Sorted(maps.Keys(want))...)
	if !maps.Equal(got, want) {
		u.t.Errorf("probe %s in container %q of Pod %s: %v, want %v", what, container, pod, got, want)
	}
}

// testIsolation expects that a container opens only the devices of its claim. The simulated device
// nodes have no driver behind them, so the error of open shows what stopped it: ENXIO nothing,
// EPERM the container's device cgroup, ENOENT a missing device node.
func (w *world) testIsolation(t *testing.T) {
	u := w.tenant(t)
	u.template("one", oneGPU)
	u.pod("stranger", onNode(h100), container("main"), hostPath("probe", probeDir))
	u.pod("owner", onNode(h100), fromTemplate("gpu", "one"), container("main", "gpu"), container("side"), hostPath("probe", probeDir))
	u.running("stranger", "owner")

	// minors maps each GPU to the minor number of its device node on the machine.
	minors := map[string]int{}
	for i, address := range []string{"1b", "43", "52", "61", "9d", "c3", "d1", "df"} {
		minors["gpu-0000-"+address+"-00-0"] = i
	}
	device := u.claimOf(t, u.namespace, "owner", "gpu").Status.Allocation.Devices.Results[0].Device
	mine, ok := minors[device]
	if !ok {
		t.Fatalf("device %s is not a GPU of the node", device)
	}
	other := (mine + 1) % len(minors)

	// First try the device nodes at the usual paths, without creating any in the container.
	own, foreign := fmt.Sprintf("/dev/nvidia%d", mine), fmt.Sprintf("/dev/nvidia%d", other)
	control := []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}
	given, nothing := map[string]string{own: "ENXIO", foreign: "ENOENT"}, map[string]string{own: "ENOENT", foreign: "ENOENT"}
	for _, path := range control {
		given[path], nothing[path] = "ENXIO", "ENOENT"
	}
	u.expect("owner", "main", "open", given)
	u.expect("owner", "side", "open", nothing)
	u.expect("stranger", "main", "open", nothing)

	// Root in a container may create device nodes, but must still open only the devices of the
	// container's claim.
	uvm := strings.TrimSpace(w.on(t, h100, "stat", "-c", "%Hr %Lr", "/dev/nvidia-uvm"))
	mknod := fmt.Sprintf(
		"mknod /tmp/own c 195 %d && mknod /tmp/foreign c 195 %d && mknod /tmp/ctl c 195 255 && mknod /tmp/uvm c %s",
		mine,
		other,
		uvm,
	)
	for _, c := range []struct{ pod, container, verdict string }{
		{"owner", "main", "ENXIO"}, {"owner", "side", "EPERM"}, {"stranger", "main", "EPERM"},
	} {
		u.sh(c.pod, c.container, mknod)
		u.expect(
			c.pod,
			c.container,
			"open",
			map[string]string{"/tmp/own": c.verdict, "/tmp/ctl": c.verdict, "/tmp/uvm": c.verdict, "/tmp/foreign": "EPERM"},
		)
	}

	// Programs must find the driver's libraries by name, but only in a container with a claim.
	libraries := []string{"libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1"}
	for _, library := range libraries {
		u.expect("owner", "main", "load", map[string]string{library: "OK"})
		for _, c := range []struct{ pod, container string }{{"owner", "side"}, {"stranger", "main"}} {
			if verdict := u.probe(c.pod, c.container, "load", library)[library]; !strings.Contains(verdict, "No such file") {
				t.Errorf("container %s of Pod %s loads %s: %s", c.container, c.pod, library, verdict)
			}
		}
	}
	if w.sim.SMI != "" {
		u.sees("owner", "main", u.allocated("owner", "gpu"))
	}
}

func (w *world) testUnprivileged(t *testing.T) {
	u := w.tenant(t)
	u.template("one", oneGPU)
	u.pod("user", onNode(h100), fromTemplate("gpu", "one"), container("main", "gpu"), hostPath("probe", probeDir), func(p *corev1.Pod) {
		p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{
			RunAsUser: ptr.To(int64(12345)), RunAsGroup: ptr.To(int64(12345)), RunAsNonRoot: ptr.To(true),
			ReadOnlyRootFilesystem: ptr.To(true), AllowPrivilegeEscalation: ptr.To(false),
			Capabilities:   &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		}
	})
	u.running("user")
	// First make sure that the container is unprivileged.
	if id := u.sh("user", "", "id -u; grep ^CapEff /proc/1/status; touch /here 2>&1 || true"); !strings.Contains(id, "12345") ||
		!strings.Contains(id, "CapEff:\t0000000000000000") || !strings.Contains(id, "Read-only file system") {
		t.Errorf("the container is not unprivileged:\n%s", id)
	}
	// The unprivileged container must still have its GPU.
	u.expect("user", "", "load", map[string]string{"libcuda.so.1": "OK"})
	u.expect("user", "", "open", map[string]string{"/dev/nvidiactl": "ENXIO", "/dev/nvidia-uvm": "ENXIO", "/dev/nvidia-uvm-tools": "ENXIO"})
	if w.sim.SMI != "" {
		u.sees("user", "", u.allocated("user", "gpu"))
	}
}

// testNamesOfOthers names another claim's CDI device in a Pod's annotations and variables, and
// expects that the Pod does not get the device. The runtime takes CDI names only from the kubelet,
// and the kubelet only from the driver's answer for the Pod's own claims.
func (w *world) testNamesOfOthers(t *testing.T) {
	u := w.tenant(t)
	u.template("one", oneGPU)
	u.pod("owner", onNode(h100), fromTemplate("gpu", "one"))
	u.running("owner")
	claim := u.claimOf(t, u.namespace, "owner", "gpu")
	device := claim.Status.Allocation.Devices.Results[0].Device
	base, theirs := cdi.BaseID, cdi.ClaimDeviceID(claim.UID, device, nil)
	spec := w.on(t, h100, "cat", fmt.Sprintf("/var/run/cdi/k8s.gpu.nvidia.com-claim_%s.json", claim.UID))
	if !strings.Contains(spec, cdi.ClaimDeviceName(claim.UID, device, nil)) {
		t.Fatalf("the owner's device is not %s: %s", theirs, spec)
	}

	naming := func(p *corev1.Pod) {
		p.Annotations = map[string]string{
			"cdi.k8s.io/gpu.nvidia.com_steal": theirs, "cdi.k8s.io/base": base, "cdi.k8s.io/both": base + "," + theirs,
			"cdi.k8s.io/main": theirs, "cdi.k8s.io": theirs,
		}
		for i := range p.Spec.Containers {
			p.Spec.Containers[i].Env = append(p.Spec.Containers[i].Env,
				corev1.EnvVar{Name: "NVIDIA_VISIBLE_DEVICES", Value: theirs}, corev1.EnvVar{Name: "NVIDIA_DRIVER_CAPABILITIES", Value: "all"})
		}
	}
	u.template("another", oneGPU)
	u.pod("thief", onNode(h100), container("main"), hostPath("probe", probeDir), naming)
	u.pod(
		"thief-with-a-claim",
		onNode(h100),
		fromTemplate("gpu", "another"),
		container("main", "gpu"),
		container("side"),
		hostPath("probe", probeDir),
		naming,
	)
	u.running("thief", "thief-with-a-claim")
	node := regexp.MustCompile(`/dev/nvidia[0-9]+`).FindString(spec)
	for _, c := range []struct{ pod, container string }{{"thief", "main"}, {"thief-with-a-claim", "side"}} {
		u.expect(c.pod, c.container, "open", map[string]string{node: "ENOENT", "/dev/nvidiactl": "ENOENT", "/dev/nvidia-uvm": "ENOENT"})
	}
	u.expect("thief-with-a-claim", "main", "open", map[string]string{node: "ENOENT", "/dev/nvidiactl": "ENXIO"})
}

// testSocketsAndStateAreRoots expects that only root may write to the driver's files on a node, and
// that only root may read its state.
func (w *world) testSocketsAndStateAreRoots(t *testing.T) {
	u := w.tenant(t)
	u.template("one", oneGPU)
	u.pod("holds", onNode(h100), fromTemplate("gpu", "one"))
	u.running("holds")
	ours := fmt.Sprintf("%s %s/gpu.nvidia.com-* %s/", pluginDir, registrarDir, cdiRoot)
	if all := strings.Fields(w.on(t, h100, "sh", "-c", "find "+ours+" -type s -o -name '*.json'")); len(all) < 5 {
		t.Errorf("sockets of the plugin and of the supervisor, a record and two specs should be there: %q", all)
	}
	open := w.on(t, h100, "sh", "-c", "find "+ours+" '(' -perm /022 -o ! -user 0 ')' ! -type l -exec ls -ld {} +")
	if strings.TrimSpace(open) != "" {
		t.Errorf("users other than root may write to:\n%s", open)
	}
	open = w.on(t, h100, "sh", "-c", "find "+pluginDir+"/state "+pluginDir+"/mps -perm /077 ! -type s -exec ls -ld {} +")
	if strings.TrimSpace(open) != "" {
		t.Errorf("users other than root may read:\n%s", open)
	}
}

package e2e

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// ownShm mounts a memory volume of this size at /dev/shm of the containers that the Pod has so far.
func ownShm(size string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "shm", VolumeSource: corev1.VolumeSource{
			EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: ptr.To(resource.MustParse(size))},
		}})
		for i := range p.Spec.Containers {
			c := &p.Spec.Containers[i]
			c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "shm", MountPath: "/dev/shm"})
		}
	}
}

func twoContainers(entry string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { container("one", entry)(p); container("two", entry)(p) }
}

// isClient checks that a program in the container is a client of MPS with these limits of memory
// and threads, and that the MPS daemon reports the same limits. If mib is 0, there is no limit of
// memory.
func (u tenant) isClient(pod, container string, mib uint64, threads float64) {
	u.t.Helper()
	if got := u.mpsVariables(pod, container); got != "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps" {
		u.t.Errorf("container %s of Pod %s has the variables\n%s", container, pod, got)
	}
	c := u.computes(pod, container)
	if c.Mode != "mps" || len(c.Devices) == 0 || c.Devices[0].Limit != mib || c.Devices[0].Threads != threads || mib > 0 && c.MiB > mib {
		u.t.Errorf(
			"a program in container %s of Pod %s got %+v, want a client of MPS with %d MiB and %v %% of the threads",
			container,
			pod,
			c,
			mib,
			threads,
		)
	}
	limit := "0M"
	if mib > 0 {
		limit = fmt.Sprintf("%dG", mib>>10)
	}
	if got := u.asksDaemon(pod, container, "get_default_device_pinned_mem_limit 0"); got != limit {
		u.t.Errorf("the daemon of Pod %s says that the limit of memory is %s, want %s", pod, got, limit)
	}
	if got := u.asksDaemon(pod, container, "get_default_active_thread_percentage"); got != fmt.Sprintf("%.1f", threads) {
		u.t.Errorf("the daemon of Pod %s says that the limit of threads is %s, want %.1f", pod, got, threads)
	}
}

func (w *world) testMPS(t *testing.T) {
	u := w.tenant(t)
	index := w.index(t, staticGPU)
	w.asAdmin(t, func() { w.cutInHalves(t, index) })
	eventually(t, 15*time.Second, "the GPU is offered as the admin partitioned it", func() (bool, string) {
		_, whole := w.devices(t, h100)["gpu-0000-df-00-0"]
		return !whole, "whole"
	})
	u.template(
		"whole",
		shared(
			"gpu.nvidia.com",
			whole1,
			"",
			gpuConfig("sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 50, defaultPinnedDeviceMemoryLimit: 10Gi}}"),
		),
	)
	u.template(
		"static",
		shared("mig.nvidia.com", staticGPU, "", migConfig("sharing: {strategy: MPS, mpsConfig: {defaultPinnedDeviceMemoryLimit: 15Gi}}")),
	)
	u.template(
		"dynamic",
		strings.Replace(
			shared(
				"mig.nvidia.com",
				whole2,
				"",
				migConfig("sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 30, multiUser: true}}"),
			),
			"selectors: [",
			`selectors: [{cel: {expression: 'device.attributes["gpu.nvidia.com"].profile == "2g.20gb"'}}, `,
			1,
		),
	)
	u.template("pair", fmt.Sprintf(`
requests: [{name: one, exactly: {deviceClassName: gpu.nvidia.com, count: 2, selectors: [{cel: {expression: %q}}]}}]
config: [{requests: [one], opaque: {driver: gpu.nvidia.com, parameters: %s}}]`, ofGPU(whole3)+" || "+ofGPU(whole4),
		gpuConfig("sharing: {strategy: MPS, mpsConfig: {defaultPinnedDeviceMemoryLimit: 30Gi, defaultPerDevicePinnedMemoryLimit: {'1': 5Gi}}}")))
	u.template("sliced", shared("shared.gpu.nvidia.com", timeSliced, "", slicing("Medium")))
	// Six Pods run at once. The claims of five use MPS, the claim of Pod sliced does not.
	u.pod("whole", onNode(h100), fromTemplate("gpu", "whole"), twoContainers("gpu"))
	u.pod("static", onNode(h100), fromTemplate("gpu", "static"), twoContainers("gpu"))
	u.pod("dynamic", onNode(h100), fromTemplate("gpu", "dynamic"), container("one", "gpu"), asUser(1001))
	u.pod("pair", onNode(h100), fromTemplate("gpu", "pair"), container("one", "gpu"))
	u.template("share", shared("shared.gpu.nvidia.com", fractioned, "capacity: {requests: {memory: 2Gi}}", ""))
	u.pod("own", onNode(h100), fromTemplate("gpu", "share"), container("one", "gpu"), container("two"), ownShm("7Mi"))
	u.pod("sliced", onNode(h100), fromTemplate("gpu", "sliced"))
	u.running("whole", "static", "dynamic", "pair", "own", "sliced")

	for _, c := range []string{"one", "two"} {
		u.isClient("whole", c, 10<<10, 50)
		u.isClient("static", c, 15<<10, 100)
	}
	if c := u.computes("dynamic", "one"); c.Mode != "mps" || len(c.Devices) != 1 || c.Devices[0].Threads != 30 || c.Devices[0].Limit != 0 ||
		c.MiB > 20<<10 {
		t.Errorf("an ordinary user's program on a partition on demand got %+v", c)
	}
	if c := u.computes("pair", "one"); c.Mode != "mps" || len(c.Devices) != 2 || c.Devices[0].Limit != 30<<10 || c.Devices[1].Limit != 5<<10 {
		t.Errorf("a program with two GPUs got %+v", c)
	}
	if all := w.daemons(t); len(all) != 5 {
		t.Errorf("the daemons are %+v, want one for each of four claims and one for shares", all)
	}
	for address, want := range map[string]string{whole1: "Exclusive_Process", whole3: "Exclusive_Process", whole4: "Exclusive_Process",
		staticGPU: "Default", whole2: "Default", timeSliced: "Default"} {
		if now := w.computeMode(t, address); now != want {
			t.Errorf("compute mode of %s is %s, want %s", address, now, want)
		}
	}

	// Only the containers of one claim may share the /dev/shm of the claim's MPS daemon.
	u.sh("whole", "one", "echo hello >/dev/shm/hello")
	if got := u.sh("whole", "two", "cat /dev/shm/hello"); got != "hello\n" {
		t.Errorf("the other container of the claim reads %q", got)
	}
	if got := u.sh("static", "one", "ls /dev/shm"); strings.Contains(got, "hello") {
		t.Errorf("another claim's container sees %q", got)
	}
	// A container with an MPS claim must have the MPS daemon's /dev/shm even if its Pod mounts a
	// volume there. The Pod's container without a claim must keep the volume.
	if c := u.computes("own", "one"); c.Mode != "mps" {
		t.Errorf("a program in a Pod with a volume at /dev/shm got %+v", c)
	}
	half, err := strconv.Atoi(strings.TrimSpace(u.sh("own", "one", "awk '/^MemTotal:/ {print int($2/2048)}' /proc/meminfo")))
	if err != nil {
		t.Fatal(err)
	}
	for container, want := range map[string]int{"one": half, "two": 7} {
		size, err := strconv.Atoi(strings.TrimSpace(u.sh("own", container, "df -m /dev/shm | awk 'NR>1 {print $(NF-4)}'")))
		if err != nil || size < want-1 || size > want+1 {
			t.Errorf("/dev/shm of container %s has %d MiB, want %d (%v)", container, size, want, err)
		}
	}
	u.sh("own", "two", "echo mine >/dev/shm/mine")
	if got := u.sh("own", "one", "ls /dev/shm"); strings.Contains(got, "mine") {
		t.Errorf("the client sees the volume: %q", got)
	}

	w.endPods(t, u.namespace)
	w.unshared(t)
	for _, address := range []string{whole1, whole3, whole4, timeSliced} {
		w.unset(t, address, "Default")
	}
	w.removeInstances(t, index)
	w.offers(t, h100, 8)
}

// testHangingDaemon makes NVIDIA's MPS program hang at its start. The driver must refuse the claim
// before the kubelet's timeout of 45 s, and other claims must not wait.
func (w *world) testHangingDaemon(t *testing.T) {
	u := w.tenant(t)
	log := w.kubeletLog(t, h100)
	mps := gpuConfig("sharing: {strategy: MPS}")
	u.template("mps", shared("gpu.nvidia.com", whole1, "", mps))
	u.template("none", shared("gpu.nvidia.com", whole2, "", ""))
	u.template("sliced", shared("shared.gpu.nvidia.com", timeSliced, "", slicing("Long")))
	u.template("mig", shared("mig.nvidia.com", whole3, "", ""))
	w.nvmlsim(t, h100, "slow", "mpsControlStart", "1h")
	t.Cleanup(func() {
		_, _ = w.node(t, h100).Exec(context.WithoutCancel(t.Context()), w.sim.Tool, "--root", clusterharness.NodeRoot, "clear")
	})
	began := time.Now()
	u.pod("hangs", onNode(h100), fromTemplate("gpu", "mps"))
	eventually(t, 20*time.Second, "the daemon is being started", func() (bool, string) {
		all := w.daemons(t)
		return len(all) == 1, fmt.Sprint(all)
	})
	for _, other := range []string{"none", "sliced", "mig"} {
		u.pod(other, onNode(h100), fromTemplate("gpu", other))
	}
	u.running("none", "sliced", "mig")
	others := time.Since(began)
	w.refused(t, u.namespace, "hangs", "MPS daemon", "gpu-0000-61-00-0")
	if took := time.Since(began); took > 40*time.Second {
		t.Errorf("the error came after %s, the kubelet waits for 45 s", took)
	} else if others > took {
		t.Errorf("other claims' Pods ran only after %s, the hanging claim was refused after %s", others, took)
	}
	if now := u.events(t, u.namespace, "hangs"); strings.Contains(now, "DeadlineExceeded") {
		t.Errorf("the kubelet gave up before the driver did: %s", now)
	}
	w.nvmlsim(t, h100, "clear")
	u.running("hangs")
	if c := u.computes("hangs", ""); c.Mode != "mps" {
		t.Errorf("after the hang a program got %+v", c)
	}
	for _, line := range log() {
		if strings.Contains(line, "DeadlineExceeded") && strings.Contains(line, "NodePrepareResources") {
			t.Errorf("the kubelet: %s", line)
		}
	}
	w.endPods(t, u.namespace)
	w.unshared(t)
}

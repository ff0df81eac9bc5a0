package e2e

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// smallDisk is a node whose kubelet has a file system of its own, which a Pod can fill.
const smallDisk = "small-disk"

func nodeOfSmallDisk(t *testing.T) cluster.NodeOptions {
	t.Helper()
	const mount = `mkdir -p /var/lib/kubelet; mount -t tmpfs -o size=64m kubelet /var/lib/kubelet; exec "$@"`
	node := simulator(t).Node(smallDisk, *nodeFile)
	node.BootHook = append([]string{"/bin/sh", "-ec", mount, "boot"}, node.BootHook...)
	return node
}

// testFilledDisk lets a Pod fill the file system of the kubelet and of the plugin with its
// emptyDir, and deletes the Pod. The kubelet removes the emptyDir only after the plugin has
// unprepared the Pod's claims.
func (w *world) testFilledDisk(t *testing.T) {
	w.offers(t, smallDisk, 8)
	u := w.tenant(t)
	u.template("sliced", shared("shared.gpu.nvidia.com", timeSliced, "", slicing("Long")))
	u.template("fraction", shared("shared.gpu.nvidia.com", fractioned, "capacity: {requests: {memory: 18Gi}}", ""))
	scratch := func(p *corev1.Pod) {
		p.Spec.Volumes = []corev1.Volume{{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "scratch", MountPath: "/scratch"}}
	}
	both := []func(*corev1.Pod){
		onNode(smallDisk), fromTemplate("a", "sliced"), fromTemplate("b", "fraction"), container("main", "a"), container("second", "b"),
	}
	u.pod("other", both...)
	u.pod("filler", append(both, scratch)...)
	u.running("other", "filler")
	other := u.containers([]string{"other"})
	u.sh("filler", "main", "! cat /dev/zero >/scratch/all")
	w.on(t, smallDisk, "sh", "-c", "! echo more >/var/lib/kubelet/more")
	since := time.Now()
	u.remove("filler")
	t.Logf("the Pod was gone after %s", time.Since(since).Round(time.Millisecond))
	if now := u.containers([]string{"other"}); now["other"] != other["other"] {
		t.Errorf("the container of the Pod that shares the GPUs was replaced: %v, before %v", now, other)
	}
	u.remove("other")
	w.on(t, smallDisk, "rm", "/var/lib/kubelet/more")
	w.clean(t, smallDisk)
	// The Pods of the examples, which choose no node, must go to the other one.
	if _, err := w.Kubectl(t.Context(), "cordon", smallDisk); err != nil {
		t.Fatal(err)
	}
}

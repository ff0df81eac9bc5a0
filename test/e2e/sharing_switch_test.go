package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// testMPSSwitchedOff switches MPS off while claims use it. helm refuses that, so the test first
// deletes the DaemonSet of the MPS supervisor. The plugin must unprepare these claims, but give no
// claim a new MPS daemon until MPS is on again.
func (w *world) testMPSSwitchedOff(t *testing.T) {
	u := w.tenant(t)
	u.template("mps", shared("gpu.nvidia.com", whole1, "", gpuConfig("sharing: {strategy: MPS}")))
	u.template("share", shared("shared.gpu.nvidia.com", fractioned, "capacity: {requests: {memory: 18Gi}}", ""))
	u.template("new", shared("gpu.nvidia.com", whole2, "", gpuConfig("sharing: {strategy: MPS}")))
	for _, pod := range []string{"mps", "share"} {
		u.pod(pod, onNode(h100), fromTemplate("gpu", pod))
	}
	u.running("mps", "share")
	plain := sharesValue(plainShares(timeSliced, "", 3), plainShares(cutShares, "2g.20gb", 2))
	off := []string{"--reuse-values", "--set", "mps.enabled=false", "--set-json", plain}
	if err := clusterharness.Install(t.Context(), w.Cluster, w.root, off...); err == nil ||
		!strings.Contains(err.Error(), "the Pods of 2 claims") {
		t.Errorf("helm switches MPS off under claims: %v, want an error with their number", err)
	}
	if err := w.Client.AppsV1().DaemonSets(clusterharness.Namespace).Delete(t.Context(), clusterharness.Release+"-mps",
		metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.install(t, off...)
	eventually(t, 60*time.Second, "the supervisor is gone", func() (bool, string) {
		list, err := w.Client.CoreV1().
			Pods(clusterharness.Namespace).
			List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=mps-supervisor"})
		return err == nil && len(list.Items) == 0, fmt.Sprint(err)
	})
	u.pod("new", onNode(h100), fromTemplate("gpu", "new"))
	w.refused(t, u.namespace, "new", "request one: MPS is switched off in this cluster: set mps.enabled=true in the chart's values")
	u.running("mps", "share")
	w.endPods(t, u.namespace)
	w.unshared(t)
	for _, address := range []string{whole1, whole2, fractioned} {
		w.unset(t, address, "Default")
	}

	w.install(t, "--reuse-values", "--set", "mps.enabled=true", "--set-json", sharesValue(shareRules...))
	w.supervisor(t)
	u.pod("again", onNode(h100), fromTemplate("gpu", "share"))
	u.running("again")
	u.isHeldTo("again", 18<<10, 0)
	w.endPods(t, u.namespace)
	w.unshared(t)
}

package e2e

import (
	"context"
	"fmt"
	"regexp"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// testKilledWhilePreparing kills the plugin while Prepare sets the compute mode or the time slice,
// or starts the MPS daemon, for a claim. The claim's Pod must run later. In a second round the Pod
// is deleted instead, and nothing of its claim may be left.
func (w *world) testKilledWhilePreparing(t *testing.T) {
	for name, c := range map[string]struct{ hangs, template, address, becomes string }{
		"at the compute mode": {"nvmlDeviceSetComputeMode",
			shared("shared.gpu.nvidia.com", fractioned, "capacity: {requests: {memory: 18Gi}}", ""), fractioned, "Exclusive_Process Default"},
		"at the time slice": {"setTimeSlice", shared("shared.gpu.nvidia.com", timeSliced, "", slicing("Long")), timeSliced, "Default Long"},
		"at the daemon's start": {"mpsControlStart", shared("gpu.nvidia.com", whole1, "", gpuConfig("sharing: {strategy: MPS}")), whole1,
			"Exclusive_Process Default"},
	} {
		for _, stays := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, and the Pod stays: %t", name, stays), func(t *testing.T) {
				u := w.tenant(t)
				u.template("t", c.template)
				before := w.instance(t, h100).Status.ContainerStatuses[0].ContainerID
				t.Cleanup(func() {
					_, _ = w.node(t, h100).Exec(context.WithoutCancel(t.Context()), w.sim.Tool, "--root", clusterharness.NodeRoot, "clear")
				})
				w.nvmlsim(t, h100, "slow", c.hangs, "1h")
				u.pod("p", onNode(h100), fromTemplate("gpu", "t"))
				eventually(t, 60*time.Second, "the Prepare of the claim hangs", func() (bool, string) {
					if c.hangs == "mpsControlStart" { // a daemon cannot count hits, because it has the simulator's file read-only
						all := w.daemons(t)
						return len(all) == 1, fmt.Sprint(all)
					}
					out := w.nvmlsim(t, h100, "show") // the last column counts how often the fault was met
					return regexp.MustCompile(`(?m)\b` + c.hangs + `\s.*\s[1-9]\d*\s*$`).MatchString(out), out
				})
				w.killOnNode(t, "/usr/bin/gpu-kubelet-plugin")
				if !stays {
					if err := w.Client.CoreV1().Pods(u.namespace).Delete(t.Context(), "p", metav1.DeleteOptions{}); err != nil {
						t.Fatal(err)
					}
				}
				w.nvmlsim(t, h100, "clear")
				eventually(t, 60*time.Second, "the plugin runs again", func() (bool, string) {
					now := w.instance(t, h100).Status.ContainerStatuses[0].ContainerID
					return now != before, now
				})
				if stays {
					u.running("p")
					if now := w.computeMode(t, c.address) + " " + w.timeSlice(t, c.address); now != c.becomes {
						t.Errorf("the Pod runs, but compute mode and time slice of its GPU are %s", now)
					}
				}
				w.endPods(t, u.namespace)
				w.unshared(t)
				w.unset(t, c.address, "Default")
			})
		}
	}
}

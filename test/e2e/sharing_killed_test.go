package e2e

import (
	"context"
	"fmt"
	"regexp"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/stand"
)

// testKilledWhilePreparing has the plugin killed while it prepares a claim that shares: at the call that sets the compute mode, at the one that sets the time
// slice, and while the daemon starts. Then the claim's Pod runs after all, or it is gone and nothing is left.
func (w *world) testKilledWhilePreparing(t *testing.T) {
	for name, c := range map[string]struct{ hangs, template, address, becomes string }{
		"at the compute mode":   {"nvmlDeviceSetComputeMode", shared("shared.gpu.nvidia.com", fractioned, "capacity: {requests: {memory: 18Gi}}", ""), fractioned, "Exclusive_Process Default"},
		"at the time slice":     {"setTimeSlice", shared("shared.gpu.nvidia.com", inTurns, "", slicing("Long")), inTurns, "Default Long"},
		"at the daemon's start": {"mpsControlStart", shared("gpu.nvidia.com", whole1, "", gpuConfig("sharing: {strategy: MPS}")), whole1, "Exclusive_Process Default"},
	} {
		for _, stays := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, and the Pod stays: %t", name, stays), func(t *testing.T) {
				u := w.tenant(t)
				u.template("t", c.template)
				before := w.instance(t, h100).Status.ContainerStatuses[0].ContainerID
				t.Cleanup(func() {
					_, _ = w.node(t, h100).Exec(context.WithoutCancel(t.Context()), w.sim.Tool, "--root", stand.NodeRoot, "clear")
				})
				w.nvmlsim(t, h100, "slow", c.hangs, "1h")
				u.pod("p", onNode(h100), fromTemplate("gpu", "t"))
				eventually(t, 60*time.Second, "the claim is being prepared and hangs", func() (bool, string) {
					if c.hangs == "mpsControlStart" { // a daemon has the simulator's file read-only, and so cannot count
						all := w.daemons(t)
						return len(all) == 1, fmt.Sprint(all)
					}
					out := w.nvmlsim(t, h100, "show") // with how often a fault was met, at the end of its line
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
						t.Errorf("the Pod runs, and its GPU is %s", now)
					}
				}
				w.endPods(t, u.namespace)
				w.unshared(t)
				w.unset(t, c.address, "Default")
			})
		}
	}
}

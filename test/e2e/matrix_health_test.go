package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// ward is a GPU of the matrix, with the Pods that hold a part of it, and the cells that have room for more.
type ward struct {
	gpu   string
	holds []string
	room  []string
}

func wards() []ward {
	return []ward{
		{fractioned, []string{"fraction-alone", "fraction-mps"}, []string{"fraction-alone"}},
		{inTurns, []string{"turn-alone", "turn-slices"}, []string{"turn-alone", "turn-slices"}},
		{cutShares, []string{"part-fraction-alone", "part-fraction-mps", "part-turn-alone", "part-turn-slices"}, []string{"part-fraction-mps", "part-turn-alone"}},
		{whole4, []string{"dynamic-alone", "dynamic-slices", "dynamic-mps"}, []string{"dynamic-alone", "dynamic-mps"}},
		{staticGPU, []string{"static-alone", "static-slices", "static-mps", "static-fraction-alone", "static-fraction-mps", "static-turn-alone", "static-turn-slices"}, []string{"static-fraction-alone", "static-turn-alone"}},
	}
}

// illTaint is what an XID 79 does to every device of its GPU.
const illTaint = "gpu.nvidia.com/xid=79:NoSchedule"

// isIll waits until every device of a GPU, and its shares among them, has the taint, and no device of another GPU has any.
func (w *world) isIll(t *testing.T, gpu string) {
	t.Helper()
	prefix := deviceOf(gpu)
	eventually(t, 20*time.Second, "all devices of "+gpu+" are tainted, and no others", func() (bool, string) {
		taints := w.taints(t, h100)
		for name := range w.devices(t, h100) {
			var want []string
			if name == prefix || strings.HasPrefix(name, prefix+"-") {
				want = []string{illTaint}
			}
			if !slices.Equal(taints[name], want) {
				return false, fmt.Sprintf("%s has %q", name, taints[name])
			}
		}
		return true, ""
	})
}

// deviceOf is the name of a GPU at a PCI address.
func deviceOf(gpu string) string {
	return "gpu-" + strings.NewReplacer(":", "-", ".", "-").Replace(gpu)
}

// sharesOf are the names of the share devices of a GPU.
func (w *world) sharesOf(t *testing.T, gpu string) (names []string) {
	t.Helper()
	for name := range w.devices(t, h100) {
		if strings.HasPrefix(name, deviceOf(gpu)) && strings.HasSuffix(name, "-share") {
			names = append(names, name)
		}
	}
	return names
}

// newcomers makes a Pod for each of the cells.
func (u tenant) newcomers(prefix string, cells []string) (pods []string) {
	u.t.Helper()
	for _, cell := range cells {
		pod := prefix + "-" + cell
		u.pod(pod, onNode(h100), fromTemplate("gpu", cell))
		pods = append(pods, pod)
	}
	return pods
}

// areHealthy makes sure that the status of each Pod says so now.
func (u tenant) areHealthy(pods []string) {
	u.t.Helper()
	for _, pod := range pods {
		if health, message := u.resourceHealth(pod); health != corev1.ResourceHealthStatusHealthy {
			u.t.Errorf("the status of Pod %s says %s: %s", pod, health, message)
		}
	}
}

// testIllOneByOne: while one GPU is ill, what is held of it goes on and can be given back, nobody new gets any kind of part of it, and everybody else does as
// before.
func (w *world) testIllOneByOne(u tenant, works []string, same func(*testing.T)) {
	t := u.t
	all := wards()
	u.haveHealth(works, corev1.ResourceHealthStatusHealthy)
	for i, ill := range all {
		next := all[(i+1)%len(all)]
		if shares := w.sharesOf(t, ill.gpu); ill.gpu != whole4 && len(shares) == 0 {
			t.Errorf("no share device of %s is there to be tainted", ill.gpu)
		}
		leaving := u.newcomers("leaves", ill.room)
		u.running(leaving...)
		w.nvmlsim(t, h100, "xid", ill.gpu, "79")
		w.isIll(t, ill.gpu)
		kept, served := u.newcomers("kept", ill.room), u.newcomers("served", next.room)
		for _, pod := range kept {
			u.waits(pod)
		}
		u.running(served...)
		for _, pod := range ill.holds {
			u.hears(pod, corev1.ResourceHealthStatusUnhealthy, "XID 79")
		}
		u.areHealthy(slices.DeleteFunc(slices.Clone(works), func(pod string) bool { return slices.Contains(ill.holds, pod) }))
		w.deletePods(t, u.namespace, append(leaving, served...)...)
		for _, pod := range kept {
			if p := u.get(pod); p.Spec.NodeName != "" {
				t.Errorf("Pod %s was given a part of %s, which is ill", pod, ill.gpu)
			}
		}
		same(t)
		w.heals(t, ill.gpu)
		u.running(kept...)
		w.deletePods(t, u.namespace, kept...)
		u.haveHealth(ill.holds, corev1.ResourceHealthStatusHealthy)
	}
}

// testIllWhole: a whole GPU that is ill is given back, and nobody gets it until it has recovered.
func (w *world) testIllWhole(u tenant) {
	t := u.t
	w.nvmlsim(t, h100, "xid", whole1, "79")
	w.isIll(t, whole1)
	u.hears("whole-alone", corev1.ResourceHealthStatusUnhealthy, "XID 79")
	w.deletePods(t, u.namespace, "whole-alone")
	kept := u.newcomers("kept", []string{"whole-alone"})
	u.waits(kept[0])
	w.heals(t, whole1)
	u.running(kept...)
}

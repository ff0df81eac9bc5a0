package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// ward is a GPU of TestMatrix that one test makes fail. holds names the Pods that use the GPU or a
// part of it. room names the claim templates for which the GPU still has room.
type ward struct {
	gpu   string
	holds []string
	room  []string
}

func wards() []ward {
	return []ward{
		{fractioned, []string{"fraction-alone", "fraction-mps"}, []string{"fraction-alone"}},
		{timeSliced, []string{"sliced-alone", "sliced-slices"}, []string{"sliced-alone", "sliced-slices"}},
		{
			cutShares,
			[]string{"part-fraction-alone", "part-fraction-mps", "part-sliced-alone", "part-sliced-slices"},
			[]string{"part-fraction-mps", "part-sliced-alone"},
		},
		{whole4, []string{"dynamic-alone", "dynamic-slices", "dynamic-mps"}, []string{"dynamic-alone", "dynamic-mps"}},
		{
			staticGPU,
			[]string{
				"static-alone",
				"static-slices",
				"static-mps",
				"static-fraction-alone",
				"static-fraction-mps",
				"static-sliced-alone",
				"static-sliced-slices",
			},
			[]string{"static-fraction-alone", "static-sliced-alone"},
		},
	}
}

// illTaint is the taint that the driver puts on every device of a GPU that has reported XID 79.
const illTaint = "gpu.nvidia.com/xid=79:NoSchedule"

// isIll waits until every device of the GPU at this PCI address has illTaint, and no device of
// another GPU has a taint, and until the scheduler knows that.
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
	w.schedulerKnowsSlices(t)
}

// deviceOf returns the device name of the GPU at a PCI address.
func deviceOf(gpu string) string {
	return "gpu-" + strings.NewReplacer(":", "-", ".", "-").Replace(gpu)
}

// sharesOf returns the names of the share devices of the GPU at a PCI address.
func (w *world) sharesOf(t *testing.T, gpu string) (names []string) {
	t.Helper()
	for name := range w.devices(t, h100) {
		if strings.HasPrefix(name, deviceOf(gpu)) && strings.HasSuffix(name, "-share") {
			names = append(names, name)
		}
	}
	return names
}

// newcomers creates one Pod for each name in cells, which are names of claim templates. It returns
// the Pods' names, which begin with prefix.
func (u tenant) newcomers(prefix string, cells []string) (pods []string) {
	u.t.Helper()
	for _, cell := range cells {
		pod := prefix + "-" + cell
		u.pod(pod, onNode(h100), fromTemplate("gpu", cell))
		pods = append(pods, pod)
	}
	return pods
}

// areHealthy checks that the status of each Pod reports healthy devices.
func (u tenant) areHealthy(pods []string) {
	u.t.Helper()
	for _, pod := range pods {
		if health, message := u.resourceHealth(pod); health != corev1.ResourceHealthStatusHealthy {
			u.t.Errorf("the status of Pod %s says %s: %s", pod, health, message)
		}
	}
}

// testIllOneByOne makes one GPU after another fail. Pods that use the failed GPU must run on and be
// unprepared when they end, no new claim may get a part of this GPU, and the other GPUs must serve
// as before.
func (w *world) testIllOneByOne(u tenant, works []string, same func(*testing.T)) {
	t := u.t
	all := wards()
	u.haveHealth(works, corev1.ResourceHealthStatusHealthy)
	for i, ill := range all {
		if testing.Short() && ill.gpu != staticGPU {
			continue // make test-long makes every GPU fail
		}
		next := all[(i+1)%len(all)]
		if shares := w.sharesOf(t, ill.gpu); ill.gpu != whole4 && len(shares) == 0 {
			t.Errorf("GPU %s has no share device that could be tainted", ill.gpu)
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
				t.Errorf("Pod %s was allocated a part of GPU %s, which has failed", pod, ill.gpu)
			}
		}
		same(t)
		w.heals(t, ill.gpu)
		u.running(kept...)
		w.deletePods(t, u.namespace, kept...)
		u.haveHealth(ill.holds, corev1.ResourceHealthStatusHealthy)
	}
}

// testIllWhole expects that the claim of a failed whole GPU is unprepared, and that no claim gets
// the GPU until it has recovered.
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

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// cell is one combination that TestMatrix tries: a kind of device, and a way in which containers or
// claims share it.
type cell struct {
	name   string
	claim  string
	client bool     // whether a program is a client of MPS
	says   []string // texts of the refusal; nil if the combination works
}

// someSlices names no interval, because a MigDeviceConfig has no field for it.
const (
	someMPS    = "sharing: {strategy: MPS}"
	someSlices = "sharing: {strategy: TimeSlicing}"
)

// matrixRules are sharing rules for more shares than the claims of the function cells take. They
// also share partitions that an admin created.
var matrixRules = append(
	slices.Clone(shareRules), plainShares(timeSliced, "", 6), fractions(staticGPU, "1g.20gb"), plainShares(staticGPU, "2g.20gb", 6),
)

// cells returns all combinations of a kind of device and a way of sharing it. Combinations with
// shares of the same kind take shares of one device, each other combination has a device for
// itself.
func cells() []cell {
	mps, slices := gpuConfig(someMPS), slicing("Long")
	migMPS, migSlices := migConfig(someMPS), migConfig(someSlices)
	gpu := func(address, config string) string { return shared("gpu.nvidia.com", address, "", config) }
	mig := func(address, config string) string { return shared("mig.nvidia.com", address, "", config) }
	whole := func(config string) string { return ofProfile("1g.10gb", mig(staticGPU, config)) }
	cut := func(config string) string { return ofProfile("1g.10gb", mig(whole4, config)) }
	const eighteen = "capacity: {requests: {memory: 18Gi}}"
	fraction := func(config string) string { return shared("shared.gpu.nvidia.com", fractioned, eighteen, config) }
	sliced := func(config string) string { return shared("shared.gpu.nvidia.com", timeSliced, "", config) }
	partFraction := func(config string) string {
		return ofProfile("1g.10gb", shared("shared.gpu.nvidia.com", cutShares, "capacity: {requests: {memory: 2Gi}}", config))
	}
	partSliced := func(config string) string {
		return ofProfile("2g.20gb", shared("shared.gpu.nvidia.com", cutShares, "", config))
	}
	static := func(profile, rest, config string) string {
		return ofProfile(profile, shared("shared.gpu.nvidia.com", staticGPU, rest, config))
	}
	staticFraction := func(config string) string { return static("1g.20gb", "capacity: {requests: {memory: 2Gi}}", config) }
	staticSliced := func(config string) string { return static("2g.20gb", "", config) }
	return []cell{
		{"whole-alone", gpu(whole1, ""), false, nil},
		{"whole-slices", gpu(whole2, slices), false, nil},
		{"whole-mps", gpu(whole3, mps), true, nil},
		{"static-alone", whole(""), false, nil},
		{"static-slices", whole(migSlices), false, nil},
		{"static-mps", whole(migMPS), true, nil},
		{"static-fraction-alone", staticFraction(""), true, nil},
		{"static-fraction-slices", staticFraction(migSlices), false, []string{"TimeSlicing", "request one", "MPS"}},
		{"static-fraction-mps", staticFraction(migMPS), true, nil},
		{"static-sliced-alone", staticSliced(""), false, nil},
		{"static-sliced-slices", staticSliced(migSlices), false, nil},
		{"static-sliced-mps", staticSliced(migMPS), false, []string{"MPS", "request one", "fractions"}},
		{"dynamic-alone", cut(""), false, nil},
		{"dynamic-slices", cut(migSlices), false, nil},
		{"dynamic-mps", cut(migMPS), true, nil},
		{"fraction-alone", fraction(""), true, nil},
		{"fraction-slices", fraction(slices), false, []string{"TimeSlicing", "request one", "MPS"}},
		{"fraction-mps", fraction(mps), true, nil},
		{"sliced-alone", sliced(""), false, nil},
		{"sliced-slices", sliced(slices), false, nil},
		{"sliced-mps", sliced(mps), false, []string{"MPS", "request one", "fractions"}},
		{"part-fraction-alone", partFraction(""), true, nil},
		{"part-fraction-slices", partFraction(migSlices), false, []string{"TimeSlicing", "request one", "MPS"}},
		{"part-fraction-mps", partFraction(migMPS), true, nil},
		{"part-sliced-alone", partSliced(""), false, nil},
		{"part-sliced-slices", partSliced(migSlices), false, nil},
		{"part-sliced-mps", partSliced(migMPS), false, []string{"MPS", "request one", "fractions"}},
	}
}

// ofProfile narrows a claim to partitions of a profile. The expression checks the type first,
// because the class for shares also selects whole GPUs, which have no profile.
func ofProfile(profile, claim string) string {
	return strings.Replace(
		claim,
		"selectors: [",
		fmt.Sprintf(
			`selectors: [{cel: {expression: 'device.attributes["gpu.nvidia.com"].type.startsWith("mig") && `+
				`device.attributes["gpu.nvidia.com"].profile == %q'}}, `,
			profile,
		),
		1,
	)
}

// TestMatrix uses every kind of device in every way of sharing at once on one node. Each
// combination must work, whatever happens to the plugin and the GPUs' health, or be refused with
// the documented reason.
func TestMatrix(t *testing.T) {
	t.Parallel()
	sim := simulator(t)
	w := bringUp(t, "e2e-matrix", sim.Node(h100, "dgx-h100"))
	w.needSMI(t)
	w.smi(t, h100, "-pm", "1")
	w.smi(t, h100, "-i", w.index(t, whole2), "-pm", "0") // the default
	index := w.index(t, staticGPU)
	w.smi(t, h100, "-i", index, "-mig", "1")
	w.smi(t, h100, "mig", "-i", index, "-cgi", "14,15,19,19,19", "-C")
	w.install(t, "--set-json", sharesValue(matrixRules...))
	w.offers(t, h100, 7)
	bare := w.settings(t)

	u := w.tenant(t)
	var works []string
	for _, c := range cells() {
		u.template(c.name, c.claim)
		u.pod(c.name, onNode(h100), fromTemplate("gpu", c.name))
		if c.says == nil {
			works = append(works, c.name)
		}
	}
	u.runningWithin(90*time.Second, works...)
	for _, c := range cells() {
		if c.says != nil {
			w.refused(t, u.namespace, c.name, c.says...)
			continue
		}
		if got := u.keepsComputing(c.name, ""); got.Mode == "mps" != c.client {
			t.Errorf("%s: a program attached in mode %q", c.name, got.Mode)
		}
	}
	before := u.containers(works)
	daemons := fmt.Sprint(w.daemons(t))
	same := func(t *testing.T) {
		t.Helper()
		u := u.as(t)
		for _, pod := range works {
			u.stillComputes(pod, "")
		}
		if now := u.containers(works); fmt.Sprint(now) != fmt.Sprint(before) {
			t.Errorf("containers were\n%v\nand are\n%v", before, now)
		}
		if now := fmt.Sprint(w.daemons(t)); now != daemons {
			t.Errorf("daemons were\n%s\nand are\n%s", daemons, now)
		}
	}

	sliced := func(t *testing.T) {
		t.Helper()
		eventually(t, 60*time.Second, "the time slice is what its claim wants", func() (bool, string) {
			now := w.timeSlice(t, whole2)
			return now == "Long", now
		})
	}
	sliced(t)
	t.Run("restart", func(t *testing.T) {
		plugin := w.instance(t, h100)
		w.killOnNode(t, "/usr/bin/gpu-kubelet-plugin")
		eventually(t, 60*time.Second, "the plugin runs again", func() (bool, string) {
			return w.instance(t, h100).Status.ContainerStatuses[0].ContainerID != plugin.Status.ContainerStatuses[0].ContainerID, ""
		})
		same(t)
		sliced(t)
	})
	t.Run("upgrade", func(t *testing.T) {
		w.install(t, "--reuse-values", "--set", "logVerbosity=5")
		same(t)
	})
	t.Run("other sharing rules", func(t *testing.T) { w.testOtherRules(u.as(t), same) })
	t.Run("health, one GPU after the other", func(t *testing.T) { w.testIllOneByOne(u.as(t), works, same) })
	t.Run("health of all GPUs at once", func(t *testing.T) {
		for gpu := range 8 {
			w.nvmlsim(t, h100, "recovery", fmt.Sprint(gpu), "gpu-reset")
			w.nvmlsim(t, h100, "xid", fmt.Sprint(gpu), "48")
		}
		u.as(t).haveHealth(works, corev1.ResourceHealthStatusUnhealthy)
		same(t)
		for gpu := range 8 {
			w.nvmlsim(t, h100, "recovery", fmt.Sprint(gpu), "none")
		}
		u.as(t).haveHealth(works, corev1.ResourceHealthStatusHealthy)
		same(t)
	})
	t.Run("health of a GPU that is held whole", func(t *testing.T) { w.testIllWhole(u.as(t)) })
	t.Run("nothing is left", func(t *testing.T) {
		w.endPods(t, u.namespace)
		w.unshared(t)
		eventually(t, 30*time.Second, "all GPUs are as they were", func() (bool, string) {
			now := w.settings(t)
			return now == bare, now
		})
		w.clean(t, h100)
	})
}

// haveHealth waits until the status of each Pod reports this health for every device of its claim.
func (u tenant) haveHealth(pods []string, want corev1.ResourceHealthStatus) {
	u.t.Helper()
	for _, pod := range pods {
		eventually(u.t, 60*time.Second, fmt.Sprintf("the status of Pod %s says %s", pod, want), func() (bool, string) {
			n := 0
			status := u.get(pod).Status.ContainerStatuses
			for _, r := range status[0].AllocatedResourcesStatus {
				for _, d := range r.Resources {
					n++
					if d.Health != want {
						return false, fmt.Sprintf("%+v", status[0].AllocatedResourcesStatus)
					}
				}
			}
			return n > 0, fmt.Sprintf("%+v", status[0].AllocatedResourcesStatus)
		})
	}
}

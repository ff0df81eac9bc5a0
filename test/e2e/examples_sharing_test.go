package e2e

import (
	"strings"
	"testing"
)

// testSharingExamples applies the documentation's manifests for sharing. The node offers shares
// with a limited part of memory and compute (through MPS), shares without limits, and partitions.
func (w *world) testSharingExamples(t *testing.T) {
	u := w.tenant(t)
	// A Pod takes shares of two GPUs, so that no example that asks for a whole GPU gets them.
	u.template("fraction", shared("shared.gpu.nvidia.com", fractioned, "", ""))
	u.template("sliced", shared("shared.gpu.nvidia.com", timeSliced, "", ""))
	u.pod(
		"neighbour",
		onNode(h100),
		fromTemplate("fraction", "fraction"),
		fromTemplate("sliced", "sliced"),
		container("one", "fraction"),
		container("two", "sliced"),
	)
	u.running("neighbour")
	u.examples(func(name string) bool { return strings.HasPrefix(name, sharingExamples) }, map[string]func(tenant){
		"sharing-time-slicing.yaml":      tenant.checkTimeSlicing,
		"sharing-mps.yaml":               tenant.checkMPS,
		"sharing-mps-mig.yaml":           tenant.checkMPSOfMIG,
		"sharing-fraction.yaml":          tenant.checkFraction,
		"sharing-plain.yaml":             tenant.checkPlainShare,
		"sharing-extended-resource.yaml": tenant.checkShareAsResource,
	})
	w.endPods(t, u.namespace)
	w.uncut(t, h100)
	w.unshared(t)
}

func (u tenant) checkTimeSlicing() {
	const pod = "sharing-time-slicing"
	u.running(pod)
	given := u.allocated(pod, "gpu")
	u.sees(pod, "one", given)
	u.sees(pod, "two", given)
	if now := u.timeSlice(u.t, u.address(pod, "gpu")); now != "Long" {
		u.t.Errorf("the time slice is %s", now)
	}
}

func (u tenant) checkMPS() {
	u.running("sharing-mps")
	for _, c := range []string{"one", "two"} {
		u.isClient("sharing-mps", c, 10<<10, 50)
	}
}

func (u tenant) checkMPSOfMIG() {
	u.running("sharing-mps-mig")
	for _, c := range []string{"one", "two"} {
		u.isClient("sharing-mps-mig", c, 15<<10, 100)
	}
}

func (u tenant) checkFraction() {
	u.running("sharing-fraction")
	u.isHeldTo("sharing-fraction", 18<<10, 25)
}

func (u tenant) checkPlainShare() {
	u.running("sharing-plain")
	u.sees("sharing-plain", "", u.allocated("sharing-plain", "share"))
	if got := u.sh("sharing-plain", "", "env | grep CUDA_MPS || true"); got != "" {
		u.t.Errorf("a plain share has %s", got)
	}
}

func (u tenant) checkShareAsResource() {
	if seen := uuidForm.FindAllString(u.says("sharing-extended-resource"), -1); len(seen) != 1 {
		u.t.Errorf("the Pod with limits saw %v, want one GPU", seen)
	}
}

// address returns the PCI address of the GPU that a Pod's claim was allocated. entry is the claim's
// name in spec.resourceClaims.
func (u tenant) address(pod, entry string) string {
	u.t.Helper()
	r := u.claimOf(u.t, u.namespace, pod, entry).Status.Allocation.Devices.Results[0]
	return *u.devices(u.t, r.Pool)[r.Device].Attributes["resource.kubernetes.io/pciBusID"].StringValue
}

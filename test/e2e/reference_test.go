package e2e

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// testReferenceManifests applies manifests like those that NVIDIA's DRA driver documents and tests.
// All of them must work with this driver. Source:
// https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu, demo/specs and tests/bats/specs.
func (w *world) testReferenceManifests(t *testing.T) {
	w.installDefault(t, "--set", "mig.policy=dynamic", "--set", "mps.enabled=true")
	w.offersShapes(t, h100, 8, 8*everyPartition)
	for _, c := range []struct {
		name, file string
		nodes      []string
		check      func(tenant)
	}{
		{"two Pods with a GPU each", "two-pods.yaml", both, tenant.checkTwoPods},
		{"two containers with one GPU", "two-containers.yaml", both, tenant.checkTwoContainers},
		{"two Pods with one claim", "one-claim.yaml", both, tenant.checkOneClaim},
		{"two GPUs of one request", "count.yaml", both, tenant.checkCount},
		{"four MIG devices of one GPU", "mig-devices.yaml", onH100, tenant.checkMIGDevices},
		{"a MIG device with a configuration", "mig-time-slicing.yaml", onH100, tenant.checkConfiguredMIG},
		{"time-slicing and MPS in one claim", "sharing.yaml", both, tenant.checkSharing},
		{"MPS with a volume at /dev/shm", "mps-shm.yaml", both, tenant.checkMPSVolume},
		{"selectors", "selectors.yaml", onH100, tenant.checkSelectors},
		{"selectors that no device fits", "no-match.yaml", onH100, tenant.checkNoMatch},
		{"a prioritized list", "prioritized.yaml", both, tenant.checkPrioritized},
		{"an extended resource", "extended-resource.yaml", both, tenant.checkLimits},
	} {
		t.Run(c.name, func(t *testing.T) {
			for i, node := range c.nodes {
				if i > 0 && testing.Short() {
					break // make test-long uses the other model too
				}
				t.Run(node, func(t *testing.T) {
					u := w.tenant(t)
					u.applyTo(node, referenceFile(t, c.file))
					c.check(u)
				})
			}
		})
	}
}

var (
	both   = []string{h100, a100}
	onH100 = []string{h100}
)

// referenceFile returns a manifest of testdata/reference.
func referenceFile(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "reference", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

var topOfSpec = regexp.MustCompile(`(?m)^spec:\n  containers:`)

// applyTo applies a manifest and makes its Pods run on one node.
func (u tenant) applyTo(node, text string) {
	u.t.Helper()
	text = strings.ReplaceAll(text, "debian:bookworm-slim", cluster.TestImage)
	text = topOfSpec.ReplaceAllString(text, "spec:\n  nodeSelector: {kubernetes.io/hostname: "+node+
		"}\n  restartPolicy: Never\n  terminationGracePeriodSeconds: 1\n  containers:")
	u.apply(u.t, u.namespace, text)
}

func (u tenant) checkTwoPods() {
	u.running("two-pods-1", "two-pods-2")
	var all []string
	for _, pod := range []string{"two-pods-1", "two-pods-2"} {
		allocated := u.allocated(pod, "gpu")
		u.sees(pod, "", allocated)
		all = append(all, allocated...)
	}
	if len(all) != 2 || all[0] == all[1] {
		u.t.Errorf("two Pods with a GPU each got %v", all)
	}
}

func (u tenant) checkTwoContainers() {
	u.running("two-containers")
	for _, c := range []string{"ctr0", "ctr1"} {
		u.sees("two-containers", c, u.allocated("two-containers", "shared-gpu"))
	}
}

func (u tenant) checkOneClaim() {
	u.running("one-claim-1", "one-claim-2")
	for _, pod := range []string{"one-claim-1", "one-claim-2"} {
		u.sees(pod, "", u.allocated("one-claim-1", "gpu"))
	}
}

func (u tenant) checkCount() {
	u.running("count")
	allocated := u.allocated("count", "twogpus")
	if len(allocated) != 2 {
		u.t.Errorf("a request with count 2 got %v", allocated)
	}
	u.sees("count", "ctr0", allocated)
}

func (u tenant) checkMIGDevices() {
	u.running("mig-devices")
	var seen, gpus []string
	for i, profile := range []string{"1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"} {
		out := u.sh("mig-devices", "ctr"+string(rune('0'+i)), "nvidia-smi -L")
		uuids := migUUID.FindAllStringSubmatch(out, -1)
		if len(uuids) != 1 || !strings.Contains(out, "MIG "+profile+" ") {
			u.t.Fatalf("container %d sees\n%s\nwant one MIG device %s", i, out, profile)
		}
		seen = append(seen, uuids[0][1])
		gpus = append(gpus, uuidForm.FindAllString(out, -1)...)
	}
	slices.Sort(seen)
	if len(slices.Compact(seen)) != 4 {
		u.t.Errorf("the containers share MIG devices: %v", seen)
	}
	slices.Sort(gpus)
	if len(slices.Compact(gpus)) != 1 {
		u.t.Errorf("the MIG devices are of several GPUs: %v", gpus)
	}
}

func (u tenant) checkConfiguredMIG() {
	u.running("mig-time-slicing")
	u.seesPartitions("mig-time-slicing", "mig")
}

func (u tenant) checkSharing() {
	u.running("sharing")
	for request, containers := range map[string][]string{
		"ts-gpu": {"ts-ctr0", "ts-ctr1"}, "mps-gpu": {"mps-ctr0", "mps-ctr1"},
	} {
		for _, c := range containers {
			u.sees("sharing", c, u.allocated("sharing", "shared-gpus", request))
		}
	}
	for _, c := range []string{"mps-ctr0", "mps-ctr1"} {
		u.isClient("sharing", c, 10<<10, 50)
	}
	if got := u.computes("sharing", "ts-ctr0"); got.Mode == "mps" {
		u.t.Errorf("a container of the time-sliced GPU is a client of MPS: %+v", got)
	}
}

// checkMPSVolume expects that the MPS daemon's shared memory replaces the volume that the Pod
// mounts at /dev/shm. A client of MPS fails without that memory.
func (u tenant) checkMPSVolume() {
	u.running("mps-shm")
	if got := u.computes("mps-shm", "ctr0"); got.Mode != "mps" || len(got.Devices) != 1 || got.Devices[0].Limit != 10<<10 {
		u.t.Errorf("a program with a volume at /dev/shm got %+v, want a client of MPS with 10 GiB", got)
	}
}

func (u tenant) checkSelectors() {
	u.running("selectors")
	u.sees("selectors", "", u.allocated("selectors", "gpu"))
}

// checkNoMatch expects that a Pod waits if its selector matches no device. The selector must not
// cause an error, because the scheduler would then try no node at all.
func (u tenant) checkNoMatch() {
	u.waits("no-match")
	u.waits("no-such-uuid")
}

func (u tenant) checkPrioritized() {
	u.running("prioritized")
	claim := u.claimOf(u.t, u.namespace, "prioritized", "gpu")
	taken := func(r resourceapi.DeviceRequestAllocationResult) bool { return r.Request == "any/whole-gpu" }
	if !slices.ContainsFunc(claim.Status.Allocation.Devices.Results, taken) {
		u.t.Errorf("the prioritized list got %v, want its second entry", claim.Status.Allocation.Devices.Results)
	}
	u.sees("prioritized", "", u.allocated("prioritized", "gpu"))
}

func (u tenant) checkLimits() {
	u.running("extended-resource")
	if seen := u.visible("extended-resource", ""); len(seen) != 1 {
		u.t.Errorf("a Pod with nvidia.com/gpu: 1 sees %v", seen)
	}
}

package e2e

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

var update = flag.Bool("update", false, "write what TestVersion finds, instead of comparing with it")

// findings are what users get from a release of Kubernetes and containerd. Its JSON form is in
// testdata/versions, and `make reference` makes the tables of docs/support.md from there.
type findings struct {
	// APIs are the served versions of the API group resource.k8s.io.
	APIs []string `json:"apis"`
	// Gates are the API server's feature gates for dynamic resource allocation that are enabled.
	Gates []string `json:"gates"`
	// Works maps each feature of the driver to "yes", or to what happens instead.
	Works map[string]string `json:"works"`
}

// TestVersion finds out what of the driver works on the cluster's versions of Kubernetes and
// containerd: with the release's own feature gates, and with all gates for dynamic resource
// allocation. E2E_KUBERNETES and E2E_CONTAINERD select the versions. What it finds on a pair of
// versions without a file is only printed.
func TestVersion(t *testing.T) {
	t.Parallel()
	found := map[string]findings{}
	name := ""
	for gates, defaults := range map[string]bool{"defaults": true, "all gates": false} {
		t.Run(gates, func(t *testing.T) {
			if !defaults {
				long(t) // the other suites have all gates too
			}
			sim := simulator(t)
			labels := map[string]string{nodesLabel: "own-root"}
			good, noCDI := sim.Node(h100, "dgx-h100"), sim.Node(nodeNoCDI, nodesModel)
			good.Labels, noCDI.Labels, noCDI.DisableCDI = labels, labels, true
			w := bringUpWith(t, cluster.Options{
				Name: "e2e-version", Nodes: []cluster.NodeOptions{good, noCDI}, ReleaseDefaults: defaults,
			})
			w.needSMI(t)
			w.releaseOn(t, clusterharness.Release, "own-root", "--set-json", sharesValue(plainShares(timeSliced, "", 3)))
			w.offers(t, h100, 8)
			found[gates] = w.findings(t)
			name = w.versions(t)
		})
	}
	if t.Failed() {
		return
	}
	got, err := json.MarshalIndent(found, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join("testdata", "versions", name+".json")
	if *update {
		long(t)
		if len(found) != 2 {
			t.Fatalf("found only %q: run the whole test to update %s", slices.Collect(maps.Keys(found)), file)
		}
		if err := os.WriteFile(file, append(got, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	raw, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		t.Skipf("SKIPPED: there is no %s to compare with (-args -update writes it, then make reference). Found:\n%s", file, got)
	}
	if err != nil {
		t.Fatal(err)
	}
	var want map[string]findings
	if err := json.Unmarshal(raw, &want); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	maps.DeleteFunc(want, func(gates string, _ findings) bool {
		_, ran := found[gates]
		return !ran
	})
	if diff := cmp.Diff(want, found); diff != "" {
		t.Errorf("%s is out of date; run the test with -args -update, then make reference (-is +should):\n%s", file, diff)
	}
}

// versions returns the versions of the node's kubelet and container runtime, as a file name.
func (w *world) versions(t *testing.T) string {
	t.Helper()
	node, err := w.Client.CoreV1().Nodes().Get(t.Context(), h100, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	info := node.Status.NodeInfo
	return "kubernetes-" + info.KubeletVersion + "_" + strings.ReplaceAll(info.ContainerRuntimeVersion, "://", "-")
}

// findings tries every feature of the driver. A feature that the cluster announces must work.
func (w *world) findings(t *testing.T) findings {
	found := findings{Works: map[string]string{}}
	found.APIs, found.Gates = w.resourceAPIs(t), w.enabledGates(t)
	for feature, works := range map[string]func(tenant, findings) string{
		"whole GPU":                        tenant.worksWholeGPU,
		"alternatives (firstAvailable)":    tenant.worksAlternatives,
		"admin access":                     tenant.worksAdminAccess,
		"MIG partition on demand":          tenant.worksPartition,
		"plain shares":                     tenant.worksShares,
		"nvidia.com/gpu in limits":         tenant.worksLimits,
		"failing GPU gets a taint":         tenant.worksTaint,
		"GPU's health in the Pod's status": tenant.worksHealth,
		"node without CDI refuses":         tenant.worksWithoutCDI,
	} {
		t.Run(feature, func(t *testing.T) { found.Works[feature] = works(w.tenant(t), found) })
	}
	return found
}

// resourceAPIs returns the served versions of the API group resource.k8s.io.
func (w *world) resourceAPIs(t *testing.T) []string {
	t.Helper()
	groups, err := w.Client.Discovery().ServerGroups()
	if err != nil {
		t.Fatal(err)
	}
	var served []string
	for _, group := range groups.Groups {
		for _, version := range group.Versions {
			if group.Name == "resource.k8s.io" {
				served = append(served, version.Version)
			}
		}
	}
	return served
}

var enabledGate = regexp.MustCompile(`(?m)^kubernetes_feature_enabled\{name="(DRA\w*|ResourceHealthStatus)",stage="\w*"\} 1$`)

// enabledGates returns the API server's enabled feature gates that matter to the driver.
func (w *world) enabledGates(t *testing.T) []string {
	t.Helper()
	metrics, err := w.Kubectl(t.Context(), "get", "--raw", "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	var gates []string
	for _, match := range enabledGate.FindAllStringSubmatch(metrics, -1) {
		gates = append(gates, match[1])
	}
	slices.Sort(gates)
	return gates
}

const yes = "yes"

func (u tenant) worksWholeGPU(findings) string {
	u.template("one", oneGPU)
	u.pod("one", fromTemplate("gpu", "one"))
	u.running("one")
	allocated := u.allocated("one", "gpu")
	u.sees("one", "", allocated)
	eventually(u.t, 10*time.Second, "the claim's status names its GPU", func() (bool, string) {
		devices := u.claimOf(u.t, u.namespace, "one", "gpu").Status.Devices
		return len(devices) == 1 && devices[0].Data != nil && strings.Contains(string(devices[0].Data.Raw), allocated[0]), fmt.Sprint(devices)
	})
	return yes
}

func (u tenant) worksAlternatives(findings) string {
	u.template("best", `requests: [{name: gpu, firstAvailable: [
		{name: none, deviceClassName: gpu.nvidia.com, selectors: [{cel: {expression: "false"}}]},
		{name: any, deviceClassName: gpu.nvidia.com}]}]`)
	u.pod("best", fromTemplate("gpu", "best"))
	u.running("best")
	u.sees("best", "", u.allocated("best", "gpu"))
	return yes
}

func (u tenant) worksAdminAccess(findings) string {
	if _, err := u.Kubectl(u.t.Context(), "label", "namespace", u.namespace, "resource.kubernetes.io/admin-access=true"); err != nil {
		u.t.Fatal(err)
	}
	u.template("look", `requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com, adminAccess: true}}]`)
	u.pod("look", fromTemplate("gpu", "look"))
	u.running("look")
	u.sees("look", "", u.allocated("look", "gpu"))
	return yes
}

func (u tenant) worksPartition(findings) string {
	if !u.offered("type", "mig") {
		return "no: GPUs are offered whole only"
	}
	u.template("part", `requests: [{name: part, exactly: {deviceClassName: mig.nvidia.com, selectors: [
		{cel: {expression: "device.attributes['gpu.nvidia.com'].profile == '1g.10gb'"}}]}}]`)
	u.pod("part", fromTemplate("part", "part"))
	u.running("part")
	if out := u.sh("part", "", "nvidia-smi -L"); strings.Count(out, "MIG 1g.10gb") != 1 {
		u.t.Errorf("the Pod does not see its partition:\n%s", out)
	}
	return yes
}

func (u tenant) worksShares(findings) string {
	if !u.offered("sharing", "TimeSlicing") {
		return "no: no share is offered"
	}
	u.template("share", `requests: [{name: share, exactly: {deviceClassName: shared.gpu.nvidia.com}}]`)
	u.pod("one", fromTemplate("share", "share"))
	u.pod("two", fromTemplate("share", "share"))
	u.running("one", "two")
	one, two := u.visible("one", ""), u.visible("two", "")
	if len(one) != 1 || !slices.Equal(one, two) {
		u.t.Errorf("the Pods see %v and %v, want the same GPU", one, two)
	}
	return yes
}

// offered reports whether a device of the good node has this value of the string attribute name.
func (u tenant) offered(name, value string) bool {
	u.t.Helper()
	for _, d := range u.devices(u.t, h100) {
		for key, attribute := range d.Attributes {
			if string(key) == name && attribute.StringValue != nil && *attribute.StringValue == value {
				return true
			}
		}
	}
	return false
}

func (u tenant) worksLimits(findings) string {
	class, err := u.Client.ResourceV1().DeviceClasses().Get(u.t.Context(), "gpu.nvidia.com", metav1.GetOptions{})
	if err != nil {
		u.t.Fatal(err)
	}
	if class.Spec.ExtendedResourceName == nil {
		return "no: the API server drops the class's extendedResourceName"
	}
	u.pod("limits", limits("1"))
	u.running("limits")
	if status := u.get("limits").Status.ExtendedResourceClaimStatus; status == nil {
		u.t.Errorf("Pod limits runs without a claim")
	}
	if seen := u.visible("limits", ""); len(seen) != 1 {
		u.t.Errorf("the Pod sees %v, want one GPU", seen)
	}
	return yes
}

// The GPUs that fail in these tests.
const (
	failsIdle = "0000:df:00.0"
	failsHeld = "0000:d1:00.0"
)

func (u tenant) worksTaint(findings) string {
	device := wholeName(failsIdle)
	u.nvmlsim(u.t, h100, "xid", failsIdle, "79")
	answer := ""
	eventually(u.t, 20*time.Second, "device "+device+" has a taint or is gone", func() (bool, string) {
		d, ok := u.devices(u.t, h100)[device]
		switch {
		case !ok:
			answer = "no: the device leaves the slices"
		case len(d.Taints) > 0:
			answer = yes
		}
		return answer != "", fmt.Sprint(d.Taints)
	})
	return answer
}

// wholeName returns the device name of the whole GPU at this PCI address.
func wholeName(address string) string {
	return "gpu-" + strings.NewReplacer(":", "-", ".", "-").Replace(address)
}

func (u tenant) worksHealth(found findings) string {
	if !slices.Contains(found.Gates, "ResourceHealthStatus") {
		return "no: the feature gate is off"
	}
	u.template("held", shared("gpu.nvidia.com", failsHeld, "", ""))
	u.pod("held", fromTemplate("gpu", "held"))
	u.running("held")
	u.nvmlsim(u.t, h100, "xid", failsHeld, "79")
	unhealthy := func() (bool, string) {
		for _, c := range u.get("held").Status.ContainerStatuses {
			for _, resource := range c.AllocatedResourcesStatus {
				for _, r := range resource.Resources {
					if r.Health == corev1.ResourceHealthStatusUnhealthy {
						return true, ""
					}
				}
			}
		}
		return false, fmt.Sprint(u.get("held").Status.ContainerStatuses)
	}
	if strings.HasPrefix(u.versions(u.t), "kubernetes-v1.34.") {
		// pkg/kubelet/cm/dra/manager.go, UpdateAllocatedResourcesStatus
		<-time.After(30 * time.Second)
		if is, _ := unhealthy(); !is {
			return "only if the ResourceClaim has the name that the Pod gives it"
		}
		return yes
	}
	eventually(u.t, 60*time.Second, "the Pod's status says that its GPU is unhealthy", unhealthy)
	return yes
}

func (u tenant) worksWithoutCDI(findings) string {
	u.saysWhy(u.t, nodeNoCDI, cdiIsOff)
	return yes
}

package e2e

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// testExamples applies the documentation's manifests for GPUs and partitions, and checks what each
// of them promises.
func (w *world) testExamples(t *testing.T) {
	w.needSMI(t)
	ofThisTest := func(name string) bool {
		return !strings.HasPrefix(name, sharingExamples) && !strings.HasPrefix(name, tenancyExamples) && name != passthroughExample
	}
	w.tenant(t).examples(ofThisTest, map[string]func(tenant){
		"one-gpu.yaml":                 tenant.checkOneGPU,
		"shared-claim.yaml":            tenant.checkSharedClaim,
		"by-attributes.yaml":           tenant.checkByAttributes,
		"two-gpus-same-pcie-root.yaml": tenant.checkSamePCIeRoot,
		"admin-access.yaml":            tenant.checkAdminAccess,
		"extended-resource.yaml":       tenant.checkExtendedResource,
		"one-mig.yaml":                 tenant.checkOneMIG,
		"mig-by-memory.yaml":           tenant.checkMIGByMemory,
		"migs-of-one-gpu.yaml":         tenant.checkMIGsOfOneGPU,
		"gpu-and-mig.yaml":             tenant.checkGPUAndMIG,
		"mig-extended-resource.yaml":   tenant.checkMIGExtendedResource,
	})
}

// sharingExamples is the prefix of the file names of examples that need shared GPUs.
const sharingExamples = "sharing-"

// examples applies those manifests of docs/examples that among selects, and runs the check of each.
// Each selected file must have a check.
func (u tenant) examples(among func(name string) bool, checks map[string]func(tenant)) {
	u.t.Helper()
	files, err := filepath.Glob(filepath.Join(u.root, "docs", "examples", "*.yaml"))
	if err != nil {
		u.t.Fatal(err)
	}
	found := map[string]bool{}
	for _, file := range files {
		if !among(filepath.Base(file)) {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			u.t.Fatal(err)
		}
		found[filepath.Base(file)] = true
		u.applyExample(u.t, u.namespace, string(text))
	}
	if want := slices.Sorted(maps.Keys(checks)); !slices.Equal(want, slices.Sorted(maps.Keys(found))) {
		u.t.Errorf("the examples are %v, but the test has checks of %v", slices.Sorted(maps.Keys(found)), want)
	}
	for _, file := range slices.Sorted(maps.Keys(checks)) {
		u.t.Run(file, func(t *testing.T) { checks[file](tenant{u.world, t, u.namespace}) })
	}
}

var podSpec = regexp.MustCompile(`(?m)^( *)containers:$`)

// applyExample creates an example's objects in namespace, unless the manifest names a namespace. It
// replaces the image by a local one and shortens the grace period.
func (w *world) applyExample(t *testing.T, namespace, text string) {
	t.Helper()
	text = strings.ReplaceAll(text, "debian:bookworm-slim", cluster.TestImage)
	text = podSpec.ReplaceAllString(text, "${1}terminationGracePeriodSeconds: 1\n${0}")
	if own := regexp.MustCompile(`(?m)^  namespace: (.*)$`).FindStringSubmatch(text); own != nil {
		namespace = own[1]
		t.Cleanup(func() { w.endNamespace(t, namespace) })
	}
	w.apply(t, namespace, text)
}

// says waits until a Pod has succeeded, and returns the log of the Pod.
func (u tenant) says(pod string) string {
	u.t.Helper()
	eventually(u.t, 60*time.Second, "Pod "+pod+" succeeds", func() (bool, string) {
		phase := u.get(pod).Status.Phase
		return phase == corev1.PodSucceeded, string(phase) + " " + u.events(u.t, u.namespace, pod)
	})
	return u.printed(pod)
}

func (u tenant) printed(pod string) string {
	u.t.Helper()
	out, err := u.Kubectl(u.t.Context(), "-n", u.namespace, "logs", pod)
	if err != nil {
		u.t.Fatal(err)
	}
	return out
}

func (u tenant) checkOneGPU() {
	u.running("one-gpu")
	u.sees("one-gpu", "", u.allocated("one-gpu", "gpu"))
}

func (u tenant) checkSharedClaim() {
	u.running("shared-gpu-a", "shared-gpu-b")
	allocated := u.allocated("shared-gpu-a", "gpu")
	for _, pod := range []string{"shared-gpu-a", "shared-gpu-b"} {
		if got := uuidForm.FindAllString(u.printed(pod), -1); !slices.Equal(got, allocated) {
			u.t.Errorf("Pod %s saw %v, the claim was allocated %v", pod, got, allocated)
		}
	}
}

func (u tenant) checkByAttributes() {
	if out := u.says("best-gpu"); strings.Count(out, "NVIDIA H100") != 1 {
		u.t.Errorf("the Pod does not see one H100:\n%s", out)
	}
}

func (u tenant) checkSamePCIeRoot() {
	list, err := u.Client.CoreV1().Pods(u.namespace).List(u.t.Context(), metav1.ListOptions{LabelSelector: "app=two-near-gpus"})
	if err != nil || len(list.Items) != 2 {
		u.t.Fatalf("%d Pods (%v), want 2", len(list.Items), err)
	}
	for _, pod := range list.Items {
		u.running(pod.Name)
		u.check(pod.Name, wish{count: 2, among: allA100, same: pcieRoot})
		u.sees(pod.Name, "", u.allocated(pod.Name, "gpus"))
	}
}

func (u tenant) checkAdminAccess() {
	u.namespace = "gpu-monitoring"
	table, node := u.says("look"), u.get("look").Spec.NodeName
	for name, device := range u.devices(u.t, node) {
		address := strings.ToUpper(*device.Attributes["resource.kubernetes.io/pciBusID"].StringValue)
		if !strings.Contains(table, address) {
			u.t.Errorf("the administrator does not see %s of node %s:\n%s", name, node, table)
		}
	}
}

func (u tenant) checkExtendedResource() {
	if got := uuidForm.FindAllString(u.says("extended-resource"), -1); len(got) != 1 {
		u.t.Errorf("the Pod with limits saw %v, want one GPU", got)
	}
}

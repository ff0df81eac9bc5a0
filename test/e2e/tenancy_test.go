package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// tenancyExamples is the prefix of the file names of examples that limit tenants.
const tenancyExamples = "tenancy-"

// TestTenancy applies the examples of docs/tenancy.md. All of it happens in the API server, so the
// cluster has no nodes.
func TestTenancy(t *testing.T) {
	t.Parallel()
	w := bringUpWith(t, cluster.Options{Name: "e2e-tenancy", ControlPlaneOnly: true})
	if _, err := w.Helm(t.Context(), "install", clusterharness.Release, clusterharness.Chart(w.root),
		"--namespace", clusterharness.Namespace, "--create-namespace", "--values", clusterharness.Values(w.root),
		"--set-json", sharesValue(`{"kind":"shares","count":2}`)); err != nil {
		t.Fatal(err)
	}
	t.Run("a quota limits each class", w.testQuota)
	t.Run("only labelled namespaces may share within a claim", w.testSharingPolicy)
	t.Run("only labelled namespaces have admin access", w.testAdminAccessLabel)
}

// example applies a manifest of docs/examples.
func (u tenant) example(name string) {
	u.t.Helper()
	text, err := os.ReadFile(filepath.Join(u.root, "docs", "examples", name))
	if err != nil {
		u.t.Fatal(err)
	}
	u.apply(u.t, u.namespace, string(text))
}

// refusedClaim fails the test unless the API server refuses the claim and gives this reason.
func (u tenant) refusedClaim(devices, reason string) {
	u.t.Helper()
	if err := u.tryClaim("refused", devices); err == nil || !strings.Contains(err.Error(), reason) {
		u.t.Errorf("the error of this claim is %v, want %q:\n%s", err, reason, devices)
	}
}

func ofClass(class, rest string) string {
	return "requests: [{name: gpu, exactly: {deviceClassName: " + class + rest + "}}]"
}

func (w *world) testQuota(t *testing.T) {
	u := w.tenant(t)
	u.example("tenancy-quota.yaml")
	eventually(t, 10*time.Second, "the quota is active", func() (bool, string) {
		out, err := w.Kubectl(t.Context(), "-n", u.namespace, "get", "resourcequota", "gpus", "-o", "jsonpath={.status.hard}")
		return err == nil && strings.Contains(out, "gpu.nvidia.com.deviceclass"), out
	})
	u.claim("one", oneGPU)
	u.refusedClaim(ofClass("gpu.nvidia.com", ", count: 2"), "exceeded quota: gpus")
	u.refusedClaim(ofClass("gpu.nvidia.com", ", allocationMode: All"), "exceeded quota: gpus")
	u.refusedClaim(ofClass("shared.gpu.nvidia.com", ""), "exceeded quota: gpus")
	u.refusedClaim(`requests: [{name: gpu, firstAvailable: [
		{name: part, deviceClassName: mig.nvidia.com}, {name: whole, deviceClassName: gpu.nvidia.com, count: 2}]}]`, "exceeded quota: gpus")
	u.claim("seven", ofClass("mig.nvidia.com", ", count: 7"))
	u.claim("two", oneGPU)
}

func (w *world) testSharingPolicy(t *testing.T) {
	u := w.tenant(t)
	const config = "\nconfig: [{requests: [gpu], opaque: {driver: gpu.nvidia.com, parameters: " +
		"{apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: MPS}}}}]"
	const reason = "may not share GPUs within a claim"
	u.claim("old", oneGPU+config)
	u.patch("old", `{"metadata":{"finalizers":["example.com/held"]}}`)
	u.example("tenancy-sharing.yaml")
	eventually(t, 20*time.Second, "the policy is active", func() (bool, string) {
		err := u.tryClaim("mps", oneGPU+config)
		if err == nil {
			_, err = w.Kubectl(t.Context(), "-n", u.namespace, "delete", "resourceclaim", "mps")
			return false, fmt.Sprint("the claim was created; its deletion: ", err)
		}
		return strings.Contains(err.Error(), reason), err.Error()
	})
	// Like the controller of claims, which removes its finalizer from a claim that is to be deleted.
	u.patch("old", `{"metadata":{"labels":{"changed":"yes"}}}`)
	claims := w.Client.ResourceV1().ResourceClaims(u.namespace)
	if err := claims.Delete(t.Context(), "old", metav1.DeleteOptions{}); err != nil {
		t.Errorf("delete a claim that is older than the policy: %v", err)
	}
	u.patch("old", `{"metadata":{"finalizers":null}}`)
	if _, err := claims.Get(t.Context(), "old", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("a deleted claim that is older than the policy: %v, want that it is gone", err)
	}
	err := u.tryApply(t, u.namespace, `
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: mps}
spec:
  spec:
    devices:
      requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]
      config:
        - opaque:
            driver: gpu.nvidia.com
            parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: TimeSlicing}}
`)
	if err == nil || !strings.Contains(err.Error(), reason) {
		t.Errorf("the error of a template with time slices is %v, want %q", err, reason)
	}
	u.claim("plain", oneGPU)
	u.claim("other", strings.ReplaceAll(oneGPU+config, "driver: gpu.nvidia.com", "driver: other.example.com"))
	if _, err := w.Kubectl(t.Context(), "label", "namespace", u.namespace, "gpu.nvidia.com/sharing=allowed"); err != nil {
		t.Fatal(err)
	}
	u.claim("mps", oneGPU+config)
}

// patch merges JSON into a claim.
func (u tenant) patch(claim, json string) {
	u.t.Helper()
	if _, err := u.Client.ResourceV1().ResourceClaims(u.namespace).Patch(u.t.Context(), claim, types.MergePatchType,
		[]byte(json), metav1.PatchOptions{}); err != nil {
		u.t.Errorf("patch claim %s with %s: %v", claim, json, err)
	}
}

func (w *world) testAdminAccessLabel(t *testing.T) {
	u := w.tenant(t)
	admin := ofClass("gpu.nvidia.com", ", adminAccess: true")
	u.refusedClaim(admin, "resource.kubernetes.io/admin-access")
	if _, err := w.Kubectl(t.Context(), "label", "namespace", u.namespace, "resource.kubernetes.io/admin-access=true"); err != nil {
		t.Fatal(err)
	}
	u.claim("admin", admin)
}

package e2e

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/configcorpus"
)

const misspelt = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharin":{}}`

// testEarlyRefusals checks that the API server refuses the configurations that the plugin would
// refuse, and no others. It leaves the policy switched off for the tests of the plugin's refusals.
func (w *world) testEarlyRefusals(t *testing.T) {
	ns := w.namespace(t)
	w.policyAnswers(t, ns, true)

	var refused atomic.Int32
	var group errgroup.Group
	group.SetLimit(8)
	corpus := configcorpus.Generate(uint64(time.Now().UnixNano()), 2000)
	for _, raw := range corpus {
		group.Go(func() error {
			config, want := v1beta1.Decode([]byte(raw))
			if want == nil {
				config.Default()
				want = config.Validate()
			}
			got := w.tryClaim(t, ns, "gpu.nvidia.com", raw)
			if (got == nil) != (want == nil) {
				t.Errorf("%s:\nthe API server says %v, the plugin %v", raw, got, want)
			}
			if got != nil {
				refused.Add(1)
			}
			return nil
		})
	}
	_ = group.Wait() // no function returns an error
	t.Logf("the API server refuses %d of %d configurations", refused.Load(), len(corpus))
	if n := int(refused.Load()); n < len(corpus)/4 || n > len(corpus)*3/4 {
		t.Errorf("the API server refuses %d of %d configurations, want about half", n, len(corpus))
	}

	if err := w.tryClaim(t, ns, "tpu.example.com", misspelt); err != nil {
		t.Errorf("a claim of another driver: %v", err)
	}
	const sentence = `GpuConfig: unknown field "sharin": remove it, or correct its spelling`
	for kind, yaml := range map[string]string{
		"ResourceClaim":         claimYAML("bad", misspelt),
		"ResourceClaimTemplate": manifest("ResourceClaimTemplate", "{spec: {devices: "+devicesWith(misspelt)+"}}"),
		"DeviceClass":           manifest("DeviceClass", "{config: [{opaque: {driver: gpu.nvidia.com, parameters: "+misspelt+"}}]}"),
	} {
		if err := w.tryApply(t, ns, yaml); err == nil || !strings.Contains(err.Error(), sentence) {
			t.Errorf("kubectl apply of a %s says %v, want %s", kind, err, sentence)
		}
	}

	binding := w.withoutParameterPolicy(t, ns)
	w.apply(t, ns, claimYAML("old", misspelt))
	binding.ResourceVersion, binding.UID = "", ""
	bindings := w.Client.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings()
	if _, err := bindings.Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	w.policyAnswers(t, ns, true)
	claims := w.Client.ResourceV1().ResourceClaims(ns)
	patch := []byte(`{"metadata":{"finalizers":[]}}`)
	if _, err := claims.Patch(t.Context(), "old", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Errorf("update an old bad claim: %v", err)
	}
	if err := claims.Delete(t.Context(), "old", metav1.DeleteOptions{}); err != nil {
		t.Errorf("delete an old bad claim: %v", err)
	}
	w.withoutParameterPolicy(t, ns)
}

func manifest(kind, spec string) string {
	return "apiVersion: resource.k8s.io/v1\nkind: " + kind + "\nmetadata: {name: bad}\nspec: " + spec
}

func devicesWith(parameters string) string {
	return "{requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}], config: [{opaque: {driver: gpu.nvidia.com, parameters: " +
		parameters + "}}]}"
}

// tryClaim asks the API server whether it would create a claim with these opaque parameters.
func (w *world) tryClaim(t *testing.T, namespace, driver, parameters string) error {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{GenerateName: "try-"}}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{
		{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com"}}}
	claim.Spec.Devices.Config = []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{
		Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(parameters)}}}}}
	dry := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	_, err := w.Client.ResourceV1().ResourceClaims(namespace).Create(t.Context(), claim, dry)
	return err
}

// policyAnswers waits until the API server refuses a bad configuration, or admits it.
func (w *world) policyAnswers(t *testing.T, namespace string, refuses bool) {
	t.Helper()
	eventually(t, 30*time.Second, "the API server knows the policy", func() (bool, string) {
		err := w.tryClaim(t, namespace, "gpu.nvidia.com", misspelt)
		return (err != nil) == refuses, "the API server says: " + errorText(err)
	})
}

func errorText(err error) string {
	if err == nil {
		return "admitted"
	}
	return err.Error()
}

// withoutParameterPolicy removes the binding of the policy over opaque parameters, and returns it.
func (w *world) withoutParameterPolicy(t *testing.T, namespace string) *admissionregistrationv1.ValidatingAdmissionPolicyBinding {
	t.Helper()
	bindings := w.Client.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings()
	all, err := bindings.List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range all.Items {
		if strings.HasSuffix(b.Name, "-parameters") {
			if err := bindings.Delete(t.Context(), b.Name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			w.policyAnswers(t, namespace, false)
			return &b
		}
	}
	t.Fatal("no binding has a name that ends with -parameters")
	return nil
}

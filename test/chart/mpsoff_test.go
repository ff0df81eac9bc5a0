package chart

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// Removing the supervisor's DaemonSet ends all MPS daemons, and with them the work of their
// clients. Earlier versions of the chart enabled MPS by default, so an upgrade with default values
// would do that. The chart must refuse it while claims use MPS.
func TestRefusesToDisableMPSUnderClients(t *testing.T) {
	const config = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"STRATEGY"}}`
	claim := func(driver, strategy string, change func(*resourceapi.ResourceClaimStatus)) resourceapi.ResourceClaim {
		status := resourceapi.ResourceClaimStatus{
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "training", UID: "1"}},
			Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
				Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: driver, Pool: "node", Device: "gpu-0000-1b-00-0"}},
			}},
		}
		if strategy != "" {
			status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{
				Opaque: &resourceapi.OpaqueDeviceConfiguration{
					Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(strings.Replace(config, "STRATEGY", strategy, 1))},
				},
			}}}
		}
		if change != nil {
			change(&status)
		}
		return resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "claim"}, Status: status}
	}
	consumes := func(capacity resourceapi.QualifiedName) func(*resourceapi.ResourceClaimStatus) {
		return func(s *resourceapi.ResourceClaimStatus) {
			s.Allocation.Devices.Results[0].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{capacity: resource.MustParse("1")}
		}
	}
	const driver = "gpu.nvidia.com"
	mps := claim(driver, "MPS", nil)
	for name, c := range map[string]struct {
		claim   resourceapi.ResourceClaim
		args    []string
		gone    bool // the DaemonSet does not exist
		refused bool
	}{
		"a claim with MPS": {claim: mps, refused: true},
		"a fraction":       {claim: claim(driver, "", consumes("memory")), refused: true},
		"a fraction, and plain shares instead": {
			claim: claim(driver, "", consumes("memory")), args: []string{"--set-json", twoShares}, refused: true,
		},
		"MPS stays on":                  {claim: mps, args: withMPS},
		"fractions are offered":         {claim: mps, args: []string{"--set-json", inFractions}},
		"MPS was off":                   {claim: mps, gone: true},
		"time-slicing":                  {claim: claim(driver, "TimeSlicing", nil)},
		"a whole GPU":                   {claim: claim(driver, "", nil)},
		"a plain share":                 {claim: claim(driver, "", consumes("shares"))},
		"another driver's":              {claim: claim("other.example.com", "MPS", consumes("memory"))},
		"a claim that no Pod uses":      {claim: claim(driver, "MPS", func(s *resourceapi.ResourceClaimStatus) { s.ReservedFor = nil })},
		"a claim that is not allocated": {claim: claim(driver, "", func(s *resourceapi.ResourceClaimStatus) { s.Allocation = nil })},
	} {
		t.Run(name, func(t *testing.T) {
			objects := map[string]any{"/apis/resource.k8s.io/v1/resourceclaims": resourceapi.ResourceClaimList{
				TypeMeta: metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaimList"}, Items: []resourceapi.ResourceClaim{c.claim},
			}}
			if !c.gone {
				objects["/apis/apps/v1/namespaces/"+namespace+"/daemonsets/"+supervisor] = appsv1.DaemonSet{
					TypeMeta: metav1.TypeMeta{APIVersion: "apps/v1", Kind: "DaemonSet"}, ObjectMeta: metav1.ObjectMeta{Namespace: namespace,
						Name: supervisor},
				}
			}
			_, err := template(t, append(clusterWith(t, objects), c.args...)...)
			switch {
			// The fake API server has no OpenAPI, so helm always fails after it has rendered the templates.
			case !c.refused && (err == nil || !strings.Contains(err.Error(), "from release manifest")):
				t.Error(err)
			case c.refused && (err == nil || !strings.Contains(err.Error(), "team/claim") || !strings.Contains(err.Error(), "mps.enabled=true")):
				t.Errorf("%v, want an error that names the claim and the way out", err)
			}
		})
	}
}

package driver

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

// refusePredecessorClaim returns an error if the claim was prepared by NVIDIA's DRA driver. Such a
// claim already has devices, under names that this driver does not know. If that driver's claims
// cannot be read, every GPU is withheld, and a Prepare fails with the reason.
func refusePredecessorClaim(v *nodeview.View, uid types.UID, name string) error {
	for _, c := range v.ReferenceClaims {
		if c.UID == uid {
			return cause.Refusal(name, cause.Claim,
				"NVIDIA's DRA driver prepared it on this node as %s: its Pods keep running but cannot restart here: delete them",
				strings.Join(c.DeviceNames(), ", "))
		}
	}
	return nil
}

// reportWithheldGPUs writes an Event about the GPUs that claims of NVIDIA's DRA driver still use,
// if they changed since the last Event.
func (h *hostWatch) reportWithheldGPUs(v *nodeview.View) {
	var lines []string
	if v.ReferenceErr != "" {
		lines = []string{v.ReferenceErr}
	}
	for _, c := range v.ReferenceClaims {
		lines = append(lines, fmt.Sprintf("%s holds %s", c, strings.Join(c.DeviceNames(), ", ")))
	}
	now := strings.Join(lines, "; ")
	h.events.WarnOnChange("GPUsWithheld", now,
		"Not offering the GPUs of claims that NVIDIA's DRA driver prepared, until these claims end: "+now)
	h.metrics.ReferenceDriver(len(v.ReferenceClaims), v.ReferenceErr != "")
}

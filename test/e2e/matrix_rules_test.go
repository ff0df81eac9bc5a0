package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// testOtherRules changes the sharing rules while claims hold shares. Their Pods must continue and
// still keep other claims from the whole GPU. No claim may get a new share until the old rules are
// restored.
func (w *world) testOtherRules(u tenant, same func(*testing.T)) {
	t := u.t
	w.install(t, "--reuse-values", "--set-json", sharesValue(plainShares(fractioned, "", 4), fractions(timeSliced, "")))
	// held collects the share devices of all allocated claims, also of claims that the driver refused,
	// because the scheduler has allocated their shares.
	claims, err := w.Client.ResourceV1().ResourceClaims(u.namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var held []string
	for _, c := range claims.Items {
		if c.Status.Allocation == nil {
			continue
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			if strings.HasSuffix(r.Device, "-share") && !slices.Contains(held, r.Device) {
				held = append(held, r.Device)
			}
		}
	}
	slices.Sort(held)
	eventually(t, 30*time.Second, "only the shares that claims hold are published, with no capacity left", func() (bool, string) {
		var shares []string
		for name, d := range w.devices(t, h100) {
			if !strings.HasSuffix(name, "-share") {
				continue
			}
			memory, plain := d.Capacity["memory"], d.Capacity["shares"]
			if len(d.Capacity) != 1 || memory.Value.Value() > 1<<30 || plain.Value.Value() > 1 {
				return false, fmt.Sprintf("%s has %v", name, d.Capacity)
			}
			shares = append(shares, name)
		}
		slices.Sort(shares)
		return slices.Equal(shares, held), fmt.Sprintf("there are %q, want %q", shares, held)
	})
	eventually(t, 20*time.Second, "an Event reports the shares that end", func() (bool, string) {
		events := w.events(t, "default", h100)
		return strings.Contains(events, "SharesEnding: ") && strings.Contains(events, held[0]), events
	})
	w.schedulerKnowsSlices(t)
	u.template("alone", shared("gpu.nvidia.com", fractioned, "", ""))
	u.template("alone-of-sliced", shared("gpu.nvidia.com", timeSliced, "", ""))
	whole := u.newcomers("wants", []string{"alone", "alone-of-sliced"})
	joining := u.newcomers("joins", []string{"fraction-alone", "sliced-alone"})
	for _, pod := range slices.Concat(whole, joining) {
		u.waits(pod)
	}
	same(t)
	w.install(t, "--reuse-values", "--set-json", sharesValue(matrixRules...))
	u.running(joining...)
	for _, pod := range whole {
		if p := u.get(pod); p.Spec.NodeName != "" {
			t.Errorf("Pod %s was allocated a whole GPU although claims hold shares of it", pod)
		}
	}
	w.deletePods(t, u.namespace, slices.Concat(whole, joining)...)
	same(t)
}

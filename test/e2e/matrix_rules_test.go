package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// escaped makes rules one value for helm.
func escaped(rules string) string { return strings.ReplaceAll(rules, ",", `\,`) }

// testOtherRules: rules that change while shares are held. Who holds one goes on, and goes on keeping others away; nobody joins until the rules are as before.
func (w *world) testOtherRules(u tenant, same func(*testing.T)) {
	t := u.t
	w.install(t, "--reuse-values", "--set", "shares="+escaped(fractioned+"=shares:4,"+inTurns+"=fractions"))
	// A Pod that is refused holds its share too: the scheduler has given it out.
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
	eventually(t, 30*time.Second, "of shares there are those that are held, with nothing left", func() (bool, string) {
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
	eventually(t, 20*time.Second, "an Event says so", func() (bool, string) {
		events := w.events(t, "default", h100)
		return strings.Contains(events, "SharesEnding: ") && strings.Contains(events, held[0]), events
	})
	u.template("alone", shared("gpu.nvidia.com", fractioned, "", ""))
	u.template("alone-of-turns", shared("gpu.nvidia.com", inTurns, "", ""))
	whole := u.newcomers("wants", []string{"alone", "alone-of-turns"})
	joining := u.newcomers("joins", []string{"fraction-alone", "turn-alone"})
	for _, pod := range slices.Concat(whole, joining) {
		u.waits(pod)
	}
	same(t)
	w.install(t, "--reuse-values", "--set", "shares="+escaped(matrixRules))
	u.running(joining...)
	for _, pod := range whole {
		if p := u.get(pod); p.Spec.NodeName != "" {
			t.Errorf("Pod %s was given a GPU of which shares are held", pod)
		}
	}
	w.deletePods(t, u.namespace, slices.Concat(whole, joining)...)
	same(t)
}

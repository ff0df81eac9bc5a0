package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
)

// laidOut has, for each GPU of the node of static-mig.yaml, the devices that the node must offer,
// written as the function shapes writes them. A GPU instance without a compute instance is not
// offered.
var laidOut = map[string]string{"1b-00-0": "14-4 9-0-ci-0 9-0-ci-1", "43-00-0": "+25 whole", "9b-00-0": "5-0", "b1-00-0": "whole"}

// unchanged fails the test if the admin's MIG layout is no longer the one in the parameter before.
// The parameter after says in the error what happened since then.
func (w *world) unchanged(t *testing.T, before, after string) {
	t.Helper()
	if now := w.layout(t, nodeLaidOut); now != before {
		t.Fatalf("the admin's layout was\n%s\nand %s it is\n%s", before, after, now)
	}
}

// testLaidOutBefore expects that MIG devices that an admin created before the installation are
// offered, used and left unchanged.
func (w *world) testLaidOutBefore(t *testing.T, before string) {
	w.offersAs(t, nodeLaidOut, laidOut)
	w.saysLimited(t, nodeLaidOut, instancesOfAdmin, 2)
	w.unchanged(t, before, "after the installation")
	u := w.tenant(t)
	u.template(
		"admins",
		`requests: [{name: mig, exactly: {deviceClassName: mig.nvidia.com, count: 4, selectors: [{cel: {expression: `+
			`'device.attributes["gpu.nvidia.com"].uuid != "not-cut"'}}]}}]`,
	)
	u.pod("user", onNode(nodeLaidOut), fromTemplate("mig", "admins"))
	u.running("user")
	given := u.seesPartitions("user", "mig")
	for _, uuid := range given {
		if !strings.Contains(before, uuid) {
			t.Errorf("%s is not a MIG device of the admin:\n%s", uuid, before)
		}
	}
	if len(given) != 4 {
		t.Errorf("the Pod was allocated %v, want the admin's 4 devices", given)
	}
	w.restartPlugin(t, nodeLaidOut)
	w.offersAs(t, nodeLaidOut, laidOut)
	w.unchanged(t, before, "after a restart of the plugin under a claim")
	if now := u.seesPartitions("user", "mig"); !slices.Equal(now, given) {
		t.Errorf("the Pod had the MIG devices %v and has %v", given, now)
	}
	w.endPods(t, u.namespace)
	w.clean(t, nodeLaidOut)
	w.unchanged(t, before, "after a claim")
}

// testAnnotation changes the MIG policy of two GPUs by a Node annotation: one without MIG
// instances, and one that an admin partitioned.
func (w *world) testAnnotation(t *testing.T) {
	offers := func(policy, h100, cut string) {
		t.Helper()
		want := maps.Clone(laidOut)
		want["43-00-0"], want["1b-00-0"] = h100, cut
		maps.DeleteFunc(want, func(_, shape string) bool { return shape == "" })
		w.annotate(t, nodeLaidOut, policy)
		w.offersAs(t, nodeLaidOut, want)
	}
	asCut := laidOut["1b-00-0"]
	offers("rules: [{gpus: '0000:43:00.0', policy: off}, {gpus: '0000:1b:00.0', policy: off}]", "whole", "")
	w.asPromised(t, nodeLaidOut, 1)
	w.saysLimited(
		t,
		nodeLaidOut,
		"MIG instances exist that no claim created, and the policy offers whole GPUs only: remove them with nvidia-smi mig",
		1,
	)
	offers("rules: [{gpus: NVIDIA H100*, policy: static}]", "whole", asCut)
	w.asPromised(t, nodeLaidOut, 2)
	w.annotate(t, nodeLaidOut, "rules: [{gpus: '0000:43:00.0', policy: carve}]")
	eventually(t, 30*time.Second, "an Event reports the annotation that cannot be read", func() (bool, string) {
		events := w.events(t, "default", nodeLaidOut)
		return strings.Contains(events, "PolicyIgnored: ") && strings.Contains(events, `rules[0].policy: Invalid value: "carve"`), events
	})
	w.offersAs(t, nodeLaidOut, map[string]string{"1b-00-0": asCut, "43-00-0": "whole", "9b-00-0": laidOut["9b-00-0"], "b1-00-0": "whole"})
	offers("", "+25 whole", asCut)
}

// testLayoutOutlives expects that an admin's MIG layout survives an upgrade of the chart and its
// removal.
func (w *world) testLayoutOutlives(t *testing.T, before string) {
	w.install(t, "--set", "logVerbosity=5")
	w.offersAs(t, nodeLaidOut, laidOut)
	w.unchanged(t, before, "after an upgrade")
	if out, err := w.uninstall(t); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	w.unchanged(t, before, "after the uninstallation")
	w.install(t)
	w.offersAs(t, nodeLaidOut, laidOut)
}

// testHandOver lets the driver take over an admin's MIG instances by the policy adopt. It must
// remove idle ones at once, and one in use when its claim ends.
func (w *world) testHandOver(t *testing.T) {
	u := w.tenant(t)
	u.template("admins", device("mig.nvidia.com", "0000:1b:00.0", "2g.20gb"))
	u.pod("user", onNode(nodeLaidOut), fromTemplate("gpu", "admins"))
	u.running("user")
	given := u.seesPartitions("user", "gpu")
	w.annotate(t, nodeLaidOut, "rules: [{gpus: '0000:1b:00.0', policy: adopt}]")
	want := maps.Clone(laidOut)
	want["1b-00-0"] = "14-4"
	w.offersAs(t, nodeLaidOut, want)
	if got, want := w.cut(t, nodeLaidOut), []string{"gpu-0000-1b-00-0-mig-14-4", "gpu-0000-9b-00-0-mig-5-0"}; !slices.Equal(got, want) {
		t.Errorf("the node has the GPU instances %v, want %v", got, want)
	}
	if now := u.seesPartitions("user", "gpu"); !slices.Equal(now, given) {
		t.Errorf("the Pod had the MIG devices %v and has %v", given, now)
	}
	w.endPods(t, u.namespace)
	eventually(t, 15*time.Second, "the GPU instance of the ended claim is removed", func() (bool, string) {
		got := w.cut(t, nodeLaidOut)
		return slices.Equal(got, []string{"gpu-0000-9b-00-0-mig-5-0"}), fmt.Sprint(got)
	})
	want["1b-00-0"] = "+25 whole"
	w.offersAs(t, nodeLaidOut, want)
	u.pod("next", onNode(nodeLaidOut), fromTemplate("gpu", "admins"))
	u.running("next")
	u.seesPartitions("next", "gpu")
	w.endPods(t, u.namespace)
	w.clean(t, nodeLaidOut)
	if got, want := w.cut(t, nodeLaidOut), []string{"gpu-0000-9b-00-0-mig-5-0"}; !slices.Equal(got, want) {
		t.Errorf("the node has the GPU instances %v, want %v", got, want)
	}
}

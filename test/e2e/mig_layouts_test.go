package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
)

// laidOut is how the GPUs of static-mig are offered. A GPU instance without a compute instance cannot be used.
var laidOut = map[string]string{"1b-00-0": "14-4 9-0-ci-0 9-0-ci-1", "43-00-0": "+25 whole", "9b-00-0": "5-0", "b1-00-0": "whole"}

// unchanged makes sure that nothing of what an admin cut is another than before.
func (w *world) unchanged(t *testing.T, before, after string) {
	t.Helper()
	if now := w.layout(t, nodeLaidOut); now != before {
		t.Fatalf("the admin's layout was\n%s\nand %s it is\n%s", before, after, now)
	}
}

// testLaidOutBefore: an admin's devices are offered, used and left as they are.
func (w *world) testLaidOutBefore(t *testing.T, before string) {
	w.offersAs(t, nodeLaidOut, laidOut)
	w.saysLimited(t, nodeLaidOut, instancesOfAdmin, 2)
	w.unchanged(t, before, "after the installation")
	u := w.tenant(t)
	u.template("admins", `requests: [{name: mig, exactly: {deviceClassName: mig.nvidia.com, count: 4, selectors: [{cel: {expression: 'device.attributes["gpu.nvidia.com"].uuid != "not-cut"'}}]}}]`)
	u.pod("user", onNode(nodeLaidOut), fromTemplate("mig", "admins"))
	u.running("user")
	given := u.seesPartitions("user", "mig")
	for _, uuid := range given {
		if !strings.Contains(before, uuid) {
			t.Errorf("%s is none of the admin's:\n%s", uuid, before)
		}
	}
	if len(given) != 4 {
		t.Errorf("the Pod was given %v, want the admin's 4 devices", given)
	}
	w.restartPlugin(t, nodeLaidOut)
	w.offersAs(t, nodeLaidOut, laidOut)
	w.unchanged(t, before, "after a restart of the plugin under a claim")
	if now := u.seesPartitions("user", "mig"); !slices.Equal(now, given) {
		t.Errorf("the Pod had %v and has %v", given, now)
	}
	w.endPods(t, u.namespace)
	w.clean(t, nodeLaidOut)
	w.unchanged(t, before, "after a claim")
}

// testAnnotation changes what may be done about the one GPU that nobody has cut, and about one that an admin has.
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
	offers("0000:43:00.0=off,0000:1b:00.0=off", "whole", "")
	w.asPromised(t, nodeLaidOut, 1)
	w.saysLimited(t, nodeLaidOut, "MIG instances are there that no claim has made, and the policy is to offer the GPU as a whole only: remove them with nvidia-smi mig", 1)
	offers("NVIDIA H100*=static", "whole", asCut)
	w.asPromised(t, nodeLaidOut, 2)
	w.annotate(t, nodeLaidOut, "0000:43:00.0=carve")
	eventually(t, 30*time.Second, "an Event tells of an annotation that cannot be read", func() (bool, string) {
		events := w.events(t, "default", nodeLaidOut)
		return strings.Contains(events, "PolicyIgnored: ") && strings.Contains(events, `"0000:43:00.0=carve"`), events
	})
	w.offersAs(t, nodeLaidOut, map[string]string{"1b-00-0": asCut, "43-00-0": "whole", "9b-00-0": laidOut["9b-00-0"], "b1-00-0": "whole"})
	offers("", "+25 whole", asCut)
}

// testLayoutOutlives upgrades the chart and removes it.
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

// testHandOver gives idle instances to the driver; one that a claim uses stays until then.
func (w *world) testHandOver(t *testing.T) {
	u := w.tenant(t)
	u.template("admins", device("mig.nvidia.com", "0000:1b:00.0", "2g.20gb"))
	u.pod("user", onNode(nodeLaidOut), fromTemplate("gpu", "admins"))
	u.running("user")
	given := u.seesPartitions("user", "gpu")
	w.annotate(t, nodeLaidOut, "0000:1b:00.0=adopt")
	want := maps.Clone(laidOut)
	want["1b-00-0"] = "14-4"
	w.offersAs(t, nodeLaidOut, want)
	if got, want := w.cut(t, nodeLaidOut), []string{"gpu-0000-1b-00-0-mig-14-4", "gpu-0000-9b-00-0-mig-5-0"}; !slices.Equal(got, want) {
		t.Errorf("the node is cut into %v, want %v", got, want)
	}
	if now := u.seesPartitions("user", "gpu"); !slices.Equal(now, given) {
		t.Errorf("the Pod had %v and has %v", given, now)
	}
	w.endPods(t, u.namespace)
	eventually(t, 15*time.Second, "the instance is removed that a claim used until now", func() (bool, string) {
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
		t.Errorf("the node is cut into %v, want %v", got, want)
	}
}

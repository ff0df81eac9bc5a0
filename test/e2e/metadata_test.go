package e2e

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// addMetadataReader builds test/metadatareader into the directory of the probe programs.
func addMetadataReader(t *testing.T, root, dir string) {
	t.Helper()
	build := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, "metadatareader"), "./test/metadatareader")
	build.Dir, build.Env = root, append(build.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the reader of metadata: %v\n%s", err, out)
	}
}

// testMetadata reads the metadata files in containers, of a claim and of a claim from a template. A
// container that does not use the claim must not see them. That nothing is left at the end is
// checked for all subtests.
func (w *world) testMetadata(t *testing.T) {
	u := w.tenant(t)
	u.template("one", oneGPU)
	u.claim("pair", `requests: [{name: gpus, exactly: {deviceClassName: gpu.nvidia.com, count: 2}}]`)
	u.pod("made", onNode(h100), fromTemplate("gpu", "one"), container("main", "gpu"), container("side"), hostPath("probe", probeDir))
	u.pod("named", onNode(h100), fromClaim("mine", "pair"), container("main", "mine"), hostPath("probe", probeDir))
	u.running("made", "named")
	for _, tc := range []struct{ pod, entry, kind, name, request string }{
		{"made", "gpu", "template", "gpu", "gpu"},
		{"named", "mine", "claim", "pair", "gpus"},
	} {
		var lines []string
		for _, r := range w.claimOf(t, u.namespace, tc.pod, tc.entry).Status.Allocation.Devices.Results {
			a := w.devices(t, r.Pool)[r.Device].Attributes
			lines = append(lines, fmt.Sprintln(r.Device, *a["uuid"].StringValue, *a["resource.kubernetes.io/pciBusID"].StringValue))
		}
		want := strings.Join(lines, "") + "v1alpha1\n" + strings.Join(lines, "")
		if got := w.mustExec(t, u.namespace, tc.pod, "main", probeDir+"/metadatareader", tc.kind, tc.name, tc.request); got != want {
			t.Errorf("Pod %s reads\n%s, want\n%s", tc.pod, got, want)
		}
	}
	if out, err := u.exec(t, u.namespace, "made", "side", "ls", "/var/run/kubernetes.io/dra-device-attributes"); err == nil {
		t.Errorf("a container without the claim sees %s", out)
	}
}

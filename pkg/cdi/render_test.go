package cdi

import (
	"os"
	"path/filepath"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"
)

func TestRenderMatchesWrittenSpecs(t *testing.T) {
	const uid = types.UID("0b4c")
	common := specs.ContainerEdits{Env: []string{"A=b"}, DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidiactl"}}}
	devices := []specs.Device{{
		Name: ClaimDeviceName(uid, "gpu-0", nil),
		ContainerEdits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{
			{Path: "/dev/nvidia0", HostPath: "/run/nvidia/driver/dev/nvidia0"},
		}},
	}}
	root := t.TempDir()
	store := NewStore(root)
	if err := store.WriteBase(common); err != nil {
		t.Fatal(err)
	}
	if err := store.WriteClaim(uid, devices); err != nil {
		t.Fatal(err)
	}
	base, claim, err := Render(common, devices)
	if err != nil {
		t.Fatal(err)
	}
	for name, rendered := range map[string][]byte{baseFile: base, claimPrefix + string(uid) + suffix: claim} {
		if written, err := os.ReadFile(filepath.Join(root, name)); err != nil || string(written) != string(rendered) {
			t.Errorf("%s was written as %s (%v), but rendered as %s", name, written, err, rendered)
		}
	}
}

func TestRenderRejectsInvalidSpec(t *testing.T) {
	for name, devices := range map[string][]specs.Device{
		"no device":     nil,
		"an empty edit": {{Name: "x"}},
	} {
		if _, _, err := Render(specs.ContainerEdits{}, devices); err == nil {
			t.Errorf("a claim with %s was rendered", name)
		}
	}
}

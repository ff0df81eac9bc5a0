package preview

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// A model that is written and read makes the same node again, apart from UUIDs and device numbers.
func TestModelSurvivesItsFile(t *testing.T) {
	node := nodeWith("0000:1b:00.0", "0000:43:00.0")
	node.GPUs[1].MIG = &device.MIG{Enabled: true, Pending: true, Instances: []device.Instance{{
		ID: 3, ProfileID: 19, Minor: 12, Compute: []device.ComputeInstance{{Name: "1g.10gb", UUID: "MIG-1", Minor: 13}},
	}}}
	var text strings.Builder
	if err := ModelOf(node).Write(&text); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(text.String(), "MIG-1") || strings.Contains(text.String(), node.GPUs[0].UUID) {
		t.Errorf("the model has UUIDs:\n%s", text.String())
	}
	m, err := ReadModel([]byte(text.String()))
	if err != nil {
		t.Fatal(err)
	}
	if node.GPUs[1].MIG.Instances[0].Compute[0].UUID != "MIG-1" {
		t.Error("the scan was changed")
	}
	again := m.Node()
	if got := again.GPUs[1].MIG.Instances[0].Compute[0].UUID; !strings.HasPrefix(got, "MIG-0") {
		t.Errorf("MIG device %s", got)
	}
	for i := range node.GPUs {
		node.GPUs[i].UUID = again.GPUs[i].UUID
	}
	node.GPUs[1].MIG.Instances[0].Minor = 0
	node.GPUs[1].MIG.Instances[0].Compute[0] = again.GPUs[1].MIG.Instances[0].Compute[0]
	if d := cmp.Diff(node, again); d != "" {
		t.Error(d)
	}
}

func TestReadModelRefusesWhatIsNone(t *testing.T) {
	for text, want := range map[string]string{
		"driver: {}":                         "it has no gpus",
		"cards: []":                          "unknown field",
		"gpus: [{pciAddress: 0000:1b:00.0}]": "gpus[0] has no productName",
		"gpus: [{productName: a, pciAddress: '1b'}]":                                                         "is not of the form",
		"gpus: [{productName: a, pciAddress: '0000:1b:00.0'}, {productName: a, pciAddress: '0000:1b:00.0'}]": "two GPUs have",
		"- a": "cannot unmarshal",
	} {
		if _, err := ReadModel([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

package driver

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
)

const twoPools = `
configurations:
  training:
    mig: {policy: dynamic}
    health: {effects: {unhealthy: NoExecute}}
  notebooks:
    shares: [{kind: shares, count: 4}]
    xidRules: {"79": app}
`

// A label moves a node between two pools with other partitions, shares, taint effects and meanings
// of XIDs. A wrong label changes nothing. The GPU of a prepared claim stays published as it is.
func TestLabelMovesNodeBetweenPools(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	n.setHardware("two cuttable GPUs", func() (nvidia.Node, error) {
		all, err := twoGPUs()
		for i := range all.GPUs {
			all.GPUs[i].ProductName, all.GPUs[i].MIG = "NVIDIA H100", snapshotOfHalves().Node.GPUs[0].MIG
		}
		return all, err
	})
	n.cfg.SettingsFile = filepath.Join(t.TempDir(), "settings.yaml")
	if err := os.WriteFile(n.cfg.SettingsFile, []byte(twoPools), 0o600); err != nil {
		t.Fatal(err)
	}
	var err error
	if n.cfg.Settings, err = settings.ReadFile(n.cfg.SettingsFile); err != nil {
		t.Fatal(err)
	}
	n.run(t)
	n.register(t)
	held := n.claim(t, "held", secondGPU)
	eventually(t, "the claim is prepared", func() bool { return n.prepare(t, held).GetError() == "" })
	n.xid("0000:1b:00.0", 79)

	halves := []string{firstGPU, firstGPU + "-mig-9-0", firstGPU + "-mig-9-1"}
	shared := []string{firstGPU, firstGPU + "-share"}
	for _, c := range []struct {
		label   string
		devices []string // of the first GPU
		effect  string   // of their taints, or empty
	}{
		{"", []string{firstGPU}, "NoSchedule"},
		{"training", halves, "NoExecute"},
		{"notebooks", shared, ""},
		{"notebook", shared, ""},
		{"training", halves, "NoExecute"},
		{"default", []string{firstGPU}, "NoSchedule"},
	} {
		n.editNode(t, map[string]string{settings.Label: c.label}, nil)
		eventually(t, "the node is as label "+c.label+" says", func() bool {
			return slices.Equal(n.sortedDevices(t), append(c.devices, secondGPU)) && n.taintsAre(t, c.devices, c.effect)
		})
		if c.label == "notebook" {
			n.expectEvent(t, "Node", "node", "ConfigurationIgnored", `"notebook", which does not exist`)
			if offered := n.offeredShares(t, firstGPU+"-share"); offered != 4 {
				t.Errorf("%d shares are offered", offered)
			}
		}
	}
	if failed := n.unprepare(t, held); failed != "" {
		t.Error(failed)
	}
}

var effectOfTaint = regexp.MustCompile(`:(\w+)@`)

// taintsAre reports whether these devices have a taint with this effect and no others. An empty
// effect means that no device has a taint.
func (n *healthNode) taintsAre(t *testing.T, devices []string, effect string) bool {
	t.Helper()
	taints := n.taints(t)
	if effect == "" {
		return len(taints) == 0
	}
	for _, d := range devices {
		if found := effectOfTaint.FindAllStringSubmatch(taints[d], -1); len(found) != 1 || found[0][1] != effect {
			return false
		}
	}
	return len(taints) == len(devices)
}

package publish

import (
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/settingstest"
)

func TestShareRulesNeedClusterFeatures(t *testing.T) {
	rules, err := settingstest.Shares("[{kind: fractions}]")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		rules    device.ShareRules
		features Features
		offered  bool
		lacking  string
	}{
		"all features":                {rules, Features{PartitionedDevices: true, ConsumableCapacity: true}, true, ""},
		"no counters":                 {rules, Features{ConsumableCapacity: true}, false, "DRAPartitionableDevices"},
		"no consumable capacity":      {rules, Features{PartitionedDevices: true}, false, "DRAConsumableCapacity"},
		"all features, without rules": {device.ShareRules{}, Features{PartitionedDevices: true, ConsumableCapacity: true}, false, ""},
		"without rules":               {device.ShareRules{}, Features{}, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := &Publisher{}
			p.shares.Store(&c.rules)
			got, lacking := p.shareRules(c.features)
			if got.Any() != c.offered || !strings.Contains(lacking, c.lacking) || (lacking == "") != (c.lacking == "") {
				t.Errorf("offered: %v, lacking: %q", got.Any(), lacking)
			}
		})
	}
}

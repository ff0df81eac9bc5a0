package driver

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

func TestSlowSchedulerIsAnEvent(t *testing.T) {
	counted := []resourceslice.Slice{{SharedCounters: []resourceapi.CounterSet{{Name: "gpu"}}}, {Devices: []resourceapi.Device{{Name: "gpu"}}}}
	whole := counted[1:]
	for _, c := range []struct {
		server    string
		published []resourceslice.Slice
		slow      bool
	}{
		{"v1.36.3", counted, true},
		{"v1.35.0+k3s1", counted, true},
		{"v1.36.3", whole, false},
		{"v1.37.0", counted, false},
		{"v1.37.0-alpha.3", counted, false},
		{"v1.38.1-gke.100", counted, false},
		{"", counted, false},
		{"unheard of", counted, false},
	} {
		t.Run(c.server, func(t *testing.T) {
			var warnings []string
			slow := false
			s := &slowScheduler{
				warn:      func(reason, message string) { warnings = append(warnings, reason+": "+message) },
				setMetric: func(is bool) { slow = is },
			}
			for range 2 {
				s.SetSlices(c.published)
				s.SetVersion(c.server)
			}
			if slow != c.slow || (len(warnings) == 1) != c.slow || len(warnings) > 1 {
				t.Errorf("slow %v, warnings %q", slow, warnings)
			}
			for _, message := range warnings {
				if !strings.HasPrefix(message, "SlowScheduler: ") || !strings.Contains(message, c.server) || len(message) > 1024 {
					t.Error(message)
				}
			}
			s.SetVersion("v1.37.0")
			if slow {
				t.Error("slow after an upgrade")
			}
		})
	}
}

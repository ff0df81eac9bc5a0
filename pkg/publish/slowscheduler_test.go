package publish

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
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
			recorder := record.NewFakeRecorder(10)
			m := metrics.New("test")
			p := &Publisher{opts: Options{Events: events.NewFor(recorder, "node"), Metrics: m}}
			slow := func() bool { return gauge(t, m, "gpu_dra_slow_scheduler") > 0 }
			for range 2 {
				p.reportSlowScheduler(c.published) // before the version is known
				p.server.Store(&c.server)
				p.reportSlowScheduler(c.published)
			}
			if is := slow(); is != c.slow || (len(recorder.Events) == 1) != c.slow || len(recorder.Events) > 1 {
				t.Errorf("slow %v, %d warnings", is, len(recorder.Events))
			}
			for len(recorder.Events) > 0 {
				message := <-recorder.Events
				if !strings.HasPrefix(message, "Warning SlowScheduler ") || !strings.Contains(message, c.server) || len(message) > 1024 {
					t.Error(message)
				}
			}
			p.server.Store(ptr.To("v1.37.0"))
			p.reportSlowScheduler(c.published)
			if slow() {
				t.Error("slow after an upgrade")
			}
			p.server.Store(&c.server)
			p.reportSlowScheduler(whole)
			if slow() {
				t.Error("slow without counters")
			}
		})
	}
}

// gauge returns the value of the metric.
func gauge(t *testing.T, m *metrics.Metrics, name string) float64 {
	t.Helper()
	families, err := m.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return f.GetMetric()[0].GetGauge().GetValue()
		}
	}
	t.Fatalf("there is no metric %s", name)
	return 0
}

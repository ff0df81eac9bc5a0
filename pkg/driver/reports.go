package driver

import (
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

// reports tells admins about what the plugin does on its own. A metric of the transaction needs no
// method here: [prepare.Observer] and [metrics.Metrics] have the same name for it.
type reports struct {
	*events.Recorder
	*metrics.Metrics
}

// Repaired counts the repair in the metrics and writes an Event about it on the Node. A repair
// corrects something on the node that differed from the checkpoint records.
func (r reports) Repaired(repair prepare.Repair) {
	r.Metrics.Repaired(repair.Kind)
	r.Event(events.Repaired, repair.What+": "+repair.Object)
}

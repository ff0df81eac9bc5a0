package driver

import (
	"runtime"
	"runtime/metrics"
	"time"
)

const (
	// gcDelay is how long after the kubelet's last call the plugin collects garbage.
	gcDelay = 100 * time.Millisecond
	// releaseMemoryDelay is how long after the kubelet's last call the plugin returns memory to the
	// system. Go's runtime would keep the memory for the next calls, which may not come for hours.
	releaseMemoryDelay = 30 * time.Second
	// minGarbage is how many bytes of garbage there must be before the plugin collects it, because a
	// collection costs CPU time. A few kubelet calls leave that much.
	minGarbage = 2 << 20
)

// collectGarbage collects garbage while no kubelet call runs. Otherwise Go's runtime would collect
// it when the heap has doubled. That happens during calls, and slows them down on a node with few
// free CPUs.
func collectGarbage() {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	if there, used := sample[0].Value.Uint64(), sample[1].Value.Uint64(); there >= used+minGarbage {
		runtime.GC()
	}
}

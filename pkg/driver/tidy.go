package driver

import (
	"runtime"
	"runtime/metrics"
	"time"
)

const (
	// quietAfter is how long no call of the kubelet has been under way when garbage is collected.
	quietAfter = 100 * time.Millisecond
	// restingAfter is how long none has been when the memory that calls have needed is given back to the system. Go's runtime would keep what it needs for as much
	// again, which may not come for hours.
	restingAfter = 30 * time.Second
	// littleGarbage is not worth the work, in bytes: a few calls leave as much behind.
	littleGarbage = 2 << 20
)

// tidy collects garbage while the kubelet asks for nothing. Go's runtime would when as much has been allocated as is in use. That takes calls, and so it would
// always be in the middle of some that one of the node's few processors is busy with what could have waited.
func tidy() {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	if there, used := sample[0].Value.Uint64(), sample[1].Value.Uint64(); there >= used+littleGarbage {
		runtime.GC()
	}
}

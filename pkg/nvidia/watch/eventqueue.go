package watch

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
)

const (
	// queueLimit is how many signals may wait in the queue. While the queue is full, add blocks,
	// and further events wait in NVML.
	queueLimit = 1024
	// batchInterval is the pause after sending the waiting signals. So a burst of equal events
	// becomes one event with a count.
	batchInterval = 50 * time.Millisecond
)

// eventQueue sends signals in order of arrival, with a pause after each batch. Equal events of a
// batch are merged into one with a count. The queue never drops an event.
type eventQueue chan device.Signal

func newEventQueue() eventQueue { return make(eventQueue, queueLimit) }

// add puts s into the queue. While the queue is full, add blocks. If ctx ends first, s is dropped.
func (q eventQueue) add(ctx context.Context, s device.Signal) {
	select {
	case q <- s: // even if ctx has ended
	default:
		select {
		case q <- s:
		case <-ctx.Done():
		}
	}
}

// send writes the signals to out, as lines of JSON, until ctx ends. Then it writes those still in
// the queue and returns.
func (q eventQueue) send(ctx context.Context, out io.Writer) error {
	encoder := json.NewEncoder(out)
	for {
		var batch []device.Signal
		ended := false
		select {
		case s := <-q:
			batch = append(batch, s)
		case <-ctx.Done():
			ended = true
		}
		for range len(q) {
			batch = append(batch, <-q)
		}
		for _, s := range merge(batch) {
			if err := encoder.Encode(s); err != nil {
				return fmt.Errorf("send a signal: %w", err)
			}
		}
		if ended {
			return nil
		}
		nvmlx.Sleep(ctx, batchInterval)
	}
}

// merge merges each event of the batch into the first equal one, which then has the count of all
// and the time of the last.
func merge(batch []device.Signal) []device.Signal {
	var merged []device.Signal
	first := map[string]*device.HealthEvent{}
	for _, s := range batch {
		if s.Event != nil {
			key, count := keyOf(*s.Event), max(s.Event.Count, 1)
			if same := first[key]; same != nil {
				same.Count += count
				same.At = s.Event.At
				continue
			}
			s.Event.Count, first[key] = count, s.Event
		}
		merged = append(merged, s)
	}
	return merged
}

// keyOf identifies what an event says. Events with equal keys can be merged.
func keyOf(e device.HealthEvent) string {
	e.Count, e.At = 0, time.Time{}
	key, _ := json.Marshal(e) // fails for no event
	return string(key)
}

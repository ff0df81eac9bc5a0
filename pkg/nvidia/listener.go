package nvidia

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	// eventWait is how long NVML waits for an event before it says that there was none.
	eventWait = 5 * time.Second
	// eventGrace is how much later it may say so before the listener is taken for deaf.
	eventGrace = 10 * time.Second
	// A set of events that failed is made anew first after firstRebuild, then ever more seldom, at least every lastRebuild.
	firstRebuild = 100 * time.Millisecond
	lastRebuild  = 30 * time.Second
	// noInstance is what NVML says where an event is about the whole card.
	noInstance = 0xFFFFFFFF
)

// eventKinds are the events that say something about health.
var eventKinds = map[uint64]device.EventKind{
	nvml.EventTypeXidCriticalError: device.EventXID, nvml.EventTypeDoubleBitEccError: device.EventDoubleBitECC,
	nvml.EventTypeSingleBitEccErrorStorm: device.EventSingleBitStorm, nvml.EventTypeDramRetirementEvent: device.EventRetirement,
	nvml.EventTypeDramRetirementFailure: device.EventRetirementFailed, nvml.EventTypeNonFatalPoisonError: device.EventPoison,
	nvml.EventTypeFatalPoisonError: device.EventFatalPoison, nvml.EventTypeGpuUnavailableError: device.EventUnavailable,
	nvml.EventTypeGpuRecoveryAction: device.EventRecoveryAction,
}

// listener listens to the events of one card, with a set of its own: a set with a lost card in it reports nothing but that.
type listener struct {
	patient *patient // its own, not the one that the card is asked with
	heard   func(device.HealthEvent)
	wait    time.Duration
	// again cuts a pause short: the card may be well again. failed is told when the set fails: the card is to be asked at once.
	again  chan struct{}
	failed func()
	// changed is told when it may have changed whether anything is heard.
	changed func()

	mu      sync.Mutex
	trouble string    // why nothing is heard, empty while something would be
	alive   time.Time // when NVML last answered
}

var errNoEvents = errors.New("the GPU has no events")

// run listens until ctx ends. It may return later than that: NVML's wait cannot be cut short.
func (l *listener) run(ctx context.Context) {
	for pause := firstRebuild; ctx.Err() == nil; pause = min(2*pause, lastRebuild) {
		l.tries()
		set, handle, err := l.subscribe()
		if errors.Is(err, errNoEvents) {
			l.answered("")
			pause = lastRebuild // a change of its modes, or another card at the place, may change that
		} else if err != nil {
			l.answered(err.Error())
		} else {
			l.answered("")
			heard, err := l.listen(ctx, set, handle)
			_ = l.patient.lib.EventSetFree(set)
			if ctx.Err() != nil {
				return
			}
			l.answered(err.Error())
			l.failed()
			if heard {
				pause = firstRebuild
			}
		}
		select {
		case <-ctx.Done():
		case <-l.again:
			pause = firstRebuild
		case <-time.After(pause):
		}
	}
}

// tries notes that NVML is asked anew. Why nothing was heard until now stays said until there is an answer.
func (l *listener) tries() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.alive = time.Now()
}

// answered notes that NVML has answered, and why nothing is heard.
func (l *listener) answered(trouble string) {
	l.mu.Lock()
	turned := (l.trouble == "") != (trouble == "")
	l.trouble, l.alive = trouble, time.Now()
	l.mu.Unlock()
	if turned {
		l.changed()
	}
}

// deaf says why nothing is heard of the card, empty if something would be.
func (l *listener) deaf() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.trouble == "" && time.Since(l.alive) > lastRebuild+l.wait+eventGrace {
		return fmt.Sprintf("NVML has not answered for %s", time.Since(l.alive).Round(time.Second))
	}
	return l.trouble
}

// subscribe makes a set with the events that the card has.
func (l *listener) subscribe() (nvml.EventSet, nvml.Device, error) {
	handle, err := l.patient.open()
	if err != nil {
		return nil, nil, err
	}
	supported, ret := handle.GetSupportedEventTypes()
	if hasNoAnswer(ret) {
		return nil, nil, errNoEvents
	}
	if ret != nvml.SUCCESS {
		return nil, nil, fmt.Errorf("read its event types: %w", toError(ret))
	}
	var wanted uint64
	for kind := range eventKinds {
		wanted |= kind & supported
	}
	if wanted == 0 {
		return nil, nil, errNoEvents
	}
	set, ret := l.patient.lib.EventSetCreate()
	if ret != nvml.SUCCESS {
		return nil, nil, fmt.Errorf("make a set of events: %w", toError(ret))
	}
	if ret := handle.RegisterEvents(wanted, set); ret != nvml.SUCCESS {
		_ = l.patient.lib.EventSetFree(set)
		if ret == nvml.ERROR_NOT_SUPPORTED {
			return nil, nil, errNoEvents
		}
		return nil, nil, fmt.Errorf("register for its events: %w", toError(ret))
	}
	return set, handle, nil
}

// listen hands on events until the set fails or ctx ends. It says as well whether the set has worked at all.
func (l *listener) listen(ctx context.Context, set nvml.EventSet, handle nvml.Device) (worked bool, err error) {
	for ctx.Err() == nil {
		began := time.Now()
		data, ret := set.Wait(uint32(l.wait.Milliseconds())) //nolint:gosec // a few seconds
		l.answered("")
		switch ret {
		case nvml.SUCCESS:
			if kind, ok := eventKinds[data.EventType]; ok {
				l.heard(l.event(handle, kind, data))
			}
		case nvml.ERROR_TIMEOUT:
			if time.Since(began) < l.wait/2 { // it does not wait, so we do
				rest(ctx, l.wait/2)
			}
		default:
			return worked, fmt.Errorf("wait for its events: %w", toError(ret))
		}
		worked = true
	}
	return worked, ctx.Err()
}

// event names the instance by its IDs only. Opening the instance here would block its removal.
func (l *listener) event(handle nvml.Device, kind device.EventKind, data nvml.EventData) device.HealthEvent {
	e := device.HealthEvent{Card: l.patient.card, Kind: kind, At: time.Now()}
	switch kind {
	case device.EventXID:
		e.XID = data.EventData
	case device.EventRecoveryAction:
		e.Recovery, _ = l.patient.recovery(handle) // unknown, if it cannot be read now
	}
	if data.GpuInstanceId != noInstance {
		e.GPUInstance = &data.GpuInstanceId
		if data.ComputeInstanceId != noInstance {
			e.ComputeInstance = &data.ComputeInstanceId
		}
	}
	return e
}

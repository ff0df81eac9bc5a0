package watch

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/wake"
)

const (
	// eventWait is how long one NVML call waits for an event.
	eventWait = 5 * time.Second
	// eventGrace is how much longer than eventWait NVML may take for one wait before the event loop
	// is reported as stuck.
	eventGrace = 10 * time.Second
	// earlyPause follows a wait that NVML ended too early. It is short, because nothing listens
	// meanwhile, and long enough for an NVML that never waits.
	earlyPause = 100 * time.Millisecond
	// After its event set failed, an event loop waits firstRetry, then with growing pauses up to
	// lastRetry, before it creates a new set.
	firstRetry = 100 * time.Millisecond
	lastRetry  = 30 * time.Second
	// noInstance is NVML's instance ID for an event that belongs to no GPU instance or compute
	// instance.
	noInstance = 0xFFFFFFFF
)

// eventKinds are the events that concern health.
var eventKinds = map[uint64]device.EventKind{
	nvml.EventTypeXidCriticalError: device.EventXID, nvml.EventTypeDoubleBitEccError: device.EventDoubleBitECC,
	nvml.EventTypeSingleBitEccErrorStorm: device.EventSingleBitStorm, nvml.EventTypeDramRetirementEvent: device.EventRetirement,
	nvml.EventTypeDramRetirementFailure: device.EventRetirementFailed, nvml.EventTypeNonFatalPoisonError: device.EventPoison,
	nvml.EventTypeFatalPoisonError: device.EventFatalPoison, nvml.EventTypeGpuUnavailableError: device.EventUnavailable,
	nvml.EventTypeGpuRecoveryAction: device.EventRecoveryAction,
}

// eventLoop receives the events of one card. Each card needs its own NVML event set, because a set
// with a lost card reports only the loss.
type eventLoop struct {
	poller  *healthPoller // used by this loop only
	onEvent func(device.HealthEvent)
	wait    time.Duration
	// A value in retry ends the pause before the next attempt, because the card may have recovered.
	retry wake.Signal
	// onFailure runs when the event set fails, so that the card is polled at once.
	onFailure func()
	// onChange runs when the loop starts or stops receiving events.
	onChange func()

	mu         sync.Mutex
	trouble    string    // why the loop receives no events, empty if it receives them
	lastAnswer time.Time // when NVML last answered
}

var errNoEvents = errors.New("the GPU has no events")

// run receives events until ctx ends. It may return some seconds later, because NVML's wait cannot
// be interrupted.
func (l *eventLoop) run(ctx context.Context) {
	for pause := firstRetry; ctx.Err() == nil; pause = min(2*pause, lastRetry) {
		l.startAttempt()
		set, handle, err := l.subscribe()
		if errors.Is(err, errNoEvents) {
			l.recordAnswer("")
			pause = lastRetry // later, the card may support events after a mode change
		} else if err != nil {
			l.recordAnswer(err.Error())
		} else {
			l.recordAnswer("")
			worked, err := l.receive(ctx, set, handle)
			_ = l.poller.lib.EventSetFree(set)
			if ctx.Err() != nil {
				return
			}
			l.recordAnswer(err.Error())
			l.onFailure()
			if worked {
				pause = firstRetry
			}
		}
		select {
		case <-ctx.Done():
		case <-l.retry:
			pause = firstRetry
		case <-time.After(pause):
		}
	}
}

// startAttempt records that another NVML call starts. Until NVML answers, the loop keeps the
// trouble of the previous answer.
func (l *eventLoop) startAttempt() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lastAnswer = time.Now()
}

// recordAnswer records that NVML answered. trouble says why the loop receives no events, and is
// empty if it receives them.
func (l *eventLoop) recordAnswer(trouble string) {
	l.mu.Lock()
	changed := (l.trouble == "") != (trouble == "")
	l.trouble, l.lastAnswer = trouble, time.Now()
	l.mu.Unlock()
	if changed {
		l.onChange()
	}
}

// whyNoEvents returns the reason why the loop receives no events of the card. It is empty if the
// loop receives them.
func (l *eventLoop) whyNoEvents() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.trouble == "" && time.Since(l.lastAnswer) > lastRetry+l.wait+eventGrace {
		return fmt.Sprintf("NVML has not answered for %s", time.Since(l.lastAnswer).Round(time.Second))
	}
	return l.trouble
}

// subscribe creates an event set and registers the card's health events in it. If the card supports
// no such events, the error is errNoEvents.
func (l *eventLoop) subscribe() (nvml.EventSet, nvml.Device, error) {
	handle, err := l.poller.open()
	if err != nil {
		return nil, nil, err
	}
	supported, ret := handle.GetSupportedEventTypes()
	if isUnsupported(ret) {
		return nil, nil, errNoEvents
	}
	if ret != nvml.SUCCESS {
		return nil, nil, fmt.Errorf("read its event types: %w", nvmlx.ToError(ret))
	}
	var wanted uint64
	for kind := range eventKinds {
		wanted |= kind & supported
	}
	if wanted == 0 {
		return nil, nil, errNoEvents
	}
	set, ret := l.poller.lib.EventSetCreate()
	if ret != nvml.SUCCESS {
		return nil, nil, fmt.Errorf("create an event set: %w", nvmlx.ToError(ret))
	}
	if ret := handle.RegisterEvents(wanted, set); ret != nvml.SUCCESS {
		_ = l.poller.lib.EventSetFree(set)
		if ret == nvml.ERROR_NOT_SUPPORTED {
			return nil, nil, errNoEvents
		}
		return nil, nil, fmt.Errorf("register for its events: %w", nvmlx.ToError(ret))
	}
	return set, handle, nil
}

// receive reports the events that set delivers, until NVML returns an error for set or ctx ends.
// worked is true if NVML returned an event or a timeout at least once.
func (l *eventLoop) receive(ctx context.Context, set nvml.EventSet, handle nvml.Device) (worked bool, err error) {
	for ctx.Err() == nil {
		began := time.Now()
		data, ret := set.Wait(uint32(l.wait.Milliseconds())) //nolint:gosec // a few seconds
		l.recordAnswer("")
		switch ret {
		case nvml.SUCCESS:
			if kind, ok := eventKinds[data.EventType]; ok {
				l.onEvent(l.event(handle, kind, data))
			}
		case nvml.ERROR_TIMEOUT:
			if time.Since(began) < l.wait/2 {
				nvmlx.Sleep(ctx, earlyPause)
			}
		default:
			return worked, fmt.Errorf("wait for its events: %w", nvmlx.ToError(ret))
		}
		worked = true
	}
	return worked, ctx.Err()
}

// event converts NVML's event data. It names a MIG instance by its IDs only, because opening the
// MIG instance here would block its removal.
func (l *eventLoop) event(handle nvml.Device, kind device.EventKind, data nvml.EventData) device.HealthEvent {
	e := device.HealthEvent{Card: l.poller.card, Kind: kind, Count: 1, At: time.Now()}
	switch kind {
	case device.EventXID:
		e.XID = data.EventData
	case device.EventRecoveryAction:
		e.Recovery, _ = l.poller.recovery(handle) // unknown if it cannot be read now
	}
	if data.GpuInstanceId != noInstance {
		e.GPUInstance = &data.GpuInstanceId
		if data.ComputeInstanceId != noInstance {
			e.ComputeInstance = &data.ComputeInstanceId
		}
	}
	return e
}

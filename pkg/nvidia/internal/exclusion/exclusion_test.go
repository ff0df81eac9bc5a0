package exclusion

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

const excludedCard device.PCIAddress = "0000:1b:00.0"

func TestExclusionDoesNotWaitForKilledWatcherThatHangs(t *testing.T) {
	x := NewSet()
	hung, _ := x.Begin("")
	x.Started(hung, 4711)
	time.AfterFunc(10*time.Millisecond, func() { x.Killed(hung) })
	for range 2 { // a retry is no slower
		began := time.Now()
		restore, err := x.Exclude(t.Context(), excludedCard, 0)
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took < child.KillLimit || took > nvidiatest.Patience/2 {
			t.Errorf("the exclusion took %s, want about %s", took, child.KillLimit)
		}
		restore()
	}
}

func TestWatcherApartIsNotReplacedForAnotherCard(t *testing.T) {
	x := NewSet()
	x.request(excludedCard, 0, 1)
	apart, _ := x.Begin("0000:43:00.0")
	common, _ := x.Begin("")
	x.request(excludedCard, 0, -1)
	if now, soon := x.Outdated(apart); now || soon {
		t.Errorf("the watcher of another card is replaced (now %t, soon %t)", now, soon)
	}
	if _, soon := x.Outdated(common); !soon {
		t.Error("the watcher of all cards is not replaced")
	}
}

func TestExclusionAdvisesResetOnlyForKilledWatcher(t *testing.T) {
	x := NewSet()
	c, _ := x.Begin("")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := x.Exclude(ctx, excludedCard, 0); err == nil || strings.Contains(err.Error(), "dmesg") {
		t.Errorf("the error about a living watcher is %v", err)
	}
	x.Killed(c)
	if _, err := x.Exclude(ctx, excludedCard, 0); err == nil || !strings.Contains(err.Error(), "dmesg") {
		t.Errorf("the error about a killed watcher is %v", err)
	}
}

func TestExclusionNamesWatcherThatCannotEnd(t *testing.T) {
	a := NewSet()
	h, _ := a.Begin("")
	a.Started(h, 4711)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := a.Exclude(ctx, "0000:1b:00.0", 0); err == nil || !strings.Contains(err.Error(), "process 4711") {
		t.Error(err)
	}
	a.Replaced(errors.New("NVML has not started"))
	_, err := a.Exclude(ctx, "0000:1b:00.0", 0)
	if err == nil || !strings.Contains(err.Error(), "NVML has not started") {
		t.Error(err)
	}
	if now, later := a.Outdated(h); now || later {
		t.Error("the card is still excluded after its mode change gave up")
	}
	a.Ended(h)
	restore, err := a.Exclude(t.Context(), "0000:1b:00.0", 0)
	if err != nil {
		t.Fatal(err)
	}
	if h, may := a.Begin("0000:1b:00.0"); may {
		t.Errorf("%+v", h)
	}
	without, _ := a.Begin("")
	restore()
	restore()
	if now, later := a.Outdated(without); now || !later || without.has("0000:1b:00.0") || !without.has("0000:43:00.0") {
		t.Error(now, later, without)
	}
}

// An interruption ends a call of the plugin at one of its hardware calls or disk writes. The tests
// repeat the call and interrupt it at each of them.

package prepare_test

import (
	"fmt"
	"syscall"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

// interruption is a way to interrupt a call.
type interruption struct {
	name string
	// arm interrupts the next call at its n-th hardware call or disk write. The result says whether
	// the call got that far.
	arm func(w *world, n int) (reached func() bool)
	// end makes the node ready for the next plugin process.
	end func(*world)
}

var (
	killAtWrite = interruption{"kill -9 at write", stopDisk, func(w *world) { w.disk.Restart() }}
	powerCut    = interruption{"power cut at write", stopDisk, func(w *world) { w.reboot() }}
	// fullDisk lets one disk write fail.
	fullDisk = interruption{"full disk at write", func(w *world, n int) (reached func() bool) {
		w.disk.FailAt(n, syscall.ENOSPC)
		return func() bool { return w.disk.Writes() >= n }
	}, func(w *world) { w.disk.Restart() }}

	deaths   = []interruption{killAtWrite, powerCut}
	atWrites = []interruption{killAtWrite, powerCut, fullDisk}

	failedCall  = failing("an error at call", false, device.FailureOther)
	refusedCall = failing("a refusal at call", false, device.FailureInUse)
	hungCall    = failing("a hung call at call", false, device.FailureTimeout)
	lostAnswer  = failing("a lost answer at call", true, device.FailureDied)
	killBefore  = atHardwareCall("kill -9 before call", false, killProcess)
	killAfter   = atHardwareCall("kill -9 after call", true, killProcess)

	atCalls = []interruption{failedCall, refusedCall, hungCall, lostAnswer, killBefore, killAfter}
)

func stopDisk(w *world, n int) (reached func() bool) {
	w.disk.StopAt(n)
	return w.disk.Stopped
}

// failing lets a hardware call return an error, before or after its effect.
func failing(name string, after bool, code device.FailureCode) interruption {
	return atHardwareCall(name, after, func(*world) error { return &nvidia.Error{Op: "a call", Code: code, Message: string(code)} })
}

// atHardwareCall lets a hardware call return the error of fault, before or after its effect.
func atHardwareCall(name string, after bool, fault func(*world) error) interruption {
	return interruption{name, func(w *world, n int) (reached func() bool) {
		met := false
		w.hardware.fault = func(call int, isAfter bool) error {
			if call != n || isAfter != after {
				return nil
			}
			met = true
			return fault(w)
		}
		return func() bool { return met }
	}, func(w *world) {
		w.hardware.fault = nil
		w.disk.Restart()
	}}
}

func killProcess(w *world) error {
	w.disk.StopAt(1)
	_ = w.disk.Write()
	return durabletest.ErrStopped
}

// attempt is a call on a new node that a test interrupts.
type attempt struct {
	*world
	call func() error
	// check runs after the interruption, on the node that is ready again.
	check func(*testing.T)
}

// everywhere interrupts an attempt at each of its hardware calls or disk writes. There must be at
// least so many of them, and the uninterrupted call must succeed.
func (i interruption) everywhere(t *testing.T, least int, begin func(*testing.T) attempt) {
	t.Helper()
	for n := 1; ; n += stride() {
		a := begin(t)
		reached := i.arm(a.world, n)
		err := a.call()
		if !reached() {
			if err != nil || n <= least {
				t.Fatalf("%s: the call ended before number %d: %v", i.name, n, err)
			}
			return
		}
		t.Run(fmt.Sprint(i.name, " ", n), func(t *testing.T) {
			i.end(a.world)
			a.check(t)
		})
	}
}

// stride is the distance between the hardware calls or disk writes at which the tests interrupt a
// call, one per run. With go test -short it is larger, because the race detector makes these tests
// many times slower.
func stride() int {
	if testing.Short() {
		return 7
	}
	return 1
}

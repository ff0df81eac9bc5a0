package cut

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

func TestSetComputeModeVerifiesResult(t *testing.T) {
	b := newBench(t, func(c *nvidiatest.Card) { c.Modes = &nvidiatest.Modes{} })
	s := b.works(b.do(request{Op: opLook})).State
	if s.ComputeMode != device.ComputeDefault {
		t.Errorf("%+v", s)
	}
	for _, mode := range []device.ComputeMode{device.ComputeExclusiveProcess, device.ComputeExclusiveProcess, device.ComputeProhibited,
		device.ComputeDefault} {
		if s := b.works(b.do(request{Op: opSetComputeMode, ComputeMode: mode})).State; s.ComputeMode != mode {
			t.Errorf("%s: %+v", mode, s)
		}
	}
}

func TestSetComputeModeFailures(t *testing.T) {
	set := request{Op: opSetComputeMode, ComputeMode: device.ComputeExclusiveProcess}
	b := newBench(t, func(c *nvidiatest.Card) { c.Modes = &nvidiatest.Modes{IgnoresChange: true} })
	b.fails(b.do(set), device.FailureOther, "exclusive-process", `the mode is "default"`)
	b.fails(b.do(request{Op: opSetComputeMode, ComputeMode: "fast"}), device.FailureOther, `"fast"`)

	b = newBench(t, func(c *nvidiatest.Card) {
		c.Modes, c.Answers = &nvidiatest.Modes{}, map[string]nvml.Return{"nvmlDeviceSetComputeMode": nvml.ERROR_NO_PERMISSION}
	})
	b.fails(b.do(set), device.FailureNoPermission, "privileged")
	// The test expects success although NVML would refuse the change, because the card already has
	// the requested mode.
	b.works(b.do(request{Op: opSetComputeMode, ComputeMode: device.ComputeDefault}))

	b = newBench(t, func(c *nvidiatest.Card) { c.Modes = &nvidiatest.Modes{} })
	b.On = true
	b.fails(b.do(set), device.FailureNotSupported, "MIG mode")
	b.works(b.do(request{Op: opSetComputeMode, ComputeMode: device.ComputeProhibited}))
}

func TestExclusiveThreadModeIsRecognized(t *testing.T) {
	b := newBench(t, func(c *nvidiatest.Card) { c.Modes = &nvidiatest.Modes{Compute: nvml.COMPUTEMODE_EXCLUSIVE_THREAD} })
	if s := b.works(b.do(request{Op: opLook})).State; s.ComputeMode != device.ComputeExclusiveProcess {
		t.Errorf("%+v", s)
	}
}

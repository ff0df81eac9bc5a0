package loop

import (
	"context"
	"strings"
	"testing"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// A GPU with MIG instances may refuse to say whether row remaps are pending or failed. That is no
// fault of the GPU, but an operator should know.
func TestMissingRowRemapsAreLoggedOnce(t *testing.T) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	ctx := klog.NewContext(t.Context(), logger)
	l := &Loop{opts: Options{Inventory: &oneGPUInventory{}}, signals: make(chan device.Signal, 100), remapGaps: map[device.PCIAddress]bool{}}
	partitioned, whole, known := &device.MIGMode{Enabled: true}, &device.MIGMode{}, &device.Remap{}
	said := func(reach device.Reach, mode *device.MIGMode, remap *device.Remap) string {
		t.Helper()
		sink, ok := logger.GetSink().(ktesting.Underlier)
		if !ok {
			t.Fatal("the logger keeps no text")
		}
		output := sink.GetBuffer()
		before := len(output.String())
		l.opts.Watch = func(_ context.Context, report func(device.Signal)) error {
			report(device.Signal{Condition: &device.Condition{
				Card: device.Card{PCIAddress: "0000:1b:00.0"}, Reach: reach, MIG: mode, Remap: remap,
			}})
			return nil
		}
		if err := l.Watcher(ctx)(ctx); err != nil {
			t.Fatal(err)
		}
		return output.String()[before:]
	}
	for i, step := range []struct {
		reach device.Reach
		mode  *device.MIGMode
		remap *device.Remap
		want  string
	}{
		{device.ReachOK, whole, known, ""},
		{device.ReachOK, nil, nil, ""}, // no card before Ampere has MIG
		{device.ReachFailed, partitioned, nil, ""},
		{device.ReachOK, partitioned, nil, "no row remaps"},
		{device.ReachOK, partitioned, nil, ""},
		{device.ReachFailed, partitioned, nil, ""},
		{device.ReachOK, partitioned, known, "row remaps again"},
		{device.ReachOK, partitioned, nil, "no row remaps"},
	} {
		if got := said(step.reach, step.mode, step.remap); (got != "") != (step.want != "") || !strings.Contains(got, step.want) {
			t.Errorf("step %d: logged %q, want %q", i, got, step.want)
		}
	}
}

package cut

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/smi"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// newSiteWithSMI returns a simulated node with NVIDIA's own nvidia-smi.
func newSiteWithSMI(t *testing.T, node string, kind layout.Kind) nvidiatest.Site {
	t.Helper()
	program, err := smi.Fetch(t.Context(), smi.DefaultSuite)
	if errors.Is(err, smi.ErrUnavailable) {
		t.Skipf("NOT TESTED, the real nvidia-smi is missing: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	described, err := model.ReadNode(filepath.Join(nvidiatest.Simulator, "nodes", node+".yaml"), nvidiatest.Seed)
	if err != nil {
		t.Fatal(err)
	}
	return nvidiatest.NewSiteWith(t, described, kind, "", program)
}

func TestSetTimeSliceInEveryDriverLayout(t *testing.T) {
	for _, kind := range []layout.Kind{layout.Host, layout.Container, layout.Bare} {
		t.Run(string(kind), func(t *testing.T) {
			s := newSiteWithSMI(t, "l40s-x2", kind)
			if kind != layout.Bare { // the directory of the driver's libraries also has a C library
				library, err := host.Library(s.Paths().WithDefaults())
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(filepath.Dir(library), "libc.so.6"), []byte("of another system"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			p := partitionsOf(s)
			c, other := s.Changer(p, 1), s.Changer(p, 0)
			for _, to := range []device.TimeSlice{device.TimeSliceLong, device.TimeSliceMedium, device.TimeSliceMedium, device.TimeSliceShort,
				device.TimeSliceDefault} {
				c.SetSlice(to)
				if is := c.Slice(); is != to {
					t.Errorf("it is %v, want %v", is, to)
				}
				if is := other.Slice(); is != device.TimeSliceDefault {
					t.Errorf("the other GPU's is %v", is)
				}
			}
		})
	}
}

func TestSetTimeSliceDespiteLostGPU(t *testing.T) {
	s := newSiteWithSMI(t, "dgx-h100", layout.Container)
	c := s.Changer(partitionsOf(s), 5)
	s.Change(func(_ *layout.Config, f *state.File) error { return f.Lose(2) })
	c.SetSlice(device.TimeSliceShort)
	// The test expects success although another GPU answers no NVML call at all.
	s.Fault(state.Fault{Kind: state.FaultSlow, GPU: 3, DelayMS: 3600_000}, "*", 0)
	c.SetSlice(device.TimeSliceLong)
	if is := c.Slice(); is != device.TimeSliceLong {
		t.Error(is)
	}
}

func TestSetTimeSliceWithoutHiding(t *testing.T) {
	s := newSiteWithSMI(t, "dgx-h100", layout.Container)
	c := s.Changer(partitionsOf(s), 5)
	// This symlink leads nowhere, so the plugin cannot hide the device node by a mount over it.
	if err := os.Symlink("/nonexistent", filepath.Join(s.Root, "driver", "dev", "nvidia99")); err != nil {
		t.Fatal(err)
	}
	c.SetSlice(device.TimeSliceShort)
	if is := c.Slice(); is != device.TimeSliceShort {
		t.Error(is)
	}
}

func TestSetTimeSliceFailures(t *testing.T) {
	s := newSiteWithSMI(t, "dgx-h100", layout.Container)
	c := s.Changer(partitionsOf(s), 1)
	s.Change(func(_ *layout.Config, f *state.File) error { return f.Lose(2) }) // no failure may be about this GPU
	for _, tc := range []struct {
		answer nvml.Return
		want   device.FailureCode
		says   string
	}{
		{nvml.ERROR_NOT_SUPPORTED, device.FailureNotSupported, "Not Supported"},
		{nvml.ERROR_NO_PERMISSION, device.FailureNoPermission, "Insufficient Permissions"},
		{nvml.ERROR_GPU_IS_LOST, device.FailureLost, "GPU is lost"},
		{nvml.ERROR_UNKNOWN, device.FailureOther, "Unknown Error"},
	} {
		s.Fault(state.Fault{Kind: state.FaultFail, GPU: 1, Error: uint32(tc.answer)}, "setTimeSlice", 0)
		err := c.SetTimeSlice(t.Context(), c.Card, device.TimeSliceShort)
		if codeOf(err) != tc.want || !strings.Contains(err.Error(), tc.says) ||
			!strings.Contains(err.Error(), "set the time slice to Short on "+c.Card.String()) {
			t.Errorf("%v, want %s", err, tc.want)
		}
		s.Change(func(_ *layout.Config, f *state.File) error { return f.ClearFaults() })
	}
	if err := c.SetTimeSlice(t.Context(), c.Card, 7); codeOf(err) != device.FailureOther {
		t.Error(err)
	}
	c.Mode(true)
	c.SetSlice(device.TimeSliceShort)
	if is := c.Slice(); is != device.TimeSliceShort {
		t.Errorf("in MIG mode the time slice is %d", is)
	}
	program, err := s.Paths().Program("nvidia-smi")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(program.Path); err != nil {
		t.Fatal(err)
	}
	if _, err := c.TimeSlice(t.Context(), c.Card); codeOf(err) != device.FailureNotSupported ||
		!strings.Contains(err.Error(), "not installed") {
		t.Error(err)
	}
}

func TestHungNvidiaSMIEndsWithContext(t *testing.T) {
	s := newSiteWithSMI(t, "dgx-h100", layout.Container)
	c := s.Changer(partitionsOf(s), 1)
	s.Fault(state.Fault{Kind: state.FaultSlow, GPU: 1, DelayMS: 3600_000}, "setTimeSlice", 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		s.AwaitHit(ctx)
		cancel()
	}()
	if err := c.SetTimeSlice(ctx, c.Card, device.TimeSliceShort); codeOf(err) != device.FailureTimeout || !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	// The killed nvidia-smi holds the card's lock until its process has ended. The test expects
	// that the next call waits for that and then succeeds.
	c.SetSlice(device.TimeSliceMedium)
	if is := c.Slice(); is != device.TimeSliceMedium {
		t.Error(is)
	}
}

func TestHungToolIsATimeout(t *testing.T) {
	if code := smiCode("", fmt.Errorf("nvidia-smi failed: %w", context.DeadlineExceeded)); code != device.FailureTimeout {
		t.Error(code)
	}
}

func TestParseTimeSliceTable(t *testing.T) {
	row := "|   2   Timeslice       Short         |\n"
	if is, err := parseSlice("+---+\n| GPU     Name           Value        |\n" + row); err != nil || is != device.TimeSliceShort {
		t.Error(is, err)
	}
	for _, table := range []string{"", "nonsense", row + row, "| 2 Timeslice Enormous |"} {
		if is, err := parseSlice(table); err == nil {
			t.Errorf("%q: %v", table, is)
		}
	}
}

package cut

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/onecard"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/tool"
)

// sliceNames are nvidia-smi's names of the time slices, indexed by value.
var sliceNames = []string{
	device.TimeSliceDefault: "Default", device.TimeSliceShort: "Short",
	device.TimeSliceMedium: "Medium", device.TimeSliceLong: "Long",
}

func sliceName(s device.TimeSlice) string {
	if s < 0 || int(s) >= len(sliceNames) {
		return fmt.Sprintf("unknown (%d)", int(s))
	}
	return sliceNames[s]
}

func (c partitioner) timeSlice(r request) (device.TimeSlice, error) {
	s, err := c.look(r) // nvidia-smi would report a missing card less clearly
	if err != nil {
		return 0, err
	}
	return c.readSlice(r, s)
}

// setTimeSlice sets the card's time slice and reads it back. If the card then has another time
// slice than the requested one, it returns an error. A card in MIG mode may still have that of an
// earlier claim: the open kernel modules keep it for the GPU's UUID, whatever its mode
// (subdevice_ctrl_gpu_kernel.c).
func (c partitioner) setTimeSlice(r request) error {
	if r.TimeSlice < 0 || int(r.TimeSlice) >= len(sliceNames) {
		return r.fail(device.FailureOther, "this version does not know the time slice")
	}
	s, err := c.look(r)
	if err != nil {
		return err
	}
	is, err := c.readSlice(r, s)
	if err != nil || is == r.TimeSlice {
		return err
	}
	if _, err := c.smi(r, s.Minor, fmt.Sprintf("--set-timeslice=%d", int(r.TimeSlice))); err != nil {
		return err
	}
	if is, err = c.readSlice(r, s); err == nil && is != r.TimeSlice {
		err = r.fail(device.FailureOther, "nvidia-smi reported success, but the time slice is %s", sliceName(is))
	}
	return err
}

func (c partitioner) readSlice(r request, s device.CardState) (device.TimeSlice, error) {
	out, err := c.smi(r, s.Minor, "--list")
	if err != nil {
		return 0, err
	}
	is, err := parseSlice(out)
	if err != nil {
		err = r.fail(device.FailureOther, "%v: %s", err, tool.LastOutput(out))
	}
	return is, err
}

// parseSlice returns the time slice from nvidia-smi's table of one GPU. The relevant row is "| 0
// Timeslice Short |". If there is not exactly one such row, or its value is unknown, parseSlice
// returns an error.
func parseSlice(table string) (device.TimeSlice, error) {
	var found []string
	for line := range strings.Lines(table) {
		words := strings.Fields(strings.ReplaceAll(line, "|", " "))
		if len(words) == 3 && strings.EqualFold(words[1], "timeslice") {
			found = append(found, words[2])
		}
	}
	if len(found) != 1 {
		return 0, fmt.Errorf("nvidia-smi listed the time slices of %d GPUs instead of one", len(found))
	}
	for value, name := range sliceNames {
		if strings.EqualFold(name, found[0]) {
			return device.TimeSlice(value), nil
		}
	}
	return 0, fmt.Errorf("nvidia-smi reports the time slice %q, which this version does not know", found[0])
}

// smi runs "nvidia-smi compute-policy" for one card. nvidia-smi opens all cards that it sees, and
// gives up if one is lost. So smi hides the device nodes of the other cards.
func (c partitioner) smi(r request, minor int, args ...string) (string, error) {
	program, err := c.Paths.Program("nvidia-smi")
	if errors.Is(err, fs.ErrNotExist) {
		return "", r.fail(device.FailureNotSupported, "time slices need the driver's nvidia-smi, which is not installed: %v", err)
	}
	if err != nil {
		return "", r.fail(device.FailureOther, "%v", err)
	}
	out, err := tool.Tool{
		Program: program, Args: append([]string{"compute-policy", "--id=" + r.Card.UUID}, args...), Limit: tool.SMILimit, Lock: c.lock,
		Hidden: onecard.Others(c.Paths.DeviceRoot(), func(node string) bool { return node == fmt.Sprintf("nvidia%d", minor) }),
	}.Run(context.Background())
	if err != nil {
		return "", r.fail(smiCode(out, err), "%v", err)
	}
	return out, nil
}

// smiCode returns the failure code for nvidia-smi's output, which quotes NVML's error.
func smiCode(out string, err error) device.FailureCode {
	if errors.Is(err, context.DeadlineExceeded) {
		return device.FailureTimeout
	}
	out = strings.ToLower(out)
	for _, known := range []struct {
		words string
		code  device.FailureCode
	}{
		{"not supported", device.FailureNotSupported}, {"function not found", device.FailureNotSupported},
		{"not recognized", device.FailureNotSupported},
		{"insufficient permissions", device.FailureNoPermission}, {"gpu is lost", device.FailureLost},
		{"driver not loaded", device.FailureNoDriver},
		{"no devices were found", device.FailureNotFound},
	} {
		if strings.Contains(out, known.words) {
			return known.code
		}
	}
	return device.FailureOther
}

package nvidia

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// sliceNames are nvidia-smi's words for time slices, in the order of their values.
var sliceNames = []string{device.TimeSliceDefault: "Default", device.TimeSliceShort: "Short", device.TimeSliceMedium: "Medium", device.TimeSliceLong: "Long"}

func sliceName(s device.TimeSlice) string {
	if s < 0 || int(s) >= len(sliceNames) {
		return fmt.Sprintf("unknown (%d)", int(s))
	}
	return sliceNames[s]
}

func (c cutter) timeSlice(r request) (*device.TimeSlice, error) {
	s, err := c.sliceable(r)
	if err != nil {
		return nil, err
	}
	return c.readSlice(r, s)
}

// setTimeSlice goes by what holds afterwards.
func (c cutter) setTimeSlice(r request) (*device.TimeSlice, error) {
	if r.TimeSlice < 0 || int(r.TimeSlice) >= len(sliceNames) {
		return nil, r.fail(CodeOther, "this version knows no such time slice")
	}
	s, err := c.sliceable(r)
	if err != nil {
		return nil, err
	}
	if s.MIG.Enabled {
		return nil, r.fail(CodeNotSupported, "the GPU is in MIG mode: there only its instances have time slices, which cannot be set")
	}
	is, err := c.readSlice(r, s)
	if err != nil || *is == r.TimeSlice {
		return is, err
	}
	if _, err := c.smi(r, s.Minor, fmt.Sprintf("--set-timeslice=%d", int(r.TimeSlice))); err != nil {
		return nil, err
	}
	if is, err = c.readSlice(r, s); err == nil && *is != r.TimeSlice {
		err = r.fail(CodeOther, "nvidia-smi says that it has set it, and that it is %s", sliceName(*is))
	}
	return is, err
}

// sliceable proves that the card is there and the one that is meant, which nvidia-smi would not say so well.
func (c cutter) sliceable(r request) (*State, error) {
	card, err := c.open(r)
	if err != nil {
		return nil, err
	}
	return c.state(card)
}

func (c cutter) readSlice(r request, s *State) (*device.TimeSlice, error) {
	out, err := c.smi(r, s.Minor, "--list")
	if err != nil {
		return nil, err
	}
	found, err := parseSlice(out)
	if err != nil {
		return nil, r.fail(CodeOther, "%v: %s", err, excerpt(out))
	}
	return &found, nil
}

// parseSlice finds the time slice in the table that nvidia-smi prints of one GPU: "|   0   Timeslice       Short         |".
func parseSlice(table string) (device.TimeSlice, error) {
	var found []string
	for line := range strings.Lines(table) {
		if words := strings.Fields(strings.ReplaceAll(line, "|", " ")); len(words) == 3 && strings.EqualFold(words[1], "timeslice") {
			found = append(found, words[2])
		}
	}
	if len(found) != 1 {
		return 0, fmt.Errorf("nvidia-smi lists the time slices of %d GPUs where it was asked for one", len(found))
	}
	for value, name := range sliceNames {
		if strings.EqualFold(name, found[0]) {
			return device.TimeSlice(value), nil
		}
	}
	return 0, fmt.Errorf("nvidia-smi says that the time slice is %q, which this version does not know", found[0])
}

// smi runs "nvidia-smi compute-policy" for one card. Asked by UUID it opens all cards, and gives up if any of them is lost; each that sleeps costs
// time. So it is shown no other card. Where that fails it is shown all and asked by index, which opens one only, but may by then mean another card.
func (c cutter) smi(r request, minor int, args ...string) (string, error) {
	program, err := c.paths.Program("nvidia-smi")
	if errors.Is(err, fs.ErrNotExist) {
		return "", r.fail(CodeNotSupported, "time slices are set by the driver's nvidia-smi, and it is not installed: %v", err)
	}
	if err != nil {
		return "", r.fail(CodeOther, "%v", err)
	}
	run := tool{program: program, args: append([]string{"compute-policy", "--id=" + r.Card.UUID}, args...), limit: smiLimit, lock: c.lock}
	out, err := run.alone(context.Background(), c.otherNodes(minor))
	if err == nil || errors.Is(err, context.DeadlineExceeded) {
		return out, c.smiError(r, out, err)
	}
	before, err := c.index(r)
	if err != nil {
		return "", err
	}
	run.args[1] = fmt.Sprintf("--id=%d", before)
	out, err = run.run(context.Background())
	if err := c.smiError(r, out, err); err != nil {
		return "", err
	}
	if after, err := c.index(r); err != nil || after != before {
		return "", r.fail(CodeOther, "the GPUs were numbered anew while nvidia-smi ran, so that it may have meant another (%v): look at the time slices of all (nvidia-smi compute-policy -l)", err)
	}
	return out, nil
}

func (c cutter) index(r request) (int, error) {
	card, err := c.open(r)
	if err != nil {
		return 0, err
	}
	index, ret := card.GetIndex()
	if ret != nvml.SUCCESS {
		return 0, fmt.Errorf("read its index: %w", toError(ret))
	}
	return index, nil
}

// smiError is nil for no error.
func (c cutter) smiError(r request, out string, err error) error {
	if err == nil {
		return nil
	}
	return r.fail(smiCode(out, err), "%v", err)
}

// noDevices is what nvidia-smi says where no card that it may see is the one it was asked for.
const noDevices = "no devices were found"

// smiCode tells from nvidia-smi's words, which are those of NVML's errors, why it failed.
func smiCode(out string, err error) CutCode {
	if errors.Is(err, context.DeadlineExceeded) {
		return CodeTimeout
	}
	out = strings.ToLower(out)
	for _, known := range []struct {
		words string
		code  CutCode
	}{
		{"not supported", CodeNotSupported}, {"function not found", CodeNotSupported}, {"not recognized", CodeNotSupported},
		{"insufficient permissions", CodeNoPermission}, {"gpu is lost", CodeLost}, {"driver not loaded", CodeNoDriver},
		{noDevices, CodeNotFound},
	} {
		if strings.Contains(out, known.words) {
			return known.code
		}
	}
	return CodeOther
}

package steps

import (
	"context"
	"fmt"
	"strconv"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const TimeSliceKind = "time-slice"

// TimeSlice is the step that sets a GPU's time slice: how long one process runs on the GPU before
// the next one does.
type TimeSlice struct {
	change
	SettingState[device.TimeSlice]
	Want device.TimeSlice `json:"want"`
}

var _ Sharable = &TimeSlice{}

var timeSlices = gpuSetting[device.TimeSlice]{
	name: "time slices",
	read: func(ctx context.Context, env *Env, card device.Card) (device.TimeSlice, error) {
		return env.Partitions.TimeSlice(ctx, card)
	},
	set: func(ctx context.Context, env *Env, card device.Card, to device.TimeSlice) error {
		return env.Partitions.SetTimeSlice(ctx, card, to)
	},
	format: intervalName,
}

// TimeSliceIntervals maps the interval names in a claim's configuration to the time slices that
// the GPU knows.
var TimeSliceIntervals = map[v1beta1.TimeSliceInterval]device.TimeSlice{
	v1beta1.IntervalDefault: device.TimeSliceDefault,
	v1beta1.IntervalShort:   device.TimeSliceShort,
	v1beta1.IntervalMedium:  device.TimeSliceMedium,
	v1beta1.IntervalLong:    device.TimeSliceLong,
}

func intervalName(slice device.TimeSlice) string {
	for interval, s := range TimeSliceIntervals {
		if s == slice {
			return string(interval)
		}
	}
	return strconv.Itoa(int(slice))
}

func (s *TimeSlice) Kind() string { return TimeSliceKind }

func (s *TimeSlice) describe() string {
	return fmt.Sprintf("time slices of length %s on %s", intervalName(s.Want), s.GPU)
}

func (s *TimeSlice) assumeDefaults() {
	found := device.TimeSliceDefault
	s.Found = &found
}

// preference is true, because a GPU with another time slice is as usable.
func (*TimeSlice) preference() bool { return true }

func (s *TimeSlice) reset(ctx context.Context, env *Env, of string) error {
	return resetSetting(ctx, env, of, &s.SettingState, s)
}

func (s *TimeSlice) Apply(ctx context.Context, env *Env) error {
	return timeSlices.apply(ctx, env, &s.SettingState, s.Want)
}

func (s *TimeSlice) maintain(ctx context.Context, env *Env) error {
	return timeSlices.maintain(ctx, env, &s.SettingState, s.Want)
}

func (s *TimeSlice) Revert(ctx context.Context, env *Env) error {
	return timeSlices.revert(ctx, env, &s.SettingState)
}

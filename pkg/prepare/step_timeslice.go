package prepare

import (
	"context"
	"fmt"
	"strconv"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const timeSliceKind = "time-slice"

// timeSlice is the step that sets a GPU's time slice: how long one process runs on the GPU before
// the next one does.
type timeSlice struct {
	settingState[device.TimeSlice]
	Want device.TimeSlice `json:"want"`
}

var _ sharableStep = &timeSlice{}

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

// intervals maps the interval names in a claim's configuration to the time slices that the GPU
// knows.
var intervals = map[v1beta1.TimeSliceInterval]device.TimeSlice{
	v1beta1.IntervalDefault: device.TimeSliceDefault,
	v1beta1.IntervalShort:   device.TimeSliceShort,
	v1beta1.IntervalMedium:  device.TimeSliceMedium,
	v1beta1.IntervalLong:    device.TimeSliceLong,
}

func intervalName(slice device.TimeSlice) string {
	for interval, s := range intervals {
		if s == slice {
			return string(interval)
		}
	}
	return strconv.Itoa(int(slice))
}

func (s *timeSlice) Kind() string { return timeSliceKind }

func (s *timeSlice) describe() string {
	return fmt.Sprintf("time slices of length %s on %s", intervalName(s.Want), s.GPU)
}

func (s *timeSlice) assumeDefaults() {
	found := device.TimeSliceDefault
	s.Found = &found
}

func (s *timeSlice) Apply(ctx context.Context, env *Env) error {
	return timeSlices.apply(ctx, env, &s.settingState, s.Want)
}

func (s *timeSlice) maintain(ctx context.Context, env *Env) error {
	return timeSlices.maintain(ctx, env, &s.settingState, s.Want)
}

func (s *timeSlice) Revert(ctx context.Context, env *Env) error {
	return timeSlices.revert(ctx, env, &s.settingState)
}

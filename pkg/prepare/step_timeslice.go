package prepare

import (
	"context"
	"fmt"
	"strconv"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const timeSliceKind = "time-slice"

// timeSlice sets for how long a process has the GPU before the next one's turn.
type timeSlice struct {
	setting[device.TimeSlice]
	Want device.TimeSlice `json:"want"`
}

var _ sharable = &timeSlice{}

var timeSlices = knob[device.TimeSlice]{
	name: "time slices",
	now: func(ctx context.Context, env *Env, card device.Card) (device.TimeSlice, error) {
		return env.Partitions.TimeSlice(ctx, card)
	},
	set: func(ctx context.Context, env *Env, card device.Card, to device.TimeSlice) error {
		return env.Partitions.SetTimeSlice(ctx, card, to)
	},
	say: length,
}

// intervals are the lengths in the words of users.
var intervals = map[v1beta1.TimeSliceInterval]device.TimeSlice{
	v1beta1.IntervalDefault: device.TimeSliceDefault,
	v1beta1.IntervalShort:   device.TimeSliceShort,
	v1beta1.IntervalMedium:  device.TimeSliceMedium,
	v1beta1.IntervalLong:    device.TimeSliceLong,
}

func length(slice device.TimeSlice) string {
	for interval, s := range intervals {
		if s == slice {
			return string(interval)
		}
	}
	return strconv.Itoa(int(slice))
}

func (s *timeSlice) Kind() string { return timeSliceKind }

func (s *timeSlice) wanted() string {
	return fmt.Sprintf("time slices of length %s on %s", length(s.Want), s.GPU)
}

func (s *timeSlice) unknown() {
	found := device.TimeSliceDefault
	s.Found = &found
}

func (s *timeSlice) Apply(ctx context.Context, env *Env) error {
	return timeSlices.apply(ctx, env, &s.setting, s.Want)
}

func (s *timeSlice) keep(ctx context.Context, env *Env) error {
	return timeSlices.keep(ctx, env, &s.setting, s.Want)
}

func (s *timeSlice) Revert(ctx context.Context, env *Env) error {
	return timeSlices.revert(ctx, env, &s.setting)
}

package steps

import (
	"context"
	"strconv"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const TimeSliceKind = "time-slice"

// NewTimeSlice returns the step that sets a GPU's time slice: how long one process runs on the GPU
// before the next one does.
func NewTimeSlice(gpu string, card device.Card, want device.TimeSlice) *Setting[device.TimeSlice] {
	return &Setting[device.TimeSlice]{about: &timeSlices, GPU: gpu, Card: card, Want: want}
}

var timeSlices = gpuSetting[device.TimeSlice]{
	kind: TimeSliceKind, name: "time slices", phrase: "time slices of length",
	read: func(ctx context.Context, env *Env, card device.Card) (device.TimeSlice, error) {
		return env.Partitions.TimeSlice(ctx, card)
	},
	set: func(ctx context.Context, env *Env, card device.Card, to device.TimeSlice) error {
		return env.Partitions.SetTimeSlice(ctx, card, to)
	},
	format:     intervalName,
	standard:   device.TimeSliceDefault,
	preference: true, // a GPU with another time slice is as usable
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

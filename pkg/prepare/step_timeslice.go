package prepare

import (
	"context"
	"fmt"
	"strconv"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const timeSliceKind = "time-slice"

// timeSlice sets for how long a process has the GPU before the next one's turn.
type timeSlice struct {
	GPU  string           `json:"gpu"`
	Card device.Card      `json:"card"`
	Want device.TimeSlice `json:"want"`
	// Found is what it was before. It is nil while nothing was changed.
	Found *device.TimeSlice `json:"found,omitempty"`
}

var _ sharable = &timeSlice{}

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
	found, err := env.Partitions.TimeSlice(ctx, s.Card)
	if err != nil {
		return s.failed(err)
	}
	s.Found = &found
	if err := env.Journal(); err != nil {
		return err
	}
	env.mayBeForgotten(ctx, s.Card, s.GPU, "time slices")
	return s.set(ctx, env, s.Want)
}

func (s *timeSlice) keep(ctx context.Context, env *Env) error {
	now, err := env.Partitions.TimeSlice(ctx, s.Card)
	if err != nil {
		return s.failed(err)
	}
	if now == s.Want {
		return nil
	}
	klog.FromContext(ctx).Info("Setting the time slices of a GPU again, which are not what its claims want", "gpu", s.GPU, "now", length(now), "want", length(s.Want))
	return s.set(ctx, env, s.Want)
}

func (s *timeSlice) Revert(ctx context.Context, env *Env) error {
	if s.Found == nil {
		return nil
	}
	if err := s.set(ctx, env, *s.Found); err != nil && !env.isUnset(ctx, s.Card, s.GPU, err) {
		return err
	}
	s.Found = nil
	return nil
}

func (s *timeSlice) set(ctx context.Context, env *Env, to device.TimeSlice) error {
	if err := env.Partitions.SetTimeSlice(ctx, s.Card, to); err != nil {
		return s.failed(err)
	}
	return nil
}

func (s *timeSlice) failed(err error) error { return fmt.Errorf("time slices of %s: %w", s.GPU, err) }

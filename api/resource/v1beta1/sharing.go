package v1beta1

import (
	"fmt"
	"slices"
)

// SharingStrategy is how containers share a device.
type SharingStrategy string

const (
	// SharingNone means that the user requested no strategy. Validate refuses a sharing section
	// without a strategy.
	SharingNone SharingStrategy = ""
	// SharingTimeSlicing switches the whole GPU between processes after each time slice.
	SharingTimeSlicing SharingStrategy = "TimeSlicing"
	// SharingMPS runs processes at the same time, through NVIDIA's Multi-Process Service.
	SharingMPS SharingStrategy = "MPS"
)

// TimeSliceInterval is how long a process keeps the GPU before the next one gets it. The NVIDIA
// driver defines the length of each interval.
type TimeSliceInterval string

const (
	IntervalDefault TimeSliceInterval = "Default"
	IntervalShort   TimeSliceInterval = "Short"
	IntervalMedium  TimeSliceInterval = "Medium"
	IntervalLong    TimeSliceInterval = "Long"
)

var intervals = []TimeSliceInterval{IntervalDefault, IntervalShort, IntervalMedium, IntervalLong}

// Sharing is a strategy with its settings. Validate refuses settings of another strategy.
type Sharing struct {
	// Strategy is TimeSlicing or MPS.
	Strategy SharingStrategy `json:"strategy"`
	// TimeSlicing are the settings of strategy TimeSlicing.
	TimeSlicing *TimeSlicingConfig `json:"timeSlicingConfig,omitempty"`
	// MPS are the settings of strategy MPS.
	MPS *MPSConfig `json:"mpsConfig,omitempty"`
}

// TimeSlicingConfig holds the settings of strategy TimeSlicing.
type TimeSlicingConfig struct {
	// Interval is Default, Short, Medium or Long. Unset means Default.
	Interval TimeSliceInterval `json:"interval,omitempty"`
}

func (s *Sharing) setDefaults() {
	switch s.Strategy {
	case SharingTimeSlicing:
		if s.TimeSlicing == nil {
			s.TimeSlicing = &TimeSlicingConfig{}
		}
	case SharingMPS:
		if s.MPS == nil {
			s.MPS = &MPSConfig{}
		}
	}
	if s.TimeSlicing != nil && s.TimeSlicing.Interval == "" {
		s.TimeSlicing.Interval = IntervalDefault
	}
}

func (s *Sharing) validate() error {
	switch s.Strategy {
	case SharingTimeSlicing:
		if s.MPS != nil {
			return fmt.Errorf("sharing.mpsConfig does not go with strategy %s: remove it, or set sharing.strategy to %s", s.Strategy, SharingMPS)
		}
		if s.TimeSlicing == nil {
			return nil
		}
		return s.TimeSlicing.validate()
	case SharingMPS:
		if s.TimeSlicing != nil {
			return fmt.Errorf("sharing.timeSlicingConfig does not go with strategy %s: remove it, or set sharing.strategy to %s",
				s.Strategy, SharingTimeSlicing)
		}
		if s.MPS == nil {
			return nil
		}
		return s.MPS.validate()
	case SharingNone:
		return fmt.Errorf("sharing.strategy is missing: set it to %s or %s, or remove sharing", SharingTimeSlicing, SharingMPS)
	default:
		return fmt.Errorf("sharing.strategy is %s: set it to %s or %s", quote(string(s.Strategy)), SharingTimeSlicing, SharingMPS)
	}
}

func (t *TimeSlicingConfig) validate() error {
	if slices.Contains(intervals, t.Interval) {
		return nil
	}
	return fmt.Errorf("sharing.timeSlicingConfig.interval is %s: set it to one of %v", quote(string(t.Interval)), intervals)
}

// inKind adds the configuration's kind to an error about one of its fields.
func inKind(kind string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", kind, err)
}

package health

import (
	"fmt"
	"slices"
)

// State is how a device is. A larger one is graver.
type State int

const (
	Healthy State = iota
	// Degraded works, with something that somebody should see to.
	Degraded
	// Unknown is a device of which nobody can say anything now.
	Unknown
	// Unhealthy must not be given to anybody until it has been repaired or reset.
	Unhealthy
	// Lost does not answer any more.
	Lost
)

var stateNames = []string{"Healthy", "Degraded", "Unknown", "Unhealthy", "Lost"}

// States are all of them, the mildest first.
func States() []State { return []State{Healthy, Degraded, Unknown, Unhealthy, Lost} }

func (s State) String() string {
	if s < 0 || int(s) >= len(stateNames) {
		return fmt.Sprintf("State(%d)", int(s))
	}
	return stateNames[s]
}

// MarshalText writes the state's name.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads a state's name.
func (s *State) UnmarshalText(text []byte) error {
	i := slices.Index(stateNames, string(text))
	if i < 0 {
		return fmt.Errorf("state of health %q: want one of %v", text, stateNames)
	}
	*s = State(i)
	return nil
}

// Ends says what ends a finding.
type Ends string

const (
	EndsByLevel Ends = "level" // the hardware is asked again and says that it is over
	EndsByReset Ends = "reset" // a reset, reload or reboot
	EndsByTime  Ends = "time"  // it has not come again for a while
)

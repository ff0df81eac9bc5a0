package health

import (
	"fmt"
	"slices"
)

// State is the health of a device. Of two states, the larger value is the graver one.
type State int

const (
	Healthy State = iota
	// Degraded means that the device works, but an operator should look into it.
	Degraded
	// Unknown means that the state cannot be determined now.
	Unknown
	// Unhealthy means that no Pod must get the device until it has been repaired or reset.
	Unhealthy
	// Lost means that the device no longer answers.
	Lost
)

var stateNames = []string{"Healthy", "Degraded", "Unknown", "Unhealthy", "Lost"}

// States returns all states, the mildest first.
func States() []State { return []State{Healthy, Degraded, Unknown, Unhealthy, Lost} }

func (s State) String() string {
	if s < 0 || int(s) >= len(stateNames) {
		return fmt.Sprintf("State(%d)", int(s))
	}
	return stateNames[s]
}

func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

func (s *State) UnmarshalText(text []byte) error {
	i := slices.Index(stateNames, string(text))
	if i < 0 {
		return fmt.Errorf("health state %q: want one of %v", text, stateNames)
	}
	*s = State(i)
	return nil
}

// Ends says what ends a finding: a reset, the passing of time, or an answer of the GPU without the
// fault.
type Ends string

const (
	EndsByLevel Ends = "level" // the hardware no longer reports the fault
	EndsByReset Ends = "reset" // a reset, driver reload or reboot
	EndsByTime  Ends = "time"  // the error has not recurred for a while
)

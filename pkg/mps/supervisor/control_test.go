package supervisor

import (
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// The answers have the format of control daemons 535 and 550, which show limits from 1 GiB on in
// whole GiB, rounded down.
func TestLimitMatches(t *testing.T) {
	for answer, holds := range map[string]map[uint64]bool{
		"512M":  {512: true, 513: false, 511: false, 512 * 1024: false},
		"1G":    {1024: true, 1500: true, 2047: true, 2048: false, 1023: false, 1: false},
		"18G":   {18432: true, 18431: false},
		"3000M": {3000: true, 3001: false},
		"0M":    {1: false, 1024: false},
		"No default pinned memory limit set for the device!": {1: false, 1024: false},
		"":    {1: false},
		"G":   {1024: false},
		"M":   {1: false},
		"512": {512: false},
		"-1M": {1: false},
	} {
		for limit, want := range holds {
			if have := limitMatches(answer, limit); have != want {
				t.Errorf("%q matches %d MiB: %v", answer, limit, have)
			}
		}
	}
}

func TestThreadPercentageMatchesAsNumber(t *testing.T) {
	threads := 30
	s := settings(mps.Daemon{ThreadPercentage: &threads})[0]
	for answer, want := range map[string]bool{"30.0": true, "30": true, "30.5": false, "100.0": false, "": false, "Unknown command": false} {
		if have := s.matches(answer); have != want {
			t.Errorf("%q: %v", answer, have)
		}
	}
}

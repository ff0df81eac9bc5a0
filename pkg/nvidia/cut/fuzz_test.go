package cut

import (
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// The test expects a time slice or an error for any output of nvidia-smi, never a panic.
func FuzzTimeSliceTable(f *testing.F) {
	for _, table := range []string{
		"+---+\n|   0   Timeslice       Short         |\n+---+\n", "", "| 0 Timeslice |", "| 0 timeslice LONG |\n| 1 Timeslice Long |",
		"0 Timeslice \xff",
	} {
		f.Add(table)
	}
	f.Fuzz(func(t *testing.T, table string) {
		if slice, err := parseSlice(table); err == nil && (slice < device.TimeSliceDefault || slice > device.TimeSliceLong) {
			t.Errorf("%q is time slice %d", table, slice)
		}
	})
}

package cut

import (
	"strings"
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

// The test expects that no output of a worker makes its parent panic or wait forever.
func FuzzChildReport(f *testing.F) {
	for _, said := range []string{``, `{}`, `{`, `null`, `{}{}{}`, `{"state":{"mig":{"instances":[{"compute":[]}]}}}`, "\x00", `[1`} {
		f.Add(said)
	}
	f.Fuzz(func(_ *testing.T, said string) {
		w := &worker{answers: make(chan answer, 1)}
		_ = w.readAnswers(strings.NewReader(said))
	})
}

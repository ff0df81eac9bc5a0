package nvidia

import (
	"io"
	"os"
	"path/filepath"
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

// The test expects a valid minor number and mode, or an error, for any MIG capability file.
func FuzzCapabilityFile(f *testing.F) {
	for _, text := range []string{
		"DeviceFileMinor: 12\nDeviceFileMode: 292\nDeviceFileModify: 1\n", "", "DeviceFileMinor: -1", "DeviceFileMinor: 2147483648",
		"DeviceFileMinor:\x00 1", "DeviceFileMode: 4294967295\nDeviceFileMinor: 1",
	} {
		f.Add([]byte(text))
	}
	path := filepath.Join(f.TempDir(), "access")
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if c, err := readCapability(path); err == nil && (c.minor < 0 || c.mode&^0o777 != 0) {
			t.Errorf("%q is minor %d, mode %v", text, c.minor, c.mode)
		}
	})
}

// The test expects that no output of a child process makes its parent panic or wait forever.
func FuzzChildReport(f *testing.F) {
	for _, said := range []string{
		``, `{}`, `{`, `null`, `{}{}{}`, `{"report":{"node":{"gpus":[{}]}}}`, `{"state":{"mig":{"instances":[{"compute":[]}]}}}`,
		`{"kind":"xid","xid":-1}`, "\x00", `[1`,
	} {
		f.Add(said)
	}
	f.Fuzz(func(_ *testing.T, said string) {
		w := &worker{answers: make(chan answer, 1)}
		_ = w.readAnswers(strings.NewReader(said))
		c := &watchChild{signals: make(chan device.Signal, 1), stop: make(chan struct{})}
		close(c.stop)
		_ = c.readSignals(strings.NewReader(said))
		_ = exchange(nil, io.Discard, strings.NewReader(said))
	})
}

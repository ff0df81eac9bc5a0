package host

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

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

// The test expects a possible major number or an error from any content of the kernel's list of
// devices.
func FuzzCapabilityMajor(f *testing.F) {
	for _, list := range []string{
		"Character devices:\n195 nvidia\n234 nvidia-caps\n\nBlock devices:\n259 nvidia\n", "", "4096 nvidia-caps", "-1 nvidia-caps",
		"195 nvidia-caps x", "Block devices:\n195 nvidia-caps",
	} {
		f.Add([]byte(list))
	}
	proc := f.TempDir()
	f.Fuzz(func(t *testing.T, list []byte) {
		if err := os.WriteFile(filepath.Join(proc, "devices"), list, 0o600); err != nil {
			t.Fatal(err)
		}
		if m, err := CapabilityMajor(nvidia.Paths{Proc: proc}); err == nil && m >= 1<<12 {
			t.Errorf("%q: nvidia-caps has %d", list, m)
		}
	})
}

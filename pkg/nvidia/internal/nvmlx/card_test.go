package nvmlx

import (
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestBusIDMatchesNVMLFormat(t *testing.T) {
	for address, want := range map[device.PCIAddress]string{"0000:1b:00.0": "00000000:1B:00.0", "10000:c3:00.0": "00010000:C3:00.0"} {
		if got := BusID(address); got != want {
			t.Errorf("%s becomes %s", address, got)
		}
	}
}

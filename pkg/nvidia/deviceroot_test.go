package nvidia_test

import (
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

func TestDevRoot(t *testing.T) {
	h := nvidiatest.NewHost(t)
	p := h.Paths().WithDefaults()
	if got := p.DeviceRoot(); got != p.DriverRoot {
		t.Errorf("dev root is %s, want the driver root with its own dev", got)
	}
	h.Remove("driver/dev/nvidiactl")
	if got := p.DeviceRoot(); got != "/" {
		t.Errorf("dev root is %s, want /", got)
	}
	for given, want := range map[string]string{"/host": "/host", "/host/dev": "/host", "/host/dev/": "/host", "/dev": "/"} {
		p.DevRoot = given
		if got := p.DeviceRoot(); got != want {
			t.Errorf("dev root %s is taken as %s, want %s", given, got, want)
		}
	}
}

package bind

import (
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// During an update the older instance watches the GPU. An admin must not end it.
func TestErrorSaysThatAnotherInstanceHasTheGPU(t *testing.T) {
	instance, other := nvidia.Process{PID: 12, Name: "gpu-kubelet-plu", Plugin: true}, nvidia.Process{PID: 77, Name: "python"}
	for _, c := range []struct {
		users []nvidia.Process
		want  string
	}{
		{[]nvidia.Process{instance}, ": only this plugin has it open, for a scan or until its update ends: the kubelet retries; " +
			"it is open in gpu-kubelet-plu (process 12, of this driver)"},
		{[]nvidia.Process{instance, other}, ": end the processes; it is open in gpu-kubelet-plu (process 12, of this driver), " +
			"python (process 77)"},
		{[]nvidia.Process{other}, ": end the processes; it is open in python (process 77)"},
	} {
		err := order{Op: opBind, Card: "0000:1b:00.0"}.fail(device.FailureInUse, "processes use the GPU", c.users...)
		if !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
}

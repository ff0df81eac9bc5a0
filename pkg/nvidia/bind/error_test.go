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
		{[]nvidia.Process{instance}, "only this plugin has it open, for a scan or until its update ends: the kubelet retries: "},
		{[]nvidia.Process{instance, other}, ": end "},
		{[]nvidia.Process{other}, ": end python (process 77)"},
	} {
		err := &Error{Op: "bind to VFIO gpu", Code: device.FailureInUse, Message: "processes use the GPU", Users: c.users}
		if !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
}

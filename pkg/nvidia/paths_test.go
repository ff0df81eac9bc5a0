package nvidia

import (
	"testing"
)

func TestHostPathsAndVisiblePathsAreInverse(t *testing.T) {
	for _, tc := range []struct {
		name          string
		paths         Paths
		visible, host string
	}{
		{"plain host", Paths{}, "/usr/lib64/libcuda.so.1", "/usr/lib64/libcuda.so.1"},
		{"host's root seen under another name", Paths{DriverRoot: "/driver-root", HostDriverRoot: "/"}, "/driver-root/usr/lib64/libcuda.so.1",
			"/usr/lib64/libcuda.so.1"},
		{"a prefix ends at a separator", Paths{DriverRoot: "/driver-root", HostDriverRoot: "/run/nvidia/driver"}, "/driver-rootless/x",
			"/driver-rootless/x"},
		{"driver container", Paths{DriverRoot: "/driver-root", HostDriverRoot: "/run/nvidia/driver/"}, "/driver-root/usr/bin/nvidia-smi",
			"/run/nvidia/driver/usr/bin/nvidia-smi"},
		{"device node of a driver container", Paths{DriverRoot: "/driver-root", HostDriverRoot: "/run/nvidia/driver"},
			"/driver-root/dev/nvidia0", "/run/nvidia/driver/dev/nvidia0"},
		{"device node of the host", Paths{DriverRoot: "/driver-root", HostDriverRoot: "/run/nvidia/driver"}, "/dev/nvidia0", "/dev/nvidia0"},
		{"device node of the host, driver in the host's root", Paths{DriverRoot: "/driver-root", HostDriverRoot: "/"}, "/dev/nvidia0",
			"/dev/nvidia0"},
		{"device node of the host, seen in the driver root", Paths{DriverRoot: "/driver-root", HostDriverRoot: "/", DevRoot: "/driver-root"},
			"/driver-root/dev/nvidia0", "/dev/nvidia0"},
		{"hook", Paths{DriverRoot: "/driver-root", HostDriverRoot: "/", HookPath: "/opt/nvidia-cdi-hook"}, "/opt/nvidia-cdi-hook",
			"/opt/nvidia-cdi-hook"},
		{"driver root itself", Paths{DriverRoot: "/driver-root", HostDriverRoot: "/run/nvidia/driver"}, "/driver-root", "/run/nvidia/driver"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := tc.paths.WithDefaults().Host(tc.visible); got != tc.host {
				t.Errorf("host path of %s is %s, want %s", tc.visible, got, tc.host)
			}
			if got := tc.paths.Mapper()(tc.host); got != tc.visible {
				t.Errorf("visible path of %s is %s, want %s", tc.host, got, tc.visible)
			}
		})
	}
}

package host

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

func TestCapabilityNodesAreCreatedAndReplaced(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with the driver's numbers")
	}
	h := nvidiatest.NewHost(t)
	f := nvidiatest.NewMIG(h, 1)
	f.Partition(t, 19, 0, 1, 0)
	p := h.Paths().WithDefaults()
	if err := MakeCapabilityNodes(p, 1, 1, 0); err == nil || !strings.Contains(err.Error(), "proc/devices") {
		t.Errorf("without the list of devices: %v", err)
	}
	h.File("proc/devices", "Character devices:\n195 nvidia\n\nBlock devices:\n")
	if err := MakeCapabilityNodes(p, 1, 1, 0); err == nil || !strings.Contains(err.Error(), "does not list it") {
		t.Errorf("without the driver's major number: %v", err)
	}
	for _, major := range []uint64{0, 1} { // harmless numbers, of which the second simulates a module reload
		h.File("proc/devices", "Character devices:\n  "+string(rune('0'+major))+" nvidia-caps\n")
		for range 2 {
			if err := MakeCapabilityNodes(p, 1, 1, 0); err != nil {
				t.Fatal(err)
			}
		}
		for _, name := range []string{"nvidia-cap147", "nvidia-cap148"} {
			info, err := os.Lstat(filepath.Join(h.Root, "driver/dev/nvidia-caps", name))
			if err != nil || info.Mode().Perm() != 0o444 || hostfile.DeviceNumber(info)>>8 != major {
				t.Errorf("%s: %v, %v", name, info, err)
			}
		}
	}
}

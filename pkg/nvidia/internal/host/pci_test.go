package host

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

// A GPU of a PCI class that this driver does not know is one if NVIDIA's kernel driver has it.
func TestDriverDecidesAboutUnknownClass(t *testing.T) {
	h := nvidiatest.EmptyHost(t)
	function := func(address, class, driver string) {
		dir := "sys/bus/pci/devices/" + address
		h.File(dir+"/vendor", "0x10de\n")
		h.File(dir+"/class", class+"\n")
		if driver != "" {
			h.Link("../../drivers/"+driver, dir+"/driver")
		}
	}
	function("0000:01:00.0", "0x030200", "")
	function("0000:02:00.0", "0x120000", "nvidia") // a processing accelerator
	function("0000:03:00.0", "0x120000", "")
	function("0000:04:00.0", "0x068000", "nvidia-nvswitch")
	function("0000:05:00.1", "0x040300", "snd_hda_intel")
	got, err := GPUs(filepath.Join(h.Root, "sys"))
	if want := []device.PCIAddress{"0000:01:00.0", "0000:02:00.0"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
}

package scan

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// withVFIO loads the module vfio_pci.
func withVFIO(t *testing.T, p nvidia.Paths) nvidia.Paths {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(p.Sysfs, "module/vfio_pci/drivers/pci:vfio-pci"), 0o755); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestMissingModuleIsTheReason(t *testing.T) {
	p := nvidiatest.NewSite(t, "vfio-awkward", layout.Container, "").Paths()
	p.Passthrough = true
	without := Fingerprint(p)
	if g := readPassthrough(t.Context(), p)[0]; g.Passthrough != nil || !strings.Contains(g.NoPassthrough, "modprobe vfio_pci") {
		t.Errorf("%+v", g)
	}
	withVFIO(t, p)
	if Fingerprint(p) == without {
		t.Error("no scan would find that the module is loaded")
	}
	if g := readPassthrough(t.Context(), p)[0]; g.Passthrough == nil {
		t.Errorf("%+v", g)
	}
}

func TestModesetOnAnOldDriverIsTheReason(t *testing.T) {
	s := nvidiatest.NewSiteOf(t, graphicsNode(), layout.Container, "")
	p := withVFIO(t, s.Paths())
	p.Passthrough = true
	set := func(version string, modeset bool) string {
		s.Change(func(c *layout.Config, f *state.File) error {
			c.Node.DRMModeset = modeset
			for i := range c.Node.GPUs {
				c.Node.GPUs[i].IOMMUGroup, c.Node.GPUs[i].ResetMethod = new(uint32(i)), "flr bus"
			}
			return errors.Join(c.Save(), f.Load(version, "", true))
		})
		withVFIO(t, p)
		return readPassthrough(t.Context(), p)[0].NoPassthrough
	}
	if why := set("580.95.05", true); !strings.Contains(why, "modeset=0") || !strings.Contains(why, "580.105.08") {
		t.Errorf("the reason is %q, want the ways out", why)
	}
	before := Fingerprint(p)
	if why := set("580.95.05", false); why != "" {
		t.Errorf("with modeset off: %s", why)
	}
	if Fingerprint(p) == before {
		t.Error("no scan would find that modeset is off now")
	}
	for _, version := range []string{"580.105.08", "595.45.04"} {
		if why := set(version, true); why != "" {
			t.Errorf("driver %s: %s", version, why)
		}
	}
}

func TestPassthroughIsAddedOnlyIfItIsOn(t *testing.T) {
	p := withVFIO(t, nvidiatest.NewSite(t, "vfio-awkward", layout.Container, "").Paths())
	listed := nvidia.Node{GPUs: []nvidia.GPU{{GPU: device.GPU{PCIAddress: "0000:21:00.0", UUID: "GPU-1"}}}}
	if got, err := addPassthrough(t.Context(), p, listed, nil); err != nil || got.GPUs[0].Passthrough != nil || got.Passthrough != nil {
		t.Errorf("off: %+v, %v", got, err)
	}
	p.Passthrough = true
	failure := errors.New("NVML failed")
	if _, err := addPassthrough(t.Context(), p, nvidia.Node{}, failure); !errors.Is(err, failure) {
		t.Error(err)
	}
	node, err := addPassthrough(t.Context(), p, listed, nil)
	if err != nil || len(node.Passthrough) != 5 {
		t.Fatalf("%+v, %v", node.Passthrough, err)
	}
	facts := node.GPUs[0].Passthrough
	if facts == nil || facts.VendorID != 0x10de || facts.DeviceID == 0 || !facts.HasDriver || facts.BoundByAdmin {
		t.Errorf("facts of the GPU that NVML lists: %+v", facts)
	}
	for address, want := range map[device.PCIAddress]string{
		"0000:22:00.0": "", "0000:61:00.0": "the kernel cannot reset it", "0000:62:00.0": "virtual functions are enabled",
		"0000:a1:00.0": "0000:a2:00.0", "0000:a2:00.0": "0000:a1:00.0",
	} {
		for _, g := range node.Passthrough {
			if g.PCIAddress != address {
				continue
			}
			if (g.Passthrough == nil) != (want != "") || !strings.Contains(g.NoPassthrough, want) || g.PCIeRoot == "" || g.NUMANode == nil {
				t.Errorf("%+v, want %q", g, want)
			}
		}
	}
	coherentNode := nvidia.Node{GPUs: []nvidia.GPU{{GPU: device.GPU{PCIAddress: "0000:21:00.0", UUID: "GPU-1", AddressingMode: "ATS"}}}}
	if got, _ := addPassthrough(t.Context(), p, coherentNode, nil); got.GPUs[0].Passthrough != nil ||
		!strings.Contains(got.GPUs[0].NoPassthrough, "when the host boots") {
		t.Errorf("%+v", got.GPUs[0].GPU)
	}
}

// Without NVIDIA's driver, the error of the scan says which GPUs virtual machines can use.
func TestScanWithoutDriverReportsPassthrough(t *testing.T) {
	p := withVFIO(t, nvidiatest.NewSite(t, "vfio-awkward", layout.Container, "").Paths())
	p.DriverRoot, p.Passthrough = t.TempDir(), true
	_, err := describe(scanNode(context.Background(), p)).result()
	var unready *nvidia.NotReadyError
	if !errors.As(err, &unready) || len(unready.Passthrough) != 6 || unready.Passthrough[0].Passthrough == nil {
		t.Errorf("%+v", err)
	}
}

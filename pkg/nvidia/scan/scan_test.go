package scan

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

// scannerOf returns a scanner of a fake host with a fake NVML library.
func scannerOf(h nvidiatest.Host, library nvml.Interface) scanner {
	return scanner{paths: h.Paths().WithDefaults(), lib: library, path: "libnvidia-ml.so.1", limit: 10 * time.Second}
}

func TestLocateLeavesMissingFactsUnknown(t *testing.T) {
	for _, address := range []device.PCIAddress{"0000:99:00.0", "10000:01:00.0"} {
		g := device.GPU{PCIAddress: address}
		if locate(t.TempDir(), &g); g.PCIeRoot != "" || g.NUMANode != nil {
			t.Errorf("%s: %+v", address, g)
		}
	}
}

func TestFirmwareIsReadForVirtualMachinesOnly(t *testing.T) {
	h := nvidiatest.NewHost(t)
	cards := nvidiatest.TwoCards()
	cards[0].VBIOS, cards[0].ECC = "96.00.74", nvml.FEATURE_ENABLED // pending, the current mode is always enabled
	cards[1].Answers = map[string]nvml.Return{
		"nvmlDeviceGetVbiosVersion": nvml.ERROR_UNKNOWN, "nvmlDeviceGetEccMode": nvml.ERROR_NOT_SUPPORTED,
	}
	for _, passthrough := range []bool{false, true} {
		s := scannerOf(h, nvidiatest.NVML(cards...))
		s.paths.Passthrough = passthrough
		node, err := s.scan(t.Context())
		if err != nil || len(node.GPUs) != 2 {
			t.Fatal(node.GPUs, err)
		}
		got := []*device.Firmware{node.GPUs[1].Firmware, node.GPUs[0].Firmware}
		want := []*device.Firmware{nil, nil}
		if passthrough {
			want = []*device.Firmware{{VBIOS: "96.00.74", ECC: "enabled"}, {}}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("passthrough %v: %s", passthrough, diff)
		}
	}
}

func TestScanReportsNode(t *testing.T) {
	h := nvidiatest.NewHost(t)
	cards := nvidiatest.TwoCards()
	cards[1].MIG = nvidiatest.NewMIG(h, 1)
	cards[1].Major, cards[1].Addressing = 9, nvml.DEVICE_ADDRESSING_MODE_ATS
	for _, info := range []nvml.GpuInstanceProfileInfo{
		{Id: 5, SliceCount: 7, InstanceCount: 1, MultiprocessorCount: 132, CopyEngineCount: 8, DecoderCount: 7, JpegCount: 7, OfaCount: 0,
			MemorySizeMB: 81152},
		{Id: 0, SliceCount: 7, InstanceCount: 1, MultiprocessorCount: 130, CopyEngineCount: 8, DecoderCount: 7, EncoderCount: 1, OfaCount: 1,
			MemorySizeMB: 81152},
	} {
		cards[1].MIG.Profiles = append(cards[1].MIG.Profiles, nvidiatest.Profile{GpuInstanceProfileInfo: info, Size: 8, Starts: []uint32{0}})
	}
	node, err := scannerOf(h, nvidiatest.NVML(cards...)).scan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := []device.GPU{
		{
			PCIAddress: "0000:1b:00.0", UUID: cards[1].UUID, Minor: 1, ProductName: "NVIDIA L40S", Brand: "Nvidia", Architecture: "Ada Lovelace",
			CUDAComputeCapability: "9.9", AddressingMode: "ATS", MemoryBytes: 80 << 30, PCIeRoot: "pci0000:15", NUMANode: ptr.To(0),
			Engines: &device.Engines{Multiprocessors: 132, CopyEngines: 8, Decoders: 7, Encoders: 1, JPEGEngines: 7, OFAEngines: 1},
			MIG:     &device.MIG{},
		},
		{
			PCIAddress: "0000:c3:00.0", UUID: cards[0].UUID, Minor: 0, ProductName: "NVIDIA L40S", Brand: "Nvidia", Architecture: "Ada Lovelace",
			CUDAComputeCapability: "8.9", AddressingMode: "None", MemoryBytes: 80 << 30, PCIeRoot: "pci0000:bd",
		},
	}
	var got []device.GPU
	for _, g := range node.GPUs {
		if g.MIG != nil {
			g.MIG = &device.MIG{} // tested elsewhere
		}
		got = append(got, g.GPU)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if want := (device.Driver{Version: nvidiatest.Version, CUDAVersion: "13.2"}); node.Driver != want {
		t.Errorf("driver is %v, want %v", node.Driver, want)
	}
	if len(node.Problems) > 0 {
		t.Errorf("problems on a healthy node: %v", node.Problems)
	}
}

func TestEditsUseHostPaths(t *testing.T) {
	h := nvidiatest.NewHost(t)
	node, err := scannerOf(h, nvidiatest.NVML(nvidiatest.TwoCards()...)).scan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	own := specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidia1", HostPath: "/run/nvidia/driver/dev/nvidia1",
		Permissions: "rw"}}}
	if diff := cmp.Diff(own, node.GPUs[0].Edits); diff != "" {
		t.Errorf("a GPU's own edits:\n%s", diff)
	}
	var nodes, mounts []string
	for _, n := range node.Common.DeviceNodes {
		nodes = append(nodes, n.HostPath+" at "+n.Path)
	}
	for _, m := range node.Common.Mounts {
		mounts = append(mounts, m.HostPath+" at "+m.ContainerPath)
	}
	if diff := cmp.Diff([]string{
		"/run/nvidia/driver/dev/nvidia-uvm at /dev/nvidia-uvm",
		"/run/nvidia/driver/dev/nvidia-uvm-tools at /dev/nvidia-uvm-tools",
		"/run/nvidia/driver/dev/nvidiactl at /dev/nvidiactl",
	}, nodes); diff != "" {
		t.Errorf("control nodes:\n%s", diff)
	}
	if diff := cmp.Diff([]string{
		"/run/nvidia/driver/usr/lib64/libcuda.so.580.65.06 at /usr/lib64/libcuda.so.580.65.06",
		"/run/nvidia/driver/usr/lib64/libnvidia-ml.so.580.65.06 at /usr/lib64/libnvidia-ml.so.580.65.06",
	}, mounts); diff != "" {
		t.Errorf("libraries:\n%s", diff)
	}
	for _, hook := range node.Common.Hooks {
		if hook.Path != "/opt/hook/nvidia-cdi-hook" {
			t.Errorf("hook %v does not use the host's binary", hook)
		}
	}
	for _, v := range node.Common.Env {
		if strings.HasPrefix(v, "NVIDIA_VISIBLE_DEVICES") {
			t.Errorf("%s is in the common edits; the base device sets it", v)
		}
	}
}

func TestLibrariesInUnusualDirectoriesAreMounted(t *testing.T) {
	for _, dir := range driverroot.LibraryDirs() {
		t.Run(dir, func(t *testing.T) {
			h := nvidiatest.NewHost(t)
			h.Remove("driver/usr/lib64")
			for _, lib := range []string{driverroot.NVML, "libnvidia-ml.so." + nvidiatest.Version, "libcuda.so." + nvidiatest.Version} {
				h.File("driver/"+dir+"/"+lib, "no ELF")
			}
			s := scannerOf(h, nvidiatest.NVML(nvidiatest.TwoCards()...))
			var err error
			if s.path, err = host.Library(s.paths); err != nil {
				t.Fatal(err)
			}
			node, err := s.scan(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range node.Common.Mounts {
				if want := "/run/nvidia/driver/" + dir + "/"; !strings.HasPrefix(m.HostPath, want) {
					t.Errorf("%s is not under %s", m.HostPath, want)
				}
			}
		})
	}
}

func TestDRMLinksUseContainerPaths(t *testing.T) {
	h := nvidiatest.NewHost(t)
	s := scannerOf(h, nvidiatest.NVML())
	link := "../card1::" + h.Root + "/driver/dev/dri/by-path/pci-0000:1b:00.0-card"
	e := s.tidy(specs.ContainerEdits{Hooks: []*specs.Hook{{HookName: "createContainer",
		Args: []string{"nvidia-cdi-hook", "create-symlinks", "--link", link}}}})
	if want := "../card1::/dev/dri/by-path/pci-0000:1b:00.0-card"; e.Hooks[0].Args[3] != want {
		t.Errorf("link is %s, want %s", e.Hooks[0].Args[3], want)
	}
}

func TestRepeatedScansAreEqual(t *testing.T) {
	h := nvidiatest.NewHost(t)
	first, err := scannerOf(h, nvidiatest.NVML(nvidiatest.TwoCards()...)).scan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		again, err := scannerOf(h, nvidiatest.NVML(nvidiatest.TwoCards()...)).scan(t.Context())
		if diff := cmp.Diff(first, again); err != nil || diff != "" {
			t.Fatal(err, diff)
		}
	}
}

func TestScanLeavesOutOnlyFailedGPU(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*nvidiatest.Card)
		says   string
	}{
		{"lost before it has an address", func(c *nvidiatest.Card) {
			c.Answers = map[string]nvml.Return{"nvmlDeviceGetHandleByIndex": nvml.ERROR_GPU_IS_LOST}
		}, "fallen off the bus"},
		{"PCI information fails", func(c *nvidiatest.Card) {
			c.Answers = map[string]nvml.Return{"nvmlDeviceGetPciInfo": nvml.ERROR_UNKNOWN}
		},
			"PCI address"},
		{"name fails", func(c *nvidiatest.Card) {
			c.Answers = map[string]nvml.Return{"nvmlDeviceGetName": nvml.ERROR_RESET_REQUIRED}
		}, "needs a reset"},
		{"UUID fails", func(c *nvidiatest.Card) { c.Answers = map[string]nvml.Return{"nvmlDeviceGetUUID": nvml.ERROR_UNKNOWN} }, "UUID"},
		{"minor fails", func(c *nvidiatest.Card) {
			c.Answers = map[string]nvml.Return{"nvmlDeviceGetMinorNumber": nvml.ERROR_UNKNOWN}
		}, "minor"},
		{"memory fails", func(c *nvidiatest.Card) { c.Answers = map[string]nvml.Return{"nvmlDeviceGetMemoryInfo": 12345} }, "NVML error 12345"},
		{"its device node is missing", func(c *nvidiatest.Card) { c.Minor = 7 }, "nvidia-modprobe -c=7"},
		{"its address is invalid", func(c *nvidiatest.Card) { c.Bus = "somewhere" }, `PCI address "somewhere"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := nvidiatest.NewHost(t)
			cards := nvidiatest.TwoCards()
			tc.change(&cards[1])
			node, err := scannerOf(h, nvidiatest.NVML(cards...)).scan(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if len(node.GPUs) != 1 || node.GPUs[0].PCIAddress != "0000:c3:00.0" {
				t.Errorf("offered %v, want the healthy GPU", node.GPUs)
			}
			if len(node.Problems) != 1 || node.Problems[0].PCIAddress != "0000:1b:00.0" || !strings.Contains(node.Problems[0].Message, tc.says) {
				t.Errorf("problems are %v, want one of 0000:1b:00.0 with %q", node.Problems, tc.says)
			}
		})
	}
}

func TestMissingOptionalValuesKeepGPU(t *testing.T) {
	h := nvidiatest.NewHost(t)
	cards := nvidiatest.TwoCards()[:1]
	cards[0].Answers = map[string]nvml.Return{"nvmlDeviceGetBrand": nvml.ERROR_UNKNOWN, "nvmlDeviceGetArchitecture": nvml.ERROR_NOT_SUPPORTED}
	node, err := scannerOf(h, nvidiatest.NVML(cards...)).scan(t.Context())
	if err != nil || len(node.GPUs) != 1 {
		t.Fatal(err, node)
	}
	if g := node.GPUs[0]; g.Brand != "Unknown" || g.Architecture != "Unknown" || g.Engines != nil {
		t.Errorf("got %+v", g)
	}
}

func TestAddressingModeIsBestEffort(t *testing.T) {
	addressing := func(ret nvml.Return) map[string]nvml.Return {
		return map[string]nvml.Return{"nvmlDeviceGetAddressingMode": ret}
	}
	for name, c := range map[string]struct {
		change func(*nvidiatest.Card)
		absent bool
		want   string
	}{
		"HMM":                           {func(c *nvidiatest.Card) { c.Addressing = nvml.DEVICE_ADDRESSING_MODE_HMM }, false, "HMM"},
		"not supported by the platform": {func(c *nvidiatest.Card) { c.Answers = addressing(nvml.ERROR_NOT_SUPPORTED) }, false, ""},
		"an error":                      {func(c *nvidiatest.Card) { c.Answers = addressing(nvml.ERROR_UNKNOWN) }, false, ""},
		"a mode of a later driver":      {func(c *nvidiatest.Card) { c.Addressing = 7 }, false, ""},
		"a driver without the call":     {func(c *nvidiatest.Card) { c.Answers = addressing(nvml.ERROR_FUNCTION_NOT_FOUND) }, true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			h := nvidiatest.NewHost(t)
			cards := nvidiatest.TwoCards()[:1]
			c.change(&cards[0])
			library := nvidiatest.NVML(cards...)
			if c.absent {
				library.ExtensionsFunc = func() nvml.ExtendedInterface {
					return &mock.ExtendedInterface{LookupSymbolFunc: func(name string) error { return errors.New(name + " is not there") }}
				}
			}
			node, err := scannerOf(h, library).scan(t.Context())
			if err != nil || len(node.GPUs) != 1 {
				t.Fatal(err, node.Problems)
			}
			if got := node.GPUs[0].AddressingMode; got != c.want {
				t.Errorf("addressing mode %q, want %q", got, c.want)
			}
		})
	}
}

func TestScanLeavesOutOnlyHungGPU(t *testing.T) {
	for _, function := range []string{"nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"} {
		t.Run(function, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { // time passes only after all other GPUs have answered
				h := nvidiatest.NewHost(t)
				over := make(chan struct{})
				defer close(over)
				cards := nvidiatest.TwoCards()
				cards[1].Hangs, cards[1].Until = function, over
				node, err := scannerOf(h, nvidiatest.NVML(cards...)).scan(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if len(node.GPUs) != 1 || len(node.Problems) != 1 || node.Problems[0].PCIAddress != "0000:1b:00.0" ||
					!strings.Contains(node.Problems[0].Message, "has not answered for") {
					t.Errorf("got %v, %v", node.GPUs, node.Problems)
				}
			})
		})
	}
}

func TestDGXDisplayIsIgnored(t *testing.T) {
	h := nvidiatest.NewHost(t)
	cards := nvidiatest.TwoCards()
	cards[1].Name = "NVIDIA DGX Display"
	node, err := scannerOf(h, nvidiatest.NVML(cards...)).scan(t.Context())
	if err != nil || len(node.GPUs) != 1 {
		t.Errorf("%v, %v", node.GPUs, err)
	}
	if len(node.Problems) != 0 {
		t.Errorf("it must not be a problem: %v", node.Problems)
	}
}

func TestDuplicateAddressIsProblem(t *testing.T) {
	h := nvidiatest.NewHost(t)
	cards := nvidiatest.TwoCards()
	cards[0].Bus = cards[1].Bus
	node, err := scannerOf(h, nvidiatest.NVML(cards...)).scan(t.Context())
	if err != nil || len(node.GPUs) != 1 || !strings.Contains(fmt.Sprint(node.Problems), "two GPUs at this address") {
		t.Errorf("%v, %v, %v", node.GPUs, node.Problems, err)
	}
}

func TestUnlistedCardsAreExplained(t *testing.T) {
	h := nvidiatest.NewHost(t)
	h.GPUOnBus("0000:d1:00.0", "pci0000:cb", "1")
	h.Link("../../../../bus/pci/drivers/vfio-pci", "sys/devices/pci0000:cb/0000:cb:01.0/0000:d1:00.0/driver")
	h.GPUOnBus("0000:df:00.0", "pci0000:d9", "1")
	node, err := scannerOf(h, nvidiatest.NVML(nvidiatest.TwoCards()...)).scan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(node.Problems) != 2 || node.Problems[0].String() != "0000:d1:00.0: bound to the kernel driver vfio-pci, not to nvidia" ||
		!strings.HasPrefix(node.Problems[1].String(), "0000:df:00.0: on the PCI bus, but NVML does not list it") {
		t.Error(node.Problems)
	}
}

func TestAmbiguousAddressIsNotGuessed(t *testing.T) {
	h := nvidiatest.NewHost(t)
	cards := nvidiatest.TwoCards()
	for i := range cards {
		cards[i].Answers = map[string]nvml.Return{"nvmlDeviceGetHandleByIndex": nvml.ERROR_GPU_IS_LOST}
	}
	node, err := scannerOf(h, nvidiatest.NVML(cards...)).scan(t.Context())
	if err != nil || len(node.Problems) != 2 || node.Problems[0].PCIAddress != "" || node.Problems[1].PCIAddress != "" {
		t.Error(node.Problems, err)
	}
}

func TestNotReadyErrorHasReasonAndRemedy(t *testing.T) {
	for _, tc := range []struct {
		name   string
		answer nvml.Return
		change func(nvidiatest.Host)
		says   string
		typed  bool
	}{
		{"module not loaded", nvml.ERROR_DRIVER_NOT_LOADED, nil, "modprobe nvidia", true},
		{"library of another version", nvml.ERROR_LIB_RM_VERSION_MISMATCH, nil, "different versions", true},
		{"library cannot be loaded", nvml.ERROR_LIBRARY_NOT_FOUND, nil, "cannot be loaded", true},
		{"no permission", nvml.ERROR_NO_PERMISSION, nil, "privileged", true},
		{"unknown", nvml.ERROR_UNKNOWN, nil, "unknown error", false},
		{"no libcuda yet", nvml.SUCCESS, func(h nvidiatest.Host) { h.Remove("driver/usr/lib64/libcuda.so." + nvidiatest.Version) },
			"libcuda.so.580.65.06 is not under", true},
		{"libraries of another version", nvml.SUCCESS, func(h nvidiatest.Host) {
			h.Remove("driver/usr/lib64/libcuda.so." + nvidiatest.Version)
			h.Remove("driver/usr/lib64/libnvidia-ml.so." + nvidiatest.Version)
		}, "libraries of driver 580.65.06 are not complete", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := nvidiatest.NewHost(t)
			if tc.change != nil {
				tc.change(h)
			}
			library := nvidiatest.NVML(nvidiatest.TwoCards()...)
			library.InitFunc = func() nvml.Return { return tc.answer }
			_, err := scannerOf(h, library).scan(t.Context())
			var unready *nvidia.NotReadyError
			if err == nil || errors.As(err, &unready) != tc.typed || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("error is %v, want one with %q (not ready: %v)", err, tc.says, tc.typed)
			}
		})
	}
}

func TestSystemQueryFailureFailsScan(t *testing.T) {
	for name, change := range map[string]func(*nvidiatest.Library){
		"the driver's version": func(l *nvidiatest.Library) {
			l.SystemGetDriverVersionFunc = func() (string, nvml.Return) { return "", nvml.ERROR_UNKNOWN }
		},
		"count the GPUs": func(l *nvidiatest.Library) {
			l.DeviceGetCountFunc = func() (int, nvml.Return) { return 0, nvml.ERROR_UNKNOWN }
		},
	} {
		library := nvidiatest.NVML(nvidiatest.TwoCards()...)
		change(library)
		if _, err := scannerOf(nvidiatest.NewHost(t), library).scan(t.Context()); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("error is %v, want one about %s", err, name)
		}
	}
}

func TestScanShutsDownNVML(t *testing.T) {
	library := nvidiatest.NVML(nvidiatest.TwoCards()...)
	if _, err := scannerOf(nvidiatest.NewHost(t), library).scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	if init, shutdown := len(library.InitCalls()), len(library.ShutdownCalls()); init != 1 || shutdown != 1 {
		t.Errorf("initialised %d times, shut down %d times", init, shutdown)
	}
}

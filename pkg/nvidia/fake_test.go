package nvidia

import (
	"cmp"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"golang.org/x/sys/unix"
)

const fakeVersion = "580.65.06"

// card is a GPU of the fake NVML library. answers are the return codes by NVML function, SUCCESS
// for functions not in it. The function that hangs names returns only after until is closed.
type card struct {
	bus, uuid, name string
	minor           int
	mig             *fakeMIG // nil for a card without MIG
	fabric          *nvml.GpuFabricInfo
	virtualization  nvml.GpuVirtualizationMode
	major           int // CUDA compute capability, default 8
	answers         map[string]nvml.Return
	hangs           string
	until           <-chan struct{} // nil means forever
	modes           *fakeModes      // nil for a card without these modes
	addressing      nvml.DeviceAddressingModeType
}

// fakeModes are the compute mode and persistence mode of a fake card. With ignoresChange, the card
// reports success for a change and keeps the old mode.
type fakeModes struct {
	compute       nvml.ComputeMode
	persistence   nvml.EnableState
	ignoresChange bool
}

func (c card) ask(function string) nvml.Return {
	if c.hangs == function {
		<-c.until
	}
	return c.answers[function] // SUCCESS by default
}

type fakeLibrary = mock.Interface

// hangLimit is the time limit that tests set for NVML calls, so that a hung call ends soon.
const hangLimit = 200 * time.Millisecond

// fakeNVML returns a fake NVML library that lists these cards.
func fakeNVML(cards ...card) *mock.Interface {
	return &mock.Interface{
		InitFunc:                       func() nvml.Return { return nvml.SUCCESS },
		ShutdownFunc:                   func() nvml.Return { return nvml.SUCCESS },
		SystemGetDriverVersionFunc:     func() (string, nvml.Return) { return fakeVersion, nvml.SUCCESS },
		SystemGetCudaDriverVersionFunc: func() (int, nvml.Return) { return 13020, nvml.SUCCESS },
		DeviceGetCountFunc:             func() (int, nvml.Return) { return len(cards), nvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(i int) (nvml.Device, nvml.Return) {
			return cards[i].handle(i), cards[i].ask("nvmlDeviceGetHandleByIndex")
		},
		DeviceGetHandleByPciBusIdFunc: func(bus string) (nvml.Device, nvml.Return) {
			for i, c := range cards {
				if c.bus == bus {
					return c.handle(i), c.ask("nvmlDeviceGetHandleByPciBusId")
				}
			}
			return nil, nvml.ERROR_NOT_FOUND
		},
		ExtensionsFunc: func() nvml.ExtendedInterface {
			return &mock.ExtendedInterface{LookupSymbolFunc: func(name string) error {
				if strings.HasSuffix(name, "InfoV") {
					return errors.New("an old driver") // go-nvml's handles for these functions cannot be faked
				}
				return nil
			}}
		},
	}
}

func (c card) handle(index int) nvml.Device {
	d := &mock.Device{
		GetIndexFunc: func() (int, nvml.Return) { return index, nvml.SUCCESS },
		GetPciInfoFunc: func() (nvml.PciInfo, nvml.Return) {
			info := nvml.PciInfo{}
			for i, b := range []byte(c.bus) {
				info.BusId[i] = int8(b)
			}
			return info, c.ask("nvmlDeviceGetPciInfo")
		},
		GetNameFunc:        func() (string, nvml.Return) { return c.name, c.ask("nvmlDeviceGetName") },
		GetUUIDFunc:        func() (string, nvml.Return) { return c.uuid, c.ask("nvmlDeviceGetUUID") },
		GetMinorNumberFunc: func() (int, nvml.Return) { return c.minor, c.ask("nvmlDeviceGetMinorNumber") },
		GetMemoryInfoFunc: func() (nvml.Memory, nvml.Return) {
			return nvml.Memory{Total: 80 << 30}, c.ask("nvmlDeviceGetMemoryInfo")
		},
		GetBrandFunc: func() (nvml.BrandType, nvml.Return) { return nvml.BRAND_NVIDIA, c.ask("nvmlDeviceGetBrand") },
		GetArchitectureFunc: func() (nvml.DeviceArchitecture, nvml.Return) {
			return nvml.DEVICE_ARCH_ADA, c.ask("nvmlDeviceGetArchitecture")
		},
		GetCudaComputeCapabilityFunc: func() (int, int, nvml.Return) {
			return cmp.Or(c.major, 8), 9, nvml.SUCCESS
		},
		GetAddressingModeFunc: func() (nvml.DeviceAddressingMode, nvml.Return) {
			return nvml.DeviceAddressingMode{Value: uint32(c.addressing)}, c.ask("nvmlDeviceGetAddressingMode")
		},
		IsMigDeviceHandleFunc:     func() (bool, nvml.Return) { return false, nvml.SUCCESS },
		GetMigModeFunc:            func() (int, int, nvml.Return) { return 0, 0, nvml.ERROR_NOT_SUPPORTED },
		GetVirtualizationModeFunc: func() (nvml.GpuVirtualizationMode, nvml.Return) { return c.virtualization, nvml.SUCCESS },
	}
	d.GetComputeModeFunc = func() (nvml.ComputeMode, nvml.Return) {
		if c.modes == nil {
			return 0, nvml.ERROR_NOT_SUPPORTED
		}
		return c.modes.compute, nvml.SUCCESS
	}
	d.GetPersistenceModeFunc = func() (nvml.EnableState, nvml.Return) {
		if c.modes == nil {
			return 0, nvml.ERROR_NOT_SUPPORTED
		}
		return c.modes.persistence, nvml.SUCCESS
	}
	d.SetComputeModeFunc = func(to nvml.ComputeMode) nvml.Return {
		if ret := c.ask("nvmlDeviceSetComputeMode"); ret != nvml.SUCCESS {
			return ret
		}
		if !c.modes.ignoresChange {
			c.modes.compute = to
		}
		return nvml.SUCCESS
	}
	no := nvml.ERROR_NOT_SUPPORTED
	d.GetFieldValuesFunc = func([]nvml.FieldValue) nvml.Return { return no }
	d.GetRemappedRowsFunc = func() (int, int, bool, bool, nvml.Return) { return 0, 0, false, false, no }
	d.GetRetiredPagesPendingStatusFunc = func() (nvml.EnableState, nvml.Return) { return 0, no }
	d.GetTotalEccErrorsFunc = func(nvml.MemoryErrorType, nvml.EccCounterType) (uint64, nvml.Return) { return 0, no }
	d.GetTotalEnergyConsumptionFunc = func() (uint64, nvml.Return) { return 0, no }
	d.GetSupportedEventTypesFunc = func() (uint64, nvml.Return) { return 0, no }
	d.GetGpuFabricInfoFunc = func() (nvml.GpuFabricInfo, nvml.Return) {
		if c.fabric == nil {
			return nvml.GpuFabricInfo{}, nvml.ERROR_NOT_SUPPORTED
		}
		return *c.fabric, nvml.SUCCESS
	}
	if c.mig != nil {
		c.mig.install(d)
	}
	return d
}

// twoCards returns two fake cards. As on real nodes, their indices and minor numbers do not follow
// the order of their PCI addresses.
func twoCards() []card {
	return []card{
		{bus: "00000000:C3:00.0", uuid: "GPU-00000000-0000-0000-0000-0000000000c3", name: "NVIDIA L40S", minor: 0},
		{bus: "00000000:1B:00.0", uuid: "GPU-00000000-0000-0000-0000-00000000001b", name: "NVIDIA L40S", minor: 1},
	}
}

// fakeHost is a temporary directory with the files that a scan reads: a driver root with its own
// dev, sysfs and proc.
type fakeHost struct {
	t    *testing.T
	root string
}

func newFakeHost(t *testing.T) fakeHost {
	t.Helper()
	h := fakeHost{t, t.TempDir()}
	for _, lib := range []string{"libnvidia-ml.so.1", "libnvidia-ml.so." + fakeVersion, "libcuda.so." + fakeVersion} {
		h.file("driver/usr/lib64/"+lib, "no ELF")
	}
	for _, node := range []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia1"} {
		h.node("driver/dev/" + node)
	}
	h.file("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  "+fakeVersion+"\n")
	h.gpuOnBus("0000:1b:00.0", "pci0000:15", "0")
	h.gpuOnBus("0000:c3:00.0", "pci0000:bd", "-1")
	h.file("sys/devices/pci0000:15/0000:07:00.0/vendor", "0x10de\n")
	h.file("sys/devices/pci0000:15/0000:07:00.0/class", "0x068000\n") // an NVSwitch
	h.link("../../../devices/pci0000:15/0000:07:00.0", "sys/bus/pci/devices/0000:07:00.0")
	return h
}

func (h fakeHost) paths() Paths {
	return Paths{
		DriverRoot: filepath.Join(h.root, "driver"), HostDriverRoot: "/run/nvidia/driver",
		Sysfs: filepath.Join(h.root, "sys"), Proc: filepath.Join(h.root, "proc"), HookPath: "/opt/hook/nvidia-cdi-hook",
	}
}

func (h fakeHost) scanner(library nvml.Interface) scanner {
	return scanner{paths: h.paths().withDefaults(), lib: library, path: "libnvidia-ml.so.1", limit: 10 * time.Second}
}

func (h fakeHost) gpuOnBus(address, root, numa string) {
	dir := "sys/devices/" + root + "/" + root[3:] + ":01.0/" + address
	h.file(dir+"/vendor", "0x10de\n")
	h.file(dir+"/class", "0x030200\n")
	h.file(dir+"/numa_node", numa+"\n")
	h.link("../../../"+dir[len("sys/"):], "sys/bus/pci/devices/"+address)
}

// node creates a character device with the number 0:0, because any user may create this one.
func (h fakeHost) node(path string) {
	h.t.Helper()
	h.parent(path)
	if err := unix.Mknod(filepath.Join(h.root, path), unix.S_IFCHR|0o666, 0); err != nil {
		h.t.Fatal(err)
	}
}

func (h fakeHost) file(path, content string) {
	h.t.Helper()
	h.parent(path)
	if err := os.WriteFile(filepath.Join(h.root, path), []byte(content), 0o600); err != nil {
		h.t.Fatal(err)
	}
}

func (h fakeHost) link(target, path string) {
	h.t.Helper()
	h.parent(path)
	if err := os.Symlink(target, filepath.Join(h.root, path)); err != nil {
		h.t.Fatal(err)
	}
}

func (h fakeHost) parent(path string) {
	h.t.Helper()
	if err := os.MkdirAll(filepath.Dir(filepath.Join(h.root, path)), 0o750); err != nil {
		h.t.Fatal(err)
	}
}

func (h fakeHost) remove(path string) {
	h.t.Helper()
	if err := os.RemoveAll(filepath.Join(h.root, path)); err != nil {
		h.t.Fatal(err)
	}
}

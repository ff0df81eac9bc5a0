package layout

import (
	"fmt"
	"os"
	"sort"
	"strings"
)

// The driver numbers its MIG capabilities with one counter: two for MIG as a whole, then 15 GPU
// instances for every GPU, each with 8 compute instances. Instances that do not exist have numbers
// too (open-gpu-kernel-modules, kernel-open/nvidia/nv-caps.c).
const (
	capGPUs, capGIs, capCIs = 32, 15, 8
	capConfig, capMonitor   = 1, 2
	capFirst                = 3
	capIMEX                 = capFirst + capGPUs*capGIs*(1+capCIs)
)

// applyProc creates the simulated files of /proc.
func (c *Config) applyProc(v view) error {
	m, err := chooseMajors()
	if err != nil {
		return err
	}
	devices, err := c.procDevices(v, m)
	if err != nil {
		return err
	}
	if err := writeFile(c.path("proc", "devices"), devices, 0o644); err != nil {
		return err
	}
	if err := c.copyBootID(); err != nil {
		return err
	}
	driver := tree{}
	if v.loaded {
		c.drawProcDriver(driver, v)
	}
	return driver.apply(c.path("proc", "driver"))
}

// copyBootID copies the boot ID that the machine shows into the layout. A container's own /proc may
// show another boot ID, because a file may be bind-mounted over the machine's.
func (c *Config) copyBootID() error {
	const name = "sys/kernel/random/boot_id"
	id, err := os.ReadFile("/proc/" + name)
	if err != nil {
		return err
	}
	return writeFile(c.path("proc", name), string(id), 0o444)
}

// drawProcDriver adds to t the files that /proc/driver has while the driver is loaded.
func (c *Config) drawProcDriver(t tree, v view) {
	read := func(name, content string) { t.file(name, content, 0o444) }
	read(
		"nvidia/version",
		"NVRM version: NVIDIA UNIX x86_64 Kernel Module  "+v.version+"  Thu Jan  1 00:00:00 UTC 1970\nGCC version:  gcc version 12.2.0\n",
	)
	read("nvidia/params", procParams)
	read("nvidia/capabilities/mig/config", capability(capConfig, 0o400))
	read("nvidia/capabilities/mig/monitor", capability(capMonitor, 0o444))
	read("nvidia/capabilities/fabric-imex-mgmt", capability(capIMEX, 0o400))
	read("nvidia-nvlink/capabilities/fabric-mgmt", capability(0, 0o400))
	read("nvidia-caps/mig-minors", migMinors())
	read("nvidia-caps/nvlink-minors", "fabric-mgmt 0\n")
	read("nvidia-caps/sys-minors", fmt.Sprintf("fabric-imex-mgmt %d\n", capIMEX))
	for i, card := range c.Node.GPUs {
		if v.gpus[i].attached {
			read("nvidia/gpus/"+card.PCI+"/information", gpuInformation(card.PCI, v.gpus[i], v.version))
			mig := fmt.Sprintf("nvidia/capabilities/gpu%d/mig", v.gpus[i].minor)
			t.folder(mig)
			for _, c := range v.gpus[i].capabilities {
				read(mig+"/"+c.name+"/access", capability(int(c.minor), 0o444))
			}
		}
	}
}

// procDevices returns the text of /proc/devices: the machine's own devices, plus the simulated
// driver's devices while the driver is loaded.
func (c *Config) procDevices(v view, m majors) (string, error) {
	own, err := os.ReadFile("/proc/devices")
	if err != nil {
		return "", err
	}
	characters, blocks, found := strings.Cut(string(own), "\nBlock devices:\n")
	if !found {
		return "", fmt.Errorf("/proc/devices has no section %q", "Block devices:")
	}
	type line struct {
		major uint32
		name  string
	}
	var lines []line
	for text := range strings.SplitSeq(characters, "\n") {
		var l line
		if n, _ := fmt.Sscanf(text, "%d %s", &l.major, &l.name); n == 2 && !strings.HasPrefix(l.name, "nvidia") {
			lines = append(lines, l)
		}
	}
	if v.loaded {
		lines = append(lines, line{majorNVIDIA, "nvidia"}, line{majorNVIDIA, "nvidiactl"}, line{majorNVIDIA, "nvidia-modeset"},
			line{m.uvm, "nvidia-uvm"}, line{m.caps, "nvidia-caps"}, line{m.imex, "nvidia-caps-imex-channels"})
		if c.hasNVSwitch() {
			lines = append(lines, line{m.nvswitch, "nvidia-nvswitch"})
		}
	}
	sort.SliceStable(lines, func(i, j int) bool { return lines[i].major < lines[j].major })
	var text strings.Builder
	text.WriteString("Character devices:\n")
	for _, l := range lines {
		fmt.Fprintf(&text, "%3d %s\n", l.major, l.name)
	}
	return text.String() + "\nBlock devices:\n" + blocks, nil
}

func (c *Config) hasNVSwitch() bool {
	for _, device := range c.Node.Others {
		if device.Vendor == "0x10de" && device.Class == "0x068000" {
			return true
		}
	}
	return false
}

// capability returns the content of a MIG capability file. Like the real driver, it prints the mode
// in decimal.
func capability(minor, mode int) string {
	return fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: %d\nDeviceFileModify: 1\n", minor, mode)
}

func migMinors() string {
	var text strings.Builder
	fmt.Fprintf(&text, "config %d\nmonitor %d\n", capConfig, capMonitor)
	minor := capFirst
	for gpu := range capGPUs {
		for gi := range capGIs {
			fmt.Fprintf(&text, "gpu%d/gi%d/access %d\n", gpu, gi, minor)
			minor++
			for ci := range capCIs {
				fmt.Fprintf(&text, "gpu%d/gi%d/ci%d/access %d\n", gpu, gi, ci, minor)
				minor++
			}
		}
	}
	return text.String()
}

// gpuInformation returns the text of a GPU's information file, with the same separators as the real
// driver (kernel-open/nvidia/nv-procfs.c).
func gpuInformation(address string, gpu gpuView, version string) string {
	return fmt.Sprintf("Model: \t\t %s\nIRQ:   \t\t %d\nGPU UUID: \t %s\nVideo BIOS: \t %s\nBus Type: \t PCIe\nDMA Size: \t 52 bits\n"+
		"DMA Mask: \t 0xfffffffffffff\nBus Location: \t %s\nDevice Minor: \t %d\nGPU Firmware: \t %s\nGPU Excluded:\t No\n",
		gpu.product, 100+gpu.minor, gpu.uuid, "??.??.??.??.??", address, gpu.minor, version)
}

const procParams = `ModifyDeviceFiles: 1
DeviceFileUID: 0
DeviceFileGID: 0
DeviceFileMode: 438
EnableMSI: 1
PreserveVideoMemoryAllocations: 0
ImexChannelCount: 2048
CreateImexChannel0: 0
RegistryDwords: ""
RegistryDwordsPerDevice: ""
RmMsg: ""
GpuBlacklist: ""
TemporaryFilePath: ""
ExcludedGpus: ""
`

package nvmlx

import (
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// MIGMode reads the MIG mode of a card. The result is nil for a card without MIG.
func MIGMode(lib nvml.Interface, card nvml.Device) (*device.MIG, error) {
	if !Has(lib, "nvmlDeviceGetMigMode") {
		return nil, nil
	}
	current, pending, ret := card.GetMigMode()
	if ret == nvml.ERROR_NOT_SUPPORTED {
		return nil, nil
	}
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("read the MIG mode: %w", ToError(ret))
	}
	return &device.MIG{Enabled: current == nvml.DEVICE_MIG_ENABLE, Pending: pending == nvml.DEVICE_MIG_ENABLE}, nil
}

// CString converts the text of a C array.
func CString(chars []int8) string {
	var text []byte
	for _, c := range chars {
		if c == 0 {
			break
		}
		text = append(text, byte(c)) //nolint:gosec // the bytes of a C string
	}
	return string(text)
}

// FabricInfo reads the state of a card's NVLink fabric. nvml.h defines it for Hopper or newer, so
// it is not supported on a card that says that it is older, whatever its driver answers.
func FabricInfo(lib nvml.Interface, card nvml.Device) (state uint8, status, ret nvml.Return) {
	if architecture, ret := card.GetArchitecture(); ret == nvml.SUCCESS && architecture < nvml.DEVICE_ARCH_HOPPER {
		return 0, nvml.SUCCESS, nvml.ERROR_NOT_SUPPORTED
	}
	if Has(lib, "nvmlDeviceGetGpuFabricInfoV") {
		info, ret := card.GetGpuFabricInfoV().V2()
		return info.State, nvml.Return(info.Status), ret //nolint:gosec // NVML's own number
	}
	if !Has(lib, "nvmlDeviceGetGpuFabricInfo") {
		return 0, nvml.SUCCESS, nvml.ERROR_FUNCTION_NOT_FOUND
	}
	info, ret := card.GetGpuFabricInfo()
	return info.State, nvml.Return(info.Status), ret //nolint:gosec // NVML's own number
}

// BusID converts a PCI address to NVML's format.
func BusID(a device.PCIAddress) string {
	domain, rest, _ := strings.Cut(string(a), ":")
	for len(domain) < 8 {
		domain = "0" + domain
	}
	return strings.ToUpper(domain + ":" + rest)
}

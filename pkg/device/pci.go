package device

import (
	"fmt"
	"regexp"
	"strings"
)

// PCIAddress is the address of a PCI function as sysfs writes it: "0000:1b:00.0", in lower case,
// with at least four domain digits.
type PCIAddress string

var pciAddressForm = regexp.MustCompile(`^([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])$`)

// ParsePCIAddress parses an address as sysfs or NVML writes it. NVML uses upper case and eight
// domain digits. A domain that needs more than four digits keeps all of them.
func ParsePCIAddress(s string) (PCIAddress, error) {
	m := pciAddressForm.FindStringSubmatch(strings.ToLower(s))
	if m == nil {
		return "", fmt.Errorf("PCI address %q: want domain:bus:device.function in hexadecimal, as in 0000:1b:00.0", s)
	}
	domain := strings.TrimLeft(m[1], "0")
	for len(domain) < 4 {
		domain = "0" + domain
	}
	return PCIAddress(fmt.Sprintf("%s:%s:%s.%s", domain, m[2], m[3], m[4])), nil
}

// WholeName returns the device name of the GPU at this address.
func (a PCIAddress) WholeName() string { return "gpu-" + a.label() }

// label returns the address with "-" instead of ":" and ".", as it occurs in device names, which
// must be DNS labels.
func (a PCIAddress) label() string {
	return strings.NewReplacer(":", "-", ".", "-").Replace(string(a))
}

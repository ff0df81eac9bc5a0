package device

import (
	"fmt"
	"regexp"
	"strings"
)

// PCIAddress is a PCI function's address in sysfs form: "0000:1b:00.0", lower case, the domain in at least four digits.
// NVML writes the same address with eight domain digits and in upper case; [ParsePCIAddress] accepts both.
type PCIAddress string

var pciAddressForm = regexp.MustCompile(`^([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])$`)

// ParsePCIAddress brings an address to sysfs form. A domain that needs more than four digits keeps them all.
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

// WholeName is the device name of the GPU at this address.
func (a PCIAddress) WholeName() string { return "gpu-" + a.label() }

// label is the address as a part of a DNS label.
func (a PCIAddress) label() string {
	return strings.NewReplacer(":", "-", ".", "-").Replace(string(a))
}

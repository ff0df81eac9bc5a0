package v1beta1

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// MPSConfig holds the settings of strategy MPS. Each setting becomes a default of the MPS control
// daemon. A client process may set a lower limit for itself.
type MPSConfig struct {
	// DefaultActiveThreadPercentage is the part of the device's compute that one process may use: 1 to
	// 100 percent. Unset or 0 means no limit.
	DefaultActiveThreadPercentage *int `json:"defaultActiveThreadPercentage,omitempty"`
	// DefaultPinnedDeviceMemoryLimit is the memory that one process may use on each device, at least
	// 1Mi. Unset means no limit.
	DefaultPinnedDeviceMemoryLimit *MemoryLimit `json:"defaultPinnedDeviceMemoryLimit,omitempty"`
	// DefaultPerDevicePinnedMemoryLimit overrides DefaultPinnedDeviceMemoryLimit for single devices.
	// The key is a device's UUID (GPU-… or MIG-…) or its index. The index counts the claim's devices
	// with this configuration from 0, in the order of their UUIDs.
	DefaultPerDevicePinnedMemoryLimit map[string]MemoryLimit `json:"defaultPerDevicePinnedMemoryLimit,omitempty"`
	// MultiUser lets processes of different Linux users share the device.
	MultiUser bool `json:"multiUser,omitempty"`
}

// MemoryLimit is a Quantity whose text has a limited length and exponent. A Quantity with an
// exponent of a billion would take hours to compare.
type MemoryLimit struct{ resource.Quantity }

// MemoryPattern matches the text of every amount of memory that a device can have, in all notations
// of a Quantity.
const MemoryPattern = `^[+-]?[0-9]{1,18}([.][0-9]{0,9})?([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$`

var memoryText = regexp.MustCompile(MemoryPattern)

func (m *MemoryLimit) UnmarshalJSON(raw []byte) error {
	text := strings.Trim(string(raw), `"`)
	if !memoryText.MatchString(text) {
		return fmt.Errorf("%s is not an amount of memory: write a quantity such as 4Gi", quote(text))
	}
	return m.Quantity.UnmarshalJSON(raw)
}

// DeviceUUIDPattern matches the UUID of a GPU (nvmlDeviceGetUUID), or of a MIG device since R470,
// as NVML writes it.
const DeviceUUIDPattern = `^(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`

var deviceUUID = regexp.MustCompile(DeviceUUIDPattern)

// MinMemory is the smallest limit, because the MPS control daemon counts in whole MiB. MaxMemory is
// more than any device has, and its number of bytes fits into an int64.
const (
	MinMemory = "1Mi"
	MaxMemory = "1Pi"
)

var minMemory, maxMemory = resource.MustParse(MinMemory), resource.MustParse(MaxMemory)

func (m *MPSConfig) validate() error {
	if p := m.DefaultActiveThreadPercentage; p != nil && (*p < 0 || *p > 100) {
		return fmt.Errorf("sharing.mpsConfig.defaultActiveThreadPercentage is %d: set it to 0 to 100, where 0 is no limit", *p)
	}
	if limit := m.DefaultPinnedDeviceMemoryLimit; limit != nil {
		if err := validateMemory("sharing.mpsConfig.defaultPinnedDeviceMemoryLimit", *limit); err != nil {
			return err
		}
	}
	// Sort the keys, so that a configuration always gives the same error.
	for _, key := range slices.Sorted(maps.Keys(m.DefaultPerDevicePinnedMemoryLimit)) {
		field := "sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[" + quote(key) + "]"
		if !namesDevice(key) {
			return fmt.Errorf("%s: the key names no device: use a UUID such as GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c, or an index "+
				"such as 0", field)
		}
		if err := validateMemory(field, m.DefaultPerDevicePinnedMemoryLimit[key]); err != nil {
			return err
		}
	}
	return nil
}

// namesDevice reports whether key is a device's UUID or index. It accepts an index only as strconv
// formats it, so that no device has two keys.
func namesDevice(key string) bool {
	if deviceUUID.MatchString(key) {
		return true
	}
	index, err := strconv.ParseUint(key, 10, 16)
	return err == nil && strconv.FormatUint(index, 10) == key
}

func validateMemory(field string, limit MemoryLimit) error {
	if limit.Cmp(minMemory) < 0 {
		return fmt.Errorf("%s is %s: set it to %s or more, for example 4Gi", field, quote(limit.String()), minMemory.String())
	}
	if limit.Cmp(maxMemory) > 0 {
		return fmt.Errorf("%s is %s: no device has so much memory: set it to %s at most, or remove it", field, quote(limit.String()),
			maxMemory.String())
	}
	return nil
}

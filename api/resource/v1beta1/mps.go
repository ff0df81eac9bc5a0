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

// MPSConfig holds the settings of strategy MPS. Each is a default of the MPS control daemon, which a process may lower for itself.
type MPSConfig struct {
	// DefaultActiveThreadPercentage is the share of the device's compute that one process may use:
	// 1 to 100 percent. Left out, or 0: no limit.
	DefaultActiveThreadPercentage *int `json:"defaultActiveThreadPercentage,omitempty"`
	// DefaultPinnedDeviceMemoryLimit is the device memory that one process may use on each device: 1Mi or more. Left out: no limit.
	DefaultPinnedDeviceMemoryLimit *MemoryLimit `json:"defaultPinnedDeviceMemoryLimit,omitempty"`
	// DefaultPerDevicePinnedMemoryLimit is the same for single devices, and overrides it there. The
	// key is a device's UUID (GPU-… or MIG-…) or its index, from 0, among the devices of the claim
	// that this configuration is for, in the order of their UUIDs.
	DefaultPerDevicePinnedMemoryLimit map[string]MemoryLimit `json:"defaultPerDevicePinnedMemoryLimit,omitempty"`
	// MultiUser lets processes of different Linux users share the device.
	MultiUser bool `json:"multiUser,omitempty"`
}

// MemoryLimit is a Quantity whose text is bounded: an exponent of a billion is 13 letters in a claim, and hours of arithmetic for whoever compares it.
type MemoryLimit struct{ resource.Quantity }

// memoryText takes every size that a device can have, in each of a Quantity's notations.
var memoryText = regexp.MustCompile(`^[+-]?[0-9]{1,18}(\.[0-9]{0,9})?([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$`)

func (m *MemoryLimit) UnmarshalJSON(raw []byte) error {
	text := strings.Trim(string(raw), `"`)
	if !memoryText.MatchString(text) {
		return fmt.Errorf("%s is no amount of memory: write it as in 4Gi", quote(text))
	}
	return m.Quantity.UnmarshalJSON(raw)
}

// deviceUUID is the form in which NVML writes the UUID of a GPU (nvmlDeviceGetUUID) or of a MIG device, since R470.
var deviceUUID = regexp.MustCompile(`^(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// leastMemory is the smallest limit: the MPS control daemon counts in whole MiB. mostMemory is far beyond every device, and keeps a number of bytes a number.
var (
	leastMemory = resource.MustParse("1Mi")
	mostMemory  = resource.MustParse("1Pi")
)

func (m *MPSConfig) validate() error {
	if p := m.DefaultActiveThreadPercentage; p != nil && (*p < 0 || *p > 100) {
		return fmt.Errorf("sharing.mpsConfig.defaultActiveThreadPercentage is %d: set it to 0 to 100, where 0 is no limit", *p)
	}
	if limit := m.DefaultPinnedDeviceMemoryLimit; limit != nil {
		if err := validateMemory("sharing.mpsConfig.defaultPinnedDeviceMemoryLimit", *limit); err != nil {
			return err
		}
	}
	// In order, so that the same configuration always gives the same error.
	for _, key := range slices.Sorted(maps.Keys(m.DefaultPerDevicePinnedMemoryLimit)) {
		field := "sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[" + quote(key) + "]"
		if !namesDevice(key) {
			return fmt.Errorf("%s: the key names no device: use a UUID such as GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c, or an index such as 0", field)
		}
		if err := validateMemory(field, m.DefaultPerDevicePinnedMemoryLimit[key]); err != nil {
			return err
		}
	}
	return nil
}

// namesDevice takes an index only as strconv writes it, so that no device has two keys.
func namesDevice(key string) bool {
	if deviceUUID.MatchString(key) {
		return true
	}
	index, err := strconv.ParseUint(key, 10, 16)
	return err == nil && strconv.FormatUint(index, 10) == key
}

func validateMemory(field string, limit MemoryLimit) error {
	if limit.Cmp(leastMemory) < 0 {
		return fmt.Errorf("%s is %s: set it to %s or more, for example 4Gi", field, quote(limit.String()), leastMemory.String())
	}
	if limit.Cmp(mostMemory) > 0 {
		return fmt.Errorf("%s is %s: no device has so much memory: set it to %s at most, or remove it", field, quote(limit.String()), mostMemory.String())
	}
	return nil
}

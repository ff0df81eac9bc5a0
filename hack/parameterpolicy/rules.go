package main

import (
	"fmt"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
)

// rule limits the values of one field. In CEL, v is the field's value, which is null if it is
// unset, and o is the object that contains it.
type rule struct {
	// allows is a CEL condition. It must not fail for a value of another type.
	allows string
	// remedy completes "set it to …" in the message.
	remedy string
}

// rules has a rule for each field that does not accept every value of its type. The key is the path
// in the configuration, whatever its kind.
var rules = map[string]rule{
	"sharing.strategy": {
		allows: "v in " + list(v1beta1.SharingTimeSlicing, v1beta1.SharingMPS),
		remedy: "TimeSlicing or MPS, or remove sharing",
	},
	"sharing.timeSlicingConfig.interval": {
		allows: "v == null || v in " + list("", v1beta1.IntervalDefault, v1beta1.IntervalShort, v1beta1.IntervalMedium, v1beta1.IntervalLong),
		remedy: "Default, Short, Medium or Long",
	},
	"sharing.mpsConfig.defaultActiveThreadPercentage": {
		allows: "v == null || type(v) == int && v >= 0 && v <= 100",
		remedy: "a whole number from 0 to 100, where 0 is no limit",
	},
	"sharing.mpsConfig.defaultPinnedDeviceMemoryLimit": {
		allows: "v == null || " + isMemory,
		remedy: memoryRemedy,
	},
	"sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[]": {
		allows: isMemory,
		remedy: memoryRemedy,
	},
	"sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[key]": {
		allows: fmt.Sprintf("v.matches('%s') || v.matches('^(0|[1-9][0-9]{0,4})$') && int(v) <= 65535", v1beta1.DeviceUUIDPattern),
		remedy: "a UUID such as GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c, or an index such as 0",
	},
	"iommu.backendPolicy": {
		allows: "v == null || v in " + list("", v1beta1.IOMMULegacyOnly, v1beta1.IOMMUPreferIommuFD),
		remedy: "LegacyOnly or PreferIommuFD",
	},
}

// isMemory accepts an amount from 1Mi to 1Pi. CEL sees a number's value and not its text. So it
// accepts some notations that the plugin refuses.
const isMemory = "type(v) == string && v.matches('" + v1beta1.MemoryPattern + "') && " +
	"quantity(v).compareTo(quantity('" + v1beta1.MinMemory + "')) >= 0 && " +
	"quantity(v).compareTo(quantity('" + v1beta1.MaxMemory + "')) <= 0 || " +
	"(type(v) == int || type(v) == double) && v >= 1048576 && v <= 1125899906842624"

const memoryRemedy = "an amount of memory from " + v1beta1.MinMemory + " to " + v1beta1.MaxMemory + ", for example 4Gi"

// otherStrategy names, for each strategy, the settings that belong to the other one.
var otherStrategy = map[string]string{"TimeSlicing": "mpsConfig", "MPS": "timeSlicingConfig"}

func list[S ~string](values ...S) string {
	var quoted []string
	for _, v := range values {
		quoted = append(quoted, "'"+string(v)+"'")
	}
	return "[" + strings.Join(quoted, ", ") + "]"
}

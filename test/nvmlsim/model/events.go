package model

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// eventTypes maps the names that model files use to the nvmlEventType* values of nvml.h.
var eventTypes = map[string]uint32{
	"singleBitEcc": 0x1, "doubleBitEcc": 0x2, "pState": 0x4, "xid": 0x8, "clock": 0x10, "powerSource": 0x80, "migConfig": 0x100,
	"singleBitEccStorm": 0x200, "dramRetirement": 0x400, "dramRetirementFailure": 0x800, "nonFatalPoison": 0x1000,
	"fatalPoison": 0x2000, "gpuUnavailable": 0x4000, "recoveryAction": 0x8000,
}

// ParseEventType converts an event type's name to its nvmlEventType* value.
func ParseEventType(name string) (uint32, error) {
	if value, known := eventTypes[name]; known {
		return value, nil
	}
	return 0, fmt.Errorf("event %q is none of %s", name, strings.Join(slices.Sorted(maps.Keys(eventTypes)), ", "))
}

// ParseEventTypes converts event type names to a mask of nvmlEventType* bits.
func ParseEventTypes(names []string) (uint32, error) {
	var mask uint32
	for _, name := range names {
		value, err := ParseEventType(name)
		if err != nil {
			return 0, err
		}
		mask |= value
	}
	return mask, nil
}

// EventTypeNames returns the names of the event types in a mask.
func EventTypeNames(mask uint64) []string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(eventTypes)) {
		if mask&uint64(eventTypes[name]) != 0 {
			names = append(names, name)
		}
	}
	return names
}

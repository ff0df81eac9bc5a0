package mps

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
)

// Daemon says what an MPS control daemon should be. The zero value of a limit is no limit.
type Daemon struct {
	// ID names the daemon on its node, and its directories: lower-case letters, digits, "-" and ".", 63 characters at most.
	ID string `json:"id"`
	// Devices are the UUIDs (GPU-… or MIG-…) of the devices that clients may use. Their order is that of the ordinals which clients see.
	Devices []string `json:"devices"`
	// ThreadPercentage is the part of each device's threads that one client process may use, 1 to 100.
	ThreadPercentage *int `json:"threadPercentage,omitempty"`
	// MemoryLimits are the MiB of device memory that one client process may use, by the ordinal of the device in Devices.
	MemoryLimits map[int]uint64 `json:"memoryLimits,omitempty"`
	// MultiUser lets processes of different Linux users be clients at the same time, which takes driver 555 or later. Otherwise those of a second user
	// wait until those of the first end.
	MultiUser bool `json:"multiUser,omitempty"`
}

// maxMemory is in MiB: 2^40 is far beyond any device, and a product with 2^20 stays a number of 64 bits.
const maxMemory = 1 << 40

// maxDevices is beyond what a node holds: 16 GPUs of 7 instances, and as many again.
const maxDevices = 256

var (
	// An ID is a file name that needs no quoting and cannot lead out of its directory.
	validID = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$`)
	// The forms of NVML: a UUID, or MIG-GPU-<UUID>/<gi>/<ci> of drivers before R470.
	validDevice = regexp.MustCompile(`^(GPU|MIG)-[0-9A-Za-z/-]{1,80}$`)
)

// Validate says what makes the daemon impossible.
func (d Daemon) Validate() error {
	if err := checkID(d.ID); err != nil {
		return err
	}
	if len(d.Devices) == 0 {
		return fmt.Errorf("MPS daemon %s: it has no devices", d.ID)
	}
	if len(d.Devices) > maxDevices {
		return fmt.Errorf("MPS daemon %s: it has %d devices, more than %d", d.ID, len(d.Devices), maxDevices)
	}
	for i, uuid := range d.Devices {
		if !validDevice.MatchString(uuid) {
			return fmt.Errorf("MPS daemon %s: device %d: %.100q is not the UUID of a GPU or a MIG device", d.ID, i, uuid)
		}
		if slices.Contains(d.Devices[:i], uuid) {
			return fmt.Errorf("MPS daemon %s: device %s is named twice", d.ID, uuid)
		}
	}
	if p := d.ThreadPercentage; p != nil && (*p < 1 || *p > 100) {
		return fmt.Errorf("MPS daemon %s: the active thread percentage is %d, not 1 to 100", d.ID, *p)
	}
	for _, ordinal := range slices.Sorted(maps.Keys(d.MemoryLimits)) {
		if ordinal < 0 || ordinal >= len(d.Devices) {
			return fmt.Errorf("MPS daemon %s: there is a memory limit for device %d, but it has %d devices", d.ID, ordinal, len(d.Devices))
		}
		if limit := d.MemoryLimits[ordinal]; limit < 1 || limit > maxMemory {
			return fmt.Errorf("MPS daemon %s: the memory limit of device %d is %d MiB, not 1 to %d", d.ID, ordinal, limit, uint64(maxMemory))
		}
	}
	return nil
}

// Equal says whether the two are asked to be the same. An absent limit equals no limits at all.
func (d Daemon) Equal(other Daemon) bool {
	return d.ID == other.ID && slices.Equal(d.Devices, other.Devices) && d.MultiUser == other.MultiUser &&
		maps.Equal(d.MemoryLimits, other.MemoryLimits) &&
		(d.ThreadPercentage == nil) == (other.ThreadPercentage == nil) &&
		(d.ThreadPercentage == nil || *d.ThreadPercentage == *other.ThreadPercentage)
}

// ValidID says whether a name can be that of a daemon.
func ValidID(id string) bool { return validID.MatchString(id) }

func checkID(id string) error {
	if id == "" {
		return errors.New("an MPS daemon needs an ID")
	}
	if !validID.MatchString(id) {
		return fmt.Errorf("%.100q cannot be the ID of an MPS daemon: it must be at most 63 lower-case letters, digits, - and ., and begin and end with one of the first two", id)
	}
	return nil
}

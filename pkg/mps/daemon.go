package mps

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
)

// Daemon describes an MPS control daemon. The zero value of a limit means no limit.
type Daemon struct {
	// ID names the daemon and its directories. It is unique on the node and has at most 63 characters:
	// lower-case letters, digits, "-" and ".".
	ID string `json:"id"`
	// Devices are the UUIDs (GPU-… or MIG-…) of the devices that clients may use. A client sees them
	// as ordinals in this order.
	Devices []string `json:"devices"`
	// ThreadPercentage is the part of each device's threads that one client process may use, 1 to 100.
	ThreadPercentage *int `json:"threadPercentage,omitempty"`
	// MemoryLimits are the MiB of device memory that one client process may use, by the ordinal of the
	// device in Devices.
	MemoryLimits map[int]uint64 `json:"memoryLimits,omitempty"`
	// MultiUser lets processes of several Linux users be clients at the same time. It needs driver 555
	// or later. Without it, processes of a second user wait until those of the first end.
	MultiUser bool `json:"multiUser,omitempty"`
}

// maxMemory is the largest accepted memory limit in MiB. No device has that much memory, and the
// limit in bytes still fits into 64 bits.
const maxMemory = 1 << 40

// maxDevices is the largest accepted number of devices. It is more than a node has: 16 GPUs with 7
// MIG devices each are half of it.
const maxDevices = 256

// maxUUID is the longest accepted UUID of a device. NVML's have up to about 50 characters.
const maxUUID = 84

var (
	// validID makes an ID a file name that needs no quoting and cannot lead out of its directory.
	// Lengths are checked apart: a regular expression with a counted repetition takes 50 KB of memory.
	validID = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$`)
	// validDevice matches NVML's UUIDs: GPU-<UUID>, MIG-<UUID>, and MIG-GPU-<UUID>/<gi>/<ci> of
	// drivers before R470.
	validDevice = regexp.MustCompile(`^(GPU|MIG)-[0-9A-Za-z/-]+$`)
)

// Validate returns an error if a field of d has a value with which the supervisor could not run the
// daemon.
func (d Daemon) Validate() error {
	if err := checkID(d.ID); err != nil {
		return err
	}
	if len(d.Devices) == 0 {
		return fmt.Errorf("MPS daemon %s has no devices", d.ID)
	}
	if len(d.Devices) > maxDevices {
		return fmt.Errorf("MPS daemon %s has %d devices: at most %d are possible", d.ID, len(d.Devices), maxDevices)
	}
	for i, uuid := range d.Devices {
		if len(uuid) > maxUUID || !validDevice.MatchString(uuid) {
			return fmt.Errorf("MPS daemon %s: device %d: %.100q is not the UUID of a GPU or a MIG device", d.ID, i, uuid)
		}
		if slices.Contains(d.Devices[:i], uuid) {
			return fmt.Errorf("MPS daemon %s: device %s is listed twice", d.ID, uuid)
		}
	}
	if p := d.ThreadPercentage; p != nil && (*p < 1 || *p > 100) {
		return fmt.Errorf("MPS daemon %s: the active thread percentage is %d, not 1 to 100", d.ID, *p)
	}
	for _, ordinal := range slices.Sorted(maps.Keys(d.MemoryLimits)) {
		if ordinal < 0 || ordinal >= len(d.Devices) {
			return fmt.Errorf("MPS daemon %s has a memory limit for device %d, but only %d devices", d.ID, ordinal, len(d.Devices))
		}
		if limit := d.MemoryLimits[ordinal]; limit < 1 || limit > maxMemory {
			return fmt.Errorf("MPS daemon %s: the memory limit of device %d is %d MiB, not 1 to %d",
				d.ID, ordinal, limit, uint64(maxMemory))
		}
	}
	return nil
}

// ValidID reports whether id may be the ID of a daemon.
func ValidID(id string) bool { return len(id) <= 63 && validID.MatchString(id) }

func checkID(id string) error {
	if id == "" {
		return errors.New("an MPS daemon needs an ID")
	}
	if !ValidID(id) {
		return fmt.Errorf("%.100q cannot be the ID of an MPS daemon: use at most 63 lower-case letters, digits, - and ., "+
			"with a letter or a digit at both ends", id)
	}
	return nil
}

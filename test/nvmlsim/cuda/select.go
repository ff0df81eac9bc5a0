package cuda

import (
	"strconv"
	"strings"
)

// Select returns the devices that CUDA enumerates for the value list of CUDA_VISIBLE_DEVICES, in
// the order of list. An entry is a device number, a UUID or the beginning of a UUID. set says
// whether the variable is set at all.
//
// As in CUDA, Select ignores every entry after one that matches no device. A process gets at most
// one MIG device, and only if the first entry names it. If the variable is unset, the process gets
// all GPUs, or the first MIG device if there are no GPUs.
func (d *Driver) Select(list string, set bool) ([]Device, error) {
	visible := d.visible()
	if !set {
		return firstKind(visible), nil
	}
	var chosen []Device
	for entry := range strings.SplitSeq(list, ",") {
		device, found := find(visible, strings.TrimSpace(entry))
		if !found {
			break
		}
		for _, other := range chosen {
			if other.UUID == device.UUID {
				return nil, Errorf(NoDevice, "CUDA_VISIBLE_DEVICES=%s names %s twice", list, device.UUID)
			}
		}
		chosen = append(chosen, device)
	}
	if len(chosen) == 0 {
		return nil, Errorf(
			NoDevice,
			"CUDA_VISIBLE_DEVICES=%s names no device that this process was given (it was given %s)",
			list,
			uuids(visible),
		)
	}
	return firstKind(chosen), nil
}

func uuids(devices []Device) string {
	var all []string
	for _, device := range devices {
		all = append(all, device.UUID)
	}
	if len(all) == 0 {
		return "none"
	}
	return strings.Join(all, ", ")
}

// firstKind returns all GPUs in devices if the first device is a GPU, and only the first device if
// it is a MIG device.
func firstKind(devices []Device) []Device {
	if len(devices) > 0 && devices[0].MIG {
		return devices[:1]
	}
	var gpus []Device
	for _, device := range devices {
		if !device.MIG {
			gpus = append(gpus, device)
		}
	}
	return gpus
}

func find(devices []Device, entry string) (Device, bool) {
	if number, err := strconv.Atoi(entry); err == nil {
		if number < 0 || number >= len(devices) {
			return Device{}, false
		}
		return devices[number], true
	}
	if len(entry) <= len("GPU-") {
		return Device{}, false
	}
	for _, device := range devices {
		if strings.HasPrefix(device.UUID, entry) {
			return device, true
		}
	}
	return Device{}, false
}

package cuda

import (
	"strconv"
	"strings"
)

// Select gives the devices that CUDA enumerates for a value of CUDA_VISIBLE_DEVICES, in its order: by number, or by UUID or the beginning of one.
// As in CUDA, what follows an entry that names nothing does not count, and of MIG devices a process gets one: only the first entry, where that is one.
// A list that is not set means all GPUs, or the first MIG device where there are only those.
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
		return nil, Errorf(NoDevice, "CUDA_VISIBLE_DEVICES=%s names no device that this process was given (it was given %s)", list, uuids(visible))
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

// firstKind are the GPUs, where the first is one; else the first MIG device alone.
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

package nvidia

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

var (
	// errVanished says that NVML listed an object that was gone when it was read.
	errVanished = errors.New("it vanished during the read")
	// errUnsettled says that NVML does not list the MIG device of a new compute instance yet.
	errUnsettled = errors.New("NVML lists no MIG device for it")
)

// instanceReader reads the MIG instances of a card once. Another tool may change MIG instances at
// the same time, so instanceReader leaves out each one that vanishes during the read.
type instanceReader struct {
	*migReader
	card  nvml.Device
	minor int
	// uuids are the UUIDs of the card's MIG devices.
	uuids map[migIDs]string
	// changed says that a MIG instance vanished during the read.
	changed bool
}

// migIDs identify a MIG device by its GPU instance ID and compute instance ID.
type migIDs struct{ instance, compute uint32 }

// instances lists the GPU instances of a card with MIG mode on, sorted by ID. If another tool
// changes MIG instances meanwhile, it reads them again for about a second. Otherwise one that is
// recreated under the same ID, or has no capability file yet, could be missed.
func (m *migReader) instances(card nvml.Device, minor int) ([]device.Instance, error) {
	for pause := 10 * time.Millisecond; ; pause *= 2 {
		l := instanceReader{migReader: m, card: card, minor: minor}
		found, err := l.instances()
		if pause > time.Second || err == nil && !l.changed || err != nil && !errors.Is(err, errUnsettled) && !errors.Is(err, fs.ErrNotExist) {
			return found, err
		}
		<-time.After(pause)
	}
}

func (l *instanceReader) instances() ([]device.Instance, error) {
	kinds, err := l.readKinds(l.card)
	if err != nil {
		return nil, err
	}
	var found []device.Instance
	for _, k := range kinds {
		if k.InstanceCount == 0 {
			continue
		}
		handles, ret := l.card.GetGpuInstances(&k.GpuInstanceProfileInfo)
		l.progress()
		if isAbsent(ret) {
			continue
		}
		if ret != nvml.SUCCESS {
			return nil, fmt.Errorf("list the GPU instances of profile %d: %w", k.Id, toError(ret))
		}
		for _, handle := range handles {
			i, err := l.instance(handle)
			if errors.Is(err, errVanished) {
				l.changed = true
				continue
			}
			if err != nil {
				return nil, err
			}
			if !slices.ContainsFunc(found, func(o device.Instance) bool { return o.ID == i.ID }) {
				found = append(found, i)
			}
		}
	}
	slices.SortFunc(found, func(a, b device.Instance) int { return cmp.Compare(a.ID, b.ID) })
	return found, nil
}

// identify reads ID, profile and placement of a GPU instance and leaves all other fields empty. If
// the GPU instance is gone, the error is errVanished.
func (m *migReader) identify(handle nvml.GpuInstance) (device.Instance, error) {
	info, ret := handle.GetInfo()
	m.progress()
	if isAbsent(ret) {
		return device.Instance{}, errVanished
	}
	if ret != nvml.SUCCESS {
		return device.Instance{}, toError(ret)
	}
	return device.Instance{
		ID: info.Id, ProfileID: info.ProfileId,
		Placement: device.Placement{Start: info.Placement.Start, Size: info.Placement.Size},
	}, nil
}

// instance reads a GPU instance with its compute instances.
func (l *instanceReader) instance(handle nvml.GpuInstance) (device.Instance, error) {
	i, err := l.identify(handle)
	if err != nil {
		return device.Instance{}, fmt.Errorf("read a GPU instance: %w", err)
	}
	if i.Minor, err = l.paths.instanceMinor(l.minor, i.ID); err != nil {
		if _, ret := l.card.GetGpuInstanceById(int(i.ID)); isAbsent(ret) {
			err = errVanished
		}
		return device.Instance{}, fmt.Errorf("read GPU instance %d: %w", i.ID, err)
	}
	err = l.eachCompute(handle, i, func(kind nvml.ComputeInstanceProfileInfo, compute nvml.ComputeInstance) error {
		c, err := l.computeInstance(i, handle, kind, compute)
		if err == nil && !slices.ContainsFunc(i.Compute, func(o device.ComputeInstance) bool { return o.ID == c.ID }) {
			i.Compute = append(i.Compute, c)
		}
		return err
	})
	if err != nil {
		return device.Instance{}, fmt.Errorf("read the compute instances of GPU instance %d: %w", i.ID, err)
	}
	slices.SortFunc(i.Compute, func(a, b device.ComputeInstance) int { return cmp.Compare(a.ID, b.ID) })
	return i, nil
}

// eachCompute calls visit for every compute instance of the GPU instance. If visit returns
// errVanished, it continues with the next one. Any other error ends it.
func (m *migReader) eachCompute(
	handle nvml.GpuInstance, in device.Instance, visit func(nvml.ComputeInstanceProfileInfo, nvml.ComputeInstance) error,
) error {
	kinds, err := m.computeKinds(handle, in.ProfileID)
	if err != nil {
		return err
	}
	for _, kind := range kinds {
		if kind.InstanceCount == 0 {
			continue
		}
		handles, ret := handle.GetComputeInstances(&kind)
		m.progress()
		if isAbsent(ret) {
			continue
		}
		if ret != nvml.SUCCESS {
			return fmt.Errorf("list the compute instances of profile %d: %w", kind.Id, toError(ret))
		}
		for _, compute := range handles {
			if err := visit(kind, compute); err != nil && !errors.Is(err, errVanished) {
				return err
			}
		}
	}
	return nil
}

// computeInstance reads the compute instance of handle. The parameter in is the GPU instance that
// contains it. If the compute instance is gone, the error is errVanished.
func (l *instanceReader) computeInstance(
	in device.Instance, parent nvml.GpuInstance, kind nvml.ComputeInstanceProfileInfo, handle nvml.ComputeInstance,
) (device.ComputeInstance, error) {
	info, ret := handle.GetInfo()
	l.progress()
	if isAbsent(ret) {
		l.changed = true
		return device.ComputeInstance{}, errVanished
	}
	if ret != nvml.SUCCESS {
		return device.ComputeInstance{}, toError(ret)
	}
	c := device.ComputeInstance{
		ID: info.Id, ProfileID: info.ProfileId, Placement: device.Placement{Start: info.Placement.Start, Size: info.Placement.Size},
		Name: l.computeName(in, kind), Multiprocessors: kind.MultiprocessorCount,
	}
	var err error
	if c.UUID, err = l.uuid(migIDs{in.ID, c.ID}); err == nil {
		c.Minor, err = l.paths.computeMinor(l.minor, in.ID, c.ID)
	}
	if err != nil {
		if _, ret := parent.GetComputeInstanceById(int(c.ID)); isAbsent(ret) {
			l.changed = true
			return device.ComputeInstance{}, errVanished
		}
	}
	return c, err
}

// computeName returns the MIG device's name: the profile name of its GPU instance, such as 3g.40gb.
// If the compute instance fills only a part of the GPU instance, its number of slices comes first,
// as in 1c.3g.40gb.
func (l *instanceReader) computeName(in device.Instance, kind nvml.ComputeInstanceProfileInfo) string {
	for _, k := range l.kinds {
		if k.Id != in.ProfileID {
			continue
		}
		name := l.profileName(l.card, k)
		if kind.SliceCount < k.SliceCount {
			return fmt.Sprintf("%dc.%s", kind.SliceCount, name)
		}
		return name
	}
	return fmt.Sprintf("profile %d", in.ProfileID)
}

var partName = regexp.MustCompile(`^[0-9]+c\.`)

// isPart reports whether a compute instance fills only a part of its GPU instance, as a name such
// as 1c.3g.40gb shows.
func isPart(c device.ComputeInstance) bool { return partName.MatchString(c.Name) }

// uuid returns a MIG device's UUID. If the cached list lacks the MIG device, uuid lists all MIG
// devices again, twice if needed, because a concurrent change may hide one from the first list. If
// it is still missing, the error is errUnsettled.
func (l *instanceReader) uuid(of migIDs) (string, error) {
	for try := 0; ; try++ {
		if uuid, ok := l.uuids[of]; ok {
			return uuid, nil
		}
		if try == 2 {
			return "", fmt.Errorf("compute instance %d of GPU instance %d: %w", of.compute, of.instance, errUnsettled)
		}
		var err error
		if l.uuids, err = l.migDevices(l.card); err != nil {
			return "", err
		}
	}
}

// migDevices reads the UUIDs of a card's MIG devices.
func (m *migReader) migDevices(card nvml.Device) (map[migIDs]string, error) {
	count, ret := card.GetMaxMigDeviceCount()
	m.progress()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("count the MIG devices: %w", toError(ret))
	}
	uuids := map[migIDs]string{}
	for i := range count {
		mig, ret := card.GetMigDeviceHandleByIndex(i)
		m.progress()
		if isAbsent(ret) {
			continue
		}
		if ret != nvml.SUCCESS {
			return nil, fmt.Errorf("open the MIG device with index %d: %w", i, toError(ret))
		}
		ids, uuid, err := migDevice(mig)
		m.progress()
		if errors.Is(err, errVanished) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read the MIG device with index %d: %w", i, err)
		}
		uuids[ids] = uuid
	}
	return uuids, nil
}

func migDevice(mig nvml.Device) (migIDs, string, error) {
	instance, ret := mig.GetGpuInstanceId()
	var compute int
	if ret == nvml.SUCCESS {
		compute, ret = mig.GetComputeInstanceId()
	}
	var uuid string
	if ret == nvml.SUCCESS {
		uuid, ret = mig.GetUUID()
	}
	if isAbsent(ret) {
		return migIDs{}, "", errVanished
	}
	if ret != nvml.SUCCESS {
		return migIDs{}, "", toError(ret)
	}
	return migIDs{uint32(instance), uint32(compute)}, uuid, nil //nolint:gosec // NVML's own numbers, which go-nvml widens
}

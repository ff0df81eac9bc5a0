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
	// errVanished says that what was listed a moment ago is there no more.
	errVanished = errors.New("it has gone meanwhile")
	// errUnsettled says that it is there, and not all that belongs to it.
	errUnsettled = errors.New("NVML lists no MIG device for it")
)

// look is one reading of how a card is cut. Somebody else may be cutting it at the same time: what vanishes while it is read is left out.
type look struct {
	*migReader
	card  nvml.Device
	minor int
	// uuids are those of the card's MIG devices.
	uuids map[migIDs]string
	// disturbed says that something vanished.
	disturbed bool
}

// migIDs say which MIG device is meant.
type migIDs struct{ instance, compute uint32 }

// instances lists the GPU instances of a card whose MIG mode is on, by ID. A reading that somebody else's cut got into is repeated, a few times: the
// instance that vanished may have come again under the same ID, and one that has just come may have no capability yet.
func (m *migReader) instances(card nvml.Device, minor int) ([]device.Instance, error) {
	for pause := 10 * time.Millisecond; ; pause *= 2 {
		l := look{migReader: m, card: card, minor: minor}
		found, err := l.instances()
		if pause > time.Second || err == nil && !l.disturbed || err != nil && !errors.Is(err, errUnsettled) && !errors.Is(err, fs.ErrNotExist) {
			return found, err
		}
		<-time.After(pause)
	}
}

func (l *look) instances() ([]device.Instance, error) {
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
				l.disturbed = true
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

// identify reads which GPU instance a handle stands for.
func (m *migReader) identify(handle nvml.GpuInstance) (device.Instance, error) {
	info, ret := handle.GetInfo()
	m.progress()
	if isAbsent(ret) {
		return device.Instance{}, errVanished
	}
	if ret != nvml.SUCCESS {
		return device.Instance{}, toError(ret)
	}
	return device.Instance{ID: info.Id, ProfileID: info.ProfileId, Placement: device.Placement{Start: info.Placement.Start, Size: info.Placement.Size}}, nil
}

// instance reads a GPU instance with everything in it.
func (l *look) instance(handle nvml.GpuInstance) (device.Instance, error) {
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

// eachCompute calls visit for every compute instance of the GPU instance in. It goes on when visit says that one has vanished.
func (m *migReader) eachCompute(handle nvml.GpuInstance, in device.Instance, visit func(nvml.ComputeInstanceProfileInfo, nvml.ComputeInstance) error) error {
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
			return fmt.Errorf("list those of profile %d: %w", kind.Id, toError(ret))
		}
		for _, compute := range handles {
			if err := visit(kind, compute); err != nil && !errors.Is(err, errVanished) {
				return err
			}
		}
	}
	return nil
}

// computeInstance reads a compute instance of the GPU instance in.
func (l *look) computeInstance(in device.Instance, parent nvml.GpuInstance, kind nvml.ComputeInstanceProfileInfo, handle nvml.ComputeInstance) (device.ComputeInstance, error) {
	info, ret := handle.GetInfo()
	l.progress()
	if isAbsent(ret) {
		l.disturbed = true
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
			l.disturbed = true
			return device.ComputeInstance{}, errVanished
		}
	}
	return c, err
}

// computeName is the MIG device's name: the GPU instance's for one that fills it, with its own slices in front for a part.
func (l *look) computeName(in device.Instance, kind nvml.ComputeInstanceProfileInfo) string {
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

// isPart says whether a compute instance fills only a part of its GPU instance. Its name says so.
func isPart(c device.ComputeInstance) bool { return partName.MatchString(c.Name) }

// uuid finds a MIG device's UUID. The devices are listed anew for one that has come since, and once more, because a cut beside us moves their indices.
func (l *look) uuid(of migIDs) (string, error) {
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

package mig

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
)

var (
	// ErrVanished says that NVML listed an object that was gone when it was read.
	ErrVanished = errors.New("it vanished during the read")
	// errUnsettled says that NVML does not list the MIG device of a new compute instance yet.
	errUnsettled = errors.New("NVML lists no MIG device for it")
)

// CardReader reads the MIG instances of a card once. Another tool may change MIG instances at
// the same time, so CardReader leaves out each one that vanishes during the read.
type CardReader struct {
	*Reader
	card  nvml.Device
	minor int
	// uuids are the UUIDs of the card's MIG devices.
	uuids map[IDs]string
	// changed says that a MIG instance vanished during the read.
	changed bool
}

// OnCard returns an CardReader for a card.
func (m *Reader) OnCard(card nvml.Device, minor int) *CardReader {
	return &CardReader{Reader: m, card: card, minor: minor}
}

// IDs identify a MIG device by its GPU instance ID and compute instance ID.
type IDs struct{ Instance, Compute uint32 }

// Instances lists the GPU instances of a card with MIG mode on, sorted by ID. If another tool
// changes MIG instances meanwhile, it reads them again for about a second. Otherwise one that is
// recreated under the same ID, or has no capability file yet, could be missed.
func (m *Reader) Instances(card nvml.Device, minor int) ([]device.Instance, error) {
	for pause := 10 * time.Millisecond; ; pause *= 2 {
		l := m.OnCard(card, minor)
		found, err := l.instances()
		if pause > time.Second || err == nil && !l.changed || err != nil && !errors.Is(err, errUnsettled) && !errors.Is(err, fs.ErrNotExist) {
			return found, err
		}
		<-time.After(pause)
	}
}

func (l *CardReader) instances() ([]device.Instance, error) {
	kinds, err := l.Kinds(l.card)
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
		if nvmlx.IsAbsent(ret) {
			continue
		}
		if ret != nvml.SUCCESS {
			return nil, fmt.Errorf("list the GPU instances of profile %d: %w", k.Id, nvmlx.ToError(ret))
		}
		for _, handle := range handles {
			i, err := l.instance(handle)
			if errors.Is(err, ErrVanished) {
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

// Identify reads ID, profile and placement of a GPU instance and leaves all other fields empty. If
// the GPU instance is gone, the error is ErrVanished.
func (m *Reader) Identify(handle nvml.GpuInstance) (device.Instance, error) {
	info, ret := handle.GetInfo()
	m.progress()
	if nvmlx.IsAbsent(ret) {
		return device.Instance{}, ErrVanished
	}
	if ret != nvml.SUCCESS {
		return device.Instance{}, nvmlx.ToError(ret)
	}
	return device.Instance{
		ID: info.Id, ProfileID: info.ProfileId,
		Placement: device.Placement{Start: info.Placement.Start, Size: info.Placement.Size},
	}, nil
}

// instance reads a GPU instance with its compute instances.
func (l *CardReader) instance(handle nvml.GpuInstance) (device.Instance, error) {
	i, err := l.Identify(handle)
	if err != nil {
		return device.Instance{}, fmt.Errorf("read a GPU instance: %w", err)
	}
	if i.Minor, err = host.InstanceMinor(l.Paths, l.minor, i.ID); err != nil {
		if _, ret := l.card.GetGpuInstanceById(int(i.ID)); nvmlx.IsAbsent(ret) {
			err = ErrVanished
		}
		return device.Instance{}, fmt.Errorf("read GPU instance %d: %w", i.ID, err)
	}
	err = l.EachCompute(handle, i, func(kind nvml.ComputeInstanceProfileInfo, compute nvml.ComputeInstance) error {
		c, err := l.ComputeInstance(i, handle, kind, compute)
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

// EachCompute calls visit for every compute instance of the GPU instance. If visit returns
// ErrVanished, it continues with the next one. Any other error ends it.
func (m *Reader) EachCompute(
	handle nvml.GpuInstance, in device.Instance, visit func(nvml.ComputeInstanceProfileInfo, nvml.ComputeInstance) error,
) error {
	kinds, err := m.ComputeKinds(handle, in.ProfileID)
	if err != nil {
		return err
	}
	for _, kind := range kinds {
		if kind.InstanceCount == 0 {
			continue
		}
		handles, ret := handle.GetComputeInstances(&kind)
		m.progress()
		if nvmlx.IsAbsent(ret) {
			continue
		}
		if ret != nvml.SUCCESS {
			return fmt.Errorf("list the compute instances of profile %d: %w", kind.Id, nvmlx.ToError(ret))
		}
		for _, compute := range handles {
			if err := visit(kind, compute); err != nil && !errors.Is(err, ErrVanished) {
				return err
			}
		}
	}
	return nil
}

// ComputeInstance reads the compute instance of handle. The parameter in is the GPU instance that
// contains it. If the compute instance is gone, the error is ErrVanished.
func (l *CardReader) ComputeInstance(
	in device.Instance, parent nvml.GpuInstance, kind nvml.ComputeInstanceProfileInfo, handle nvml.ComputeInstance,
) (device.ComputeInstance, error) {
	info, ret := handle.GetInfo()
	l.progress()
	if nvmlx.IsAbsent(ret) {
		l.changed = true
		return device.ComputeInstance{}, ErrVanished
	}
	if ret != nvml.SUCCESS {
		return device.ComputeInstance{}, nvmlx.ToError(ret)
	}
	c := device.ComputeInstance{
		ID: info.Id, ProfileID: info.ProfileId, Placement: device.Placement{Start: info.Placement.Start, Size: info.Placement.Size},
		Name: l.computeName(in, kind), Multiprocessors: kind.MultiprocessorCount,
	}
	var err error
	if c.UUID, err = l.UUID(IDs{in.ID, c.ID}); err == nil {
		c.Minor, err = host.ComputeMinor(l.Paths, l.minor, in.ID, c.ID)
	}
	if err != nil {
		if _, ret := parent.GetComputeInstanceById(int(c.ID)); nvmlx.IsAbsent(ret) {
			l.changed = true
			return device.ComputeInstance{}, ErrVanished
		}
	}
	return c, err
}

// computeName returns the MIG device's name: the profile name of its GPU instance, such as 3g.40gb.
// If the compute instance fills only a part of the GPU instance, its number of slices comes first,
// as in 1c.3g.40gb.
func (l *CardReader) computeName(in device.Instance, kind nvml.ComputeInstanceProfileInfo) string {
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

// UUID returns a MIG device's UUID. If the cached list lacks the MIG device, uuid lists all MIG
// devices again, twice if needed, because a concurrent change may hide one from the first list. If
// it is still missing, the error is errUnsettled.
func (l *CardReader) UUID(of IDs) (string, error) {
	for try := 0; ; try++ {
		if uuid, ok := l.uuids[of]; ok {
			return uuid, nil
		}
		if try == 2 {
			return "", fmt.Errorf("compute instance %d of GPU instance %d: %w", of.Compute, of.Instance, errUnsettled)
		}
		var err error
		if l.uuids, err = l.migDevices(l.card); err != nil {
			return "", err
		}
	}
}

// migDevices reads the UUIDs of a card's MIG devices.
func (m *Reader) migDevices(card nvml.Device) (map[IDs]string, error) {
	count, ret := card.GetMaxMigDeviceCount()
	m.progress()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("count the MIG devices: %w", nvmlx.ToError(ret))
	}
	uuids := map[IDs]string{}
	for i := range count {
		mig, ret := card.GetMigDeviceHandleByIndex(i)
		m.progress()
		if nvmlx.IsAbsent(ret) {
			continue
		}
		if ret != nvml.SUCCESS {
			return nil, fmt.Errorf("open the MIG device with index %d: %w", i, nvmlx.ToError(ret))
		}
		ids, uuid, err := migDevice(mig)
		m.progress()
		if errors.Is(err, ErrVanished) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read the MIG device with index %d: %w", i, err)
		}
		uuids[ids] = uuid
	}
	return uuids, nil
}

func migDevice(mig nvml.Device) (IDs, string, error) {
	instance, ret := mig.GetGpuInstanceId()
	var compute int
	if ret == nvml.SUCCESS {
		compute, ret = mig.GetComputeInstanceId()
	}
	var uuid string
	if ret == nvml.SUCCESS {
		uuid, ret = mig.GetUUID()
	}
	if nvmlx.IsAbsent(ret) {
		return IDs{}, "", ErrVanished
	}
	if ret != nvml.SUCCESS {
		return IDs{}, "", nvmlx.ToError(ret)
	}
	return IDs{uint32(instance), uint32(compute)}, uuid, nil //nolint:gosec // NVML's own numbers, which go-nvml widens
}

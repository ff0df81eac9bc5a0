package nvidia

import (
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// destroy takes away a GPU instance and what is in it, if it is the one that is meant. It may be called again after whatever it answered.
func (c cutter) destroy(r request) error {
	card, err := c.open(r)
	if err != nil {
		return err
	}
	mode, err := c.modeOf(r, card)
	if err != nil {
		return err
	}
	if !mode.Enabled {
		return nil // without the mode there are no instances
	}
	handle, ret := card.GetGpuInstanceById(int(r.Instance.ID))
	if ret == nvml.ERROR_NOT_FOUND {
		return nil
	}
	if ret != nvml.SUCCESS {
		return fmt.Errorf("open the GPU instance: %w", toError(ret))
	}
	there, err := c.identify(handle)
	if errors.Is(err, errVanished) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the GPU instance: %w", err)
	}
	if there.ProfileID != r.Instance.ProfileID || there.Placement != r.Instance.Placement {
		return r.fail(CodeChanged, "the instance with this ID is of profile %d at %d:%d: somebody else made it", there.ProfileID, there.Placement.Start, there.Placement.Size)
	}
	compute, err := c.computeToDestroy(r, card, handle, there)
	if err != nil {
		return err
	}
	for _, each := range compute {
		// What somebody else destroys at the same moment is seen by what comes next: a GPU instance with something in it cannot be destroyed.
		if ret := each.Destroy(); ret != nvml.SUCCESS && !isAbsent(ret) {
			return c.destroyRefusal(r, card, "destroy its compute instance", ret)
		}
	}
	ret = handle.Destroy()
	if isAbsent(ret) {
		if _, now := card.GetGpuInstanceById(int(r.Instance.ID)); now == nvml.ERROR_NOT_FOUND {
			return nil
		}
	}
	if ret != nvml.SUCCESS {
		return c.destroyRefusal(r, card, "destroy it", ret)
	}
	return nil
}

func (c cutter) destroyRefusal(r request, card nvml.Device, what string, ret nvml.Return) *CutError {
	refusal := c.because(r, fmt.Errorf("%s: %w", what, toError(ret)))
	if refusal.Code == CodeInUse {
		refusal.Processes = c.holders(card, &r.Instance.ID)
	}
	return refusal
}

// computeToDestroy lists the compute instances in a GPU instance. Where the caller knows which ones there were, others are somebody else's.
func (c cutter) computeToDestroy(r request, card nvml.Device, handle nvml.GpuInstance, there device.Instance) ([]nvml.ComputeInstance, error) {
	var handles []nvml.ComputeInstance
	l := look{migReader: c.migReader, card: card}
	err := c.eachCompute(handle, there, func(_ nvml.ComputeInstanceProfileInfo, compute nvml.ComputeInstance) error {
		if len(r.Instance.Compute) > 0 {
			if err := l.isKnown(r, there.ID, compute); err != nil {
				return err
			}
		}
		handles = append(handles, compute)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read its compute instances: %w", err)
	}
	return handles, nil
}

// isKnown compares a compute instance with the ones that the caller knows.
func (l *look) isKnown(r request, instance uint32, handle nvml.ComputeInstance) error {
	info, ret := handle.GetInfo()
	if isAbsent(ret) {
		return errVanished
	}
	if ret != nvml.SUCCESS {
		return toError(ret)
	}
	for _, known := range r.Instance.Compute {
		if known.ID != info.Id {
			continue
		}
		if known.UUID == "" {
			return nil
		}
		uuid, err := l.uuid(migIDs{instance, info.Id})
		if err != nil {
			return err
		}
		if uuid == known.UUID {
			return nil
		}
		return r.fail(CodeChanged, "its compute instance %d is %s and not %s: somebody else made it", info.Id, uuid, known.UUID)
	}
	return r.fail(CodeChanged, "it has compute instance %d, which is not known: somebody else made it", info.Id)
}

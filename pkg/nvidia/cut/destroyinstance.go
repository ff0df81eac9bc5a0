package cut

import (
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/mig"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
)

// destroy removes the GPU instance that r names, with its compute instances. If ID, profile or
// placement differ, it removes nothing and returns device.FailureChanged. If the GPU instance is
// missing or MIG mode is off, it succeeds, so a caller may repeat it.
func (c partitioner) destroy(r request) error {
	card, err := c.open(r)
	if err != nil {
		return err
	}
	mode, err := c.modeOf(r, card)
	if err != nil {
		return err
	}
	if !mode.Enabled {
		return nil // without MIG mode there are no MIG instances
	}
	handle, ret := card.GetGpuInstanceById(int(r.Instance.ID))
	if ret == nvml.ERROR_NOT_FOUND {
		return nil
	}
	if ret != nvml.SUCCESS {
		return fmt.Errorf("open the GPU instance: %w", nvmlx.ToError(ret))
	}
	there, err := c.Identify(handle)
	if errors.Is(err, mig.ErrVanished) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the GPU instance: %w", err)
	}
	if there.ProfileID != r.Instance.ProfileID || there.Placement != r.Instance.Placement {
		return r.fail(device.FailureChanged, "the instance with this ID has profile %d at %d:%d: another tool created it",
			there.ProfileID, there.Placement.Start, there.Placement.Size)
	}
	compute, err := c.computeToDestroy(r, card, handle, there)
	if err != nil {
		return err
	}
	for _, each := range compute {
		// Another tool may have destroyed this compute instance just now, so its absence is no
		// error. If a compute instance is left, handle.Destroy below fails.
		if ret := each.Destroy(); ret != nvml.SUCCESS && !nvmlx.IsAbsent(ret) {
			return c.refusal(r, card, &r.Instance.ID, fmt.Errorf("destroy its compute instance: %w", nvmlx.ToError(ret)))
		}
	}
	ret = handle.Destroy()
	if nvmlx.IsAbsent(ret) {
		if _, now := card.GetGpuInstanceById(int(r.Instance.ID)); now == nvml.ERROR_NOT_FOUND {
			return nil
		}
	}
	if ret != nvml.SUCCESS {
		return c.refusal(r, card, &r.Instance.ID, fmt.Errorf("destroy it: %w", nvmlx.ToError(ret)))
	}
	return nil
}

// computeToDestroy returns the compute instances of a GPU instance. If r names compute instances
// and the GPU instance has any other one, it returns an error, because another tool created that
// one.
func (c partitioner) computeToDestroy(
	r request, card nvml.Device, handle nvml.GpuInstance, there device.Instance,
) ([]nvml.ComputeInstance, error) {
	var handles []nvml.ComputeInstance
	reader := c.OnCard(card, 0) // reads UUIDs only, for which it needs no minor number
	err := c.EachCompute(handle, there, func(_ nvml.ComputeInstanceProfileInfo, compute nvml.ComputeInstance) error {
		if len(r.Instance.Compute) > 0 {
			if err := isKnown(r, reader, there.ID, compute); err != nil {
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

// isKnown returns nil if r names the compute instance of handle, ErrVanished if it no longer
// exists, and otherwise an error with device.FailureChanged. instance is the GPU instance's ID.
func isKnown(r request, reader *mig.CardReader, instance uint32, handle nvml.ComputeInstance) error {
	info, ret := handle.GetInfo()
	if nvmlx.IsAbsent(ret) {
		return mig.ErrVanished
	}
	if ret != nvml.SUCCESS {
		return nvmlx.ToError(ret)
	}
	for _, known := range r.Instance.Compute {
		if known.ID != info.Id {
			continue
		}
		if known.UUID == "" {
			return nil
		}
		uuid, err := reader.UUID(mig.IDs{Instance: instance, Compute: info.Id})
		if err != nil {
			return err
		}
		if uuid == known.UUID {
			return nil
		}
		return r.fail(device.FailureChanged, "its compute instance %d is %s, not %s: another tool created it", info.Id, uuid, known.UUID)
	}
	return r.fail(device.FailureChanged, "its compute instance %d is unknown: another tool created it", info.Id)
}

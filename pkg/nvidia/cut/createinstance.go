package cut

import (
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/mig"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
)

// createInstance creates a GPU instance at exactly the requested placement. The driver may refuse
// the first GPU instance while its internal channels and profilers still use the GPU.
func (c partitioner) createInstance(r request) (device.Instance, error) {
	card, minor, err := c.openWithMinor(r)
	if err != nil {
		return device.Instance{}, err
	}
	handle, ret := card.CreateGpuInstanceWithPlacement(
		&nvml.GpuInstanceProfileInfo{Id: r.Profile}, &nvml.GpuInstancePlacement{Start: r.At.Start, Size: r.At.Size})
	if ret != nvml.SUCCESS {
		return device.Instance{}, c.refusal(r, card, nil, nvmlx.ToError(ret))
	}
	made, err := c.Identify(handle)
	if err == nil && (made.ProfileID != r.Profile || made.Placement != r.At) {
		err = fmt.Errorf("the driver created profile %d at %d:%d instead", made.ProfileID, made.Placement.Start, made.Placement.Size)
	}
	if err == nil {
		made.Minor, err = host.InstanceMinor(c.Paths, minor, made.ID)
	}
	if err != nil {
		return device.Instance{}, r.fail(device.FailureOther, "%v%s", err, undoneNote(handle.Destroy()))
	}
	return made, nil
}

// openWithMinor returns the card's NVML handle and the N of its device node nvidiaN.
func (c partitioner) openWithMinor(r request) (nvml.Device, int, error) {
	card, err := c.open(r)
	if err != nil {
		return nil, 0, err
	}
	minor, ret := card.GetMinorNumber()
	if ret != nvml.SUCCESS {
		return nil, 0, fmt.Errorf("read its minor number: %w", nvmlx.ToError(ret))
	}
	return card, minor, nil
}

// undoneNote returns the end of the error message for a GPU instance that cannot be used after its
// creation. It says whether the worker destroyed this GPU instance again. ret is NVML's answer to
// that.
func undoneNote(ret nvml.Return) string {
	if ret == nvml.SUCCESS || ret == nvml.ERROR_NOT_FOUND {
		return "; it was destroyed again"
	}
	return fmt.Sprintf("; it could not be destroyed again (%v)", nvmlx.ToError(ret))
}

// createCompute creates one compute instance that fills the GPU instance named by r.
func (c partitioner) createCompute(r request) (device.Instance, error) {
	card, minor, err := c.openWithMinor(r)
	if err != nil {
		return device.Instance{}, err
	}
	parent, ret := card.GetGpuInstanceById(int(r.Instance.ID))
	if ret != nvml.SUCCESS {
		return device.Instance{}, fmt.Errorf("open the GPU instance: %w", nvmlx.ToError(ret))
	}
	in, err := c.Identify(parent)
	if err == nil {
		in.Minor, err = host.InstanceMinor(c.Paths, minor, in.ID)
	}
	if err != nil {
		return device.Instance{}, fmt.Errorf("read the GPU instance: %w", err)
	}
	whole, err := c.wholeProfile(card, parent, in)
	if err != nil {
		return device.Instance{}, err
	}
	handle, ret := parent.CreateComputeInstance(&whole)
	if ret != nvml.SUCCESS {
		return device.Instance{}, c.refusal(r, card, nil, nvmlx.ToError(ret))
	}
	made, err := c.OnCard(card, minor).ComputeInstance(in, parent, whole, handle)
	if err == nil {
		err = host.MakeCapabilityNodes(c.Paths, minor, in.ID, made.ID)
	}
	if err != nil {
		return device.Instance{}, r.fail(device.FailureOther, "%v%s", err, undoneNote(handle.Destroy()))
	}
	in.Compute = []device.ComputeInstance{made}
	return in, nil
}

// wholeProfile chooses the compute instance profile that fills a GPU instance. Among the profiles
// with all slices, it takes the one with the most multiprocessors. There may be several
// such profiles: 1g.20gb of an H100 has as many slices as 1g.10gb, and more multiprocessors.
func (c partitioner) wholeProfile(
	card nvml.Device, parent nvml.GpuInstance, in device.Instance,
) (nvml.ComputeInstanceProfileInfo, error) {
	var whole nvml.ComputeInstanceProfileInfo
	kinds, err := c.Kinds(card)
	if err != nil {
		return whole, err
	}
	n := slices.IndexFunc(kinds, func(k mig.Kind) bool { return k.Id == in.ProfileID })
	if n < 0 {
		return whole, fmt.Errorf("the driver does not describe the GPU instance's profile %d", in.ProfileID)
	}
	compute, err := c.ComputeKinds(parent, in.ProfileID)
	if err != nil {
		return whole, err
	}
	for _, k := range compute {
		if k.SliceCount == kinds[n].SliceCount && (whole.SliceCount == 0 || k.MultiprocessorCount > whole.MultiprocessorCount) {
			whole = k
		}
	}
	if whole.SliceCount == 0 {
		return whole, fmt.Errorf("the driver has no compute instance that fills a GPU instance of profile %d (%d slices)",
			in.ProfileID, kinds[n].SliceCount)
	}
	return whole, nil
}

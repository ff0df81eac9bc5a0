/*
 * Compute policies: how long a process may compute before another process of the same GPU.
 * 
 * NVML has no public function for them. nvidia-smi compute-policy uses the export table. The
 * arguments come from watching nvidia-smi 535 and 550. Both functions take a device and a pointer:
 * to set, at a name and a value, to list, at a count and then pairs of them.
 */
#include "sim.h"

enum { POLICY_TIME_SLICE = 0, LONGEST = 3 };

nvmlReturn_t sim_set_policy(nvmlDevice_t device, const struct sim_policy *policy)
{
    struct nvmlsim_gpu *gpu;
    nvmlReturn_t result = sim_enter_gpu("setTimeSlice", device, &gpu);
    if (result != NVML_SUCCESS)
        return result;
    REQUIRE(policy->name == POLICY_TIME_SLICE && policy->value <= LONGEST);
    if (!sim_model(gpu)->time_slices)
        return NVML_ERROR_NOT_SUPPORTED;
    result = sim_write_begin();
    if (result != NVML_SUCCESS)
        return result;
    STORE(gpu->time_slice, policy->value);
    sim_write_end();
    return sim_fault_after("setTimeSlice", sim_handle_gpu(device));
}

nvmlReturn_t sim_list_policies(nvmlDevice_t device, struct sim_policies *policies)
{
    struct nvmlsim_gpu *gpu;
    nvmlReturn_t result = sim_enter_gpu("getTimeSlice", device, &gpu);
    if (result != NVML_SUCCESS)
        return result;
    if (!sim_model(gpu)->time_slices)
        return NVML_ERROR_NOT_SUPPORTED;
    policies->count = 1;
    policies->list[0] = (struct sim_policy){.name = POLICY_TIME_SLICE, .value = LOAD(gpu->time_slice)};
    return NVML_SUCCESS;
}

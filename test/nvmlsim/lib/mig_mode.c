/*
 * MIG mode. GPUs that need a reset only store the pending mode. Other GPUs change at once, unless
 * they are in use.
 * 
 * A GPU with instances keeps its mode: the call returns IN_USE and changes nothing. While processes
 * use the GPU the call succeeds, the mode is pending, and the activation status is IN_USE: the
 * caller must idle the GPU and call again (nvml.h). It is unknown whether a process that only has
 * NVML open counts as use. The MIG guide tells admins to stop such services, the open kernel module
 * has no check. `client_blocks_mode` selects the behaviour.
 */
#include "sim.h"

#include <time.h>

NVMLSIM_API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    ENTER_GPU(device);
    REQUIRE(current && pending);
    if (!sim_model(gpu)->mig_supported)
        return NVML_ERROR_NOT_SUPPORTED;
    *current = LOAD(gpu->mig_current);
    *pending = LOAD(gpu->mig_pending);
    return NVML_SUCCESS;
}

void sim_rejoin_fabric(struct nvmlsim_gpu *gpu)
{
    if (gpu->fabric_state != NVML_GPU_FABRIC_STATE_COMPLETED)
        return;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    STORE(gpu->fabric_interim, NVML_GPU_FABRIC_STATE_IN_PROGRESS);
    STORE(gpu->fabric_until_ms,
          (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000 + LOAD(sim_state()->fabric_settle_ms));
}

/* Changes the MIG mode while the caller holds the locks. */
static nvmlReturn_t change_mode(struct nvmlsim_gpu *gpu, unsigned int mode, nvmlReturn_t *activation)
{
    if (mode == NVML_DEVICE_MIG_DISABLE && sim_has_instances(gpu)) {
        *activation = NVML_ERROR_IN_USE;
        return NVML_ERROR_IN_USE;
    }
    *activation = NVML_SUCCESS;
    STORE(gpu->mig_pending, mode);
    if (LOAD(gpu->mig_current) == mode)
        return NVML_SUCCESS;
    bool blocked = LOAD(sim_state()->client_blocks_mode) && sim_opened_elsewhere((unsigned int)(gpu - sim_gpu_at(0)));
    if (blocked || sim_is_busy(gpu, NVMLSIM_NO_INSTANCE, NVMLSIM_NO_INSTANCE))
        *activation = NVML_ERROR_IN_USE;
    else if (sim_model(gpu)->mig_needs_reset)
        *activation = NVML_ERROR_RESET_REQUIRED;
    if (*activation != NVML_SUCCESS)
        return NVML_SUCCESS;
    if (mode == NVML_DEVICE_MIG_DISABLE && !LOAD(sim_state()->fabric_by_instances))
        sim_rejoin_fabric(gpu);
    STORE(gpu->compute_mode, NVML_COMPUTEMODE_DEFAULT); /* the only compute mode in MIG mode */
    STORE(gpu->mig_current, mode);
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned int mode, nvmlReturn_t *activation)
{
    struct sim_target at;
    nvmlReturn_t result = sim_find_gpu(device, &at);
    if (result != NVML_SUCCESS)
        return result;
    REQUIRE(activation && mode <= NVML_DEVICE_MIG_ENABLE);
    if (!at.model->mig_supported)
        return NVML_ERROR_NOT_SUPPORTED;
    if (at.gpu->virtualization == NVML_GPU_VIRTUALIZATION_MODE_VGPU)
        return NVML_ERROR_NO_PERMISSION;
    struct sim_cut cut;
    result = sim_cut_begin(__func__, at.number, &cut);
    if (result != NVML_SUCCESS)
        return result;
    return sim_cut_end(&cut, change_mode(at.gpu, mode, activation));
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    ENTER_GPU(device);
    REQUIRE(count);
    *count = LOAD(gpu->mig_current) ? sim_model(gpu)->mig_max_instances : 0; /* "zero if MIG is not supported or enabled" */
    return NVML_SUCCESS;
}

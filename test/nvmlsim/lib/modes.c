/*
 * The modes that an administrator or the driver plugin may set: persistence mode and compute mode.
 */
#include "sim.h"

static nvmlReturn_t set_word(uint32_t *word, uint32_t value)
{
    nvmlReturn_t result = sim_write_begin();
    if (result != NVML_SUCCESS)
        return result;
    STORE(*word, value);
    sim_write_end();
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    ENTER_GPU(device);
    REQUIRE(mode);
    *mode = (nvmlEnableState_t)LOAD(gpu->persistence_mode);
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
    ENTER_GPU(device);
    REQUIRE((unsigned int)mode <= NVML_FEATURE_ENABLED);
    return set_word(&gpu->persistence_mode, mode);
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode)
{
    ENTER_DEVICE(device);
    REQUIRE(mode);
    *mode = LOAD(at.gpu->mig_current) ? NVML_COMPUTEMODE_DEFAULT : (nvmlComputeMode_t)LOAD(at.gpu->compute_mode);
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, nvmlComputeMode_t mode)
{
    ENTER_DEVICE(device);
    REQUIRE((unsigned int)mode < NVML_COMPUTEMODE_COUNT);
    if (mode == NVML_COMPUTEMODE_EXCLUSIVE_THREAD) /* CUDA 8 removed this mode */
        return NVML_ERROR_NOT_SUPPORTED;
    if (LOAD(at.gpu->mig_current)) /* nvml.h requires a MIG device's handle then, and MIG devices have only the default mode */
        return at.kind == SIM_HANDLE_MIG && mode == NVML_COMPUTEMODE_DEFAULT ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
    nvmlReturn_t result = set_word(&at.gpu->compute_mode, mode);
    return result == NVML_SUCCESS ? sim_fault_after(__func__, (int)at.number) : result;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetDisplayMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    ENTER_GPU(device);
    (void)gpu;
    REQUIRE(mode);
    *mode = NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetDisplayActive(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    ENTER_GPU(device);
    (void)gpu;
    REQUIRE(mode);
    *mode = NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

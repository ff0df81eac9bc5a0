/*
 * Readings of an idle GPU: enough for nvidia-smi's table. Power comes from the model file. A
 * reading without a fact returns NOT_SUPPORTED, and nvidia-smi prints N/A.
 */
#include "sim.h"

#include <string.h>
#include <time.h>

NVMLSIM_API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    ENTER_GPU(device);
    (void)gpu;
    REQUIRE(utilization);
    memset(utilization, 0, sizeof *utilization); /* a simulated GPU is always idle */
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, nvmlPstates_t *state)
{
    ENTER_GPU(device);
    (void)gpu;
    REQUIRE(state);
    *state = NVML_PSTATE_0;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetPowerState(nvmlDevice_t device, nvmlPstates_t *state)
{
    return nvmlDeviceGetPerformanceState(device, state);
}

static nvmlReturn_t known(unsigned int *to, uint32_t value)
{
    REQUIRE(to);
    if (value == NVMLSIM_ABSENT)
        return NVML_ERROR_NOT_SUPPORTED;
    *to = value;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts)
{
    ENTER_GPU(device);
    return known(milliwatts, sim_model(gpu)->power_idle_mw);
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *milliwatts)
{
    ENTER_GPU(device);
    return known(milliwatts, sim_model(gpu)->power_limit_mw);
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned int *milliwatts)
{
    ENTER_GPU(device);
    return known(milliwatts, sim_model(gpu)->power_limit_mw);
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t device, unsigned int *milliwatts)
{
    ENTER_GPU(device);
    return known(milliwatts, sim_model(gpu)->power_limit_mw);
}

/*
 * The energy that the idle GPU has used since the driver found it. GPUs from Volta on count it
 * (nvml.h).
 */
NVMLSIM_API nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *energy)
{
    ENTER_GPU(device);
    REQUIRE(energy);
    const struct nvmlsim_model *model = sim_model(gpu);
    if (model->architecture < NVML_DEVICE_ARCH_VOLTA || model->power_idle_mw == NVMLSIM_ABSENT)
        return NVML_ERROR_NOT_SUPPORTED;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t now_ms = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000, since = LOAD(gpu->energy_since_ms);
    *energy = now_ms > since ? (now_ms - since) * model->power_idle_mw / 1000 : 0; /* millijoules */
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetPowerManagementMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    ENTER_GPU(device);
    REQUIRE(mode);
    if (sim_model(gpu)->power_limit_mw == NVMLSIM_ABSENT)
        return NVML_ERROR_NOT_SUPPORTED;
    *mode = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending)
{
    ENTER_GPU(device);
    REQUIRE(current && pending);
    if (!sim_model(gpu)->ecc)
        return NVML_ERROR_NOT_SUPPORTED;
    *current = *pending = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                                     nvmlEccCounterType_t counter, unsigned long long *count)
{
    ENTER_DEVICE(device);
    REQUIRE(count && (unsigned int)type < NVML_MEMORY_ERROR_TYPE_COUNT && (unsigned int)counter < NVML_ECC_COUNTER_TYPE_COUNT);
    if (!at.model->ecc)
        return NVML_ERROR_NOT_SUPPORTED;
    bool single = type == NVML_MEMORY_ERROR_TYPE_CORRECTED;
    if (counter == NVML_VOLATILE_ECC)
        *count = single ? LOAD(at.gpu->ecc_single_volatile) : LOAD(at.gpu->ecc_double_volatile);
    else
        *count = single ? LOAD(at.gpu->ecc_single_aggregate) : LOAD(at.gpu->ecc_double_aggregate);
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                                         nvmlEccCounterType_t counter, nvmlMemoryLocation_t location,
                                                         unsigned long long *count)
{
    if (location != NVML_MEMORY_LOCATION_DRAM) { /* the control tool injects only memory errors */
        ENTER_DEVICE(device);
        REQUIRE(count);
        if (!at.model->ecc)
            return NVML_ERROR_NOT_SUPPORTED;
        *count = 0;
        return NVML_SUCCESS;
    }
    return nvmlDeviceGetTotalEccErrors(device, type, counter, count);
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *correctable, unsigned int *uncorrectable,
                                                   unsigned int *pending, unsigned int *failed)
{
    ENTER_GPU(device);
    REQUIRE(correctable && uncorrectable && pending && failed);
    if (sim_model(gpu)->architecture < NVML_DEVICE_ARCH_AMPERE) /* older GPUs retire pages instead */
        return NVML_ERROR_NOT_SUPPORTED;
    if (sim_has_instances(gpu)) /* as nvml.h says */
        return NVML_ERROR_NOT_SUPPORTED;
    *correctable = 0;
    *uncorrectable = (unsigned int)LOAD(gpu->ecc_double_aggregate);
    *pending = LOAD(gpu->remap_pending);
    *failed = LOAD(gpu->remap_failure);
    return NVML_SUCCESS;
}

/*
 * Pending retired pages, for GPUs before Ampere. The state is one bit, the same as for rows to be
 * remapped.
 */
NVMLSIM_API nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, nvmlEnableState_t *pending)
{
    ENTER_GPU(device);
    REQUIRE(pending);
    if (sim_model(gpu)->architecture >= NVML_DEVICE_ARCH_AMPERE || !sim_model(gpu)->ecc)
        return NVML_ERROR_NOT_SUPPORTED;
    *pending = LOAD(gpu->remap_pending) ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

/*
 * nvmlDeviceGetFieldValues: the fields that health checks read. Each field has its own return code.
 */
#include "sim.h"

#include <stdlib.h>
#include <time.h>

static nvmlReturn_t as_uint(nvmlFieldValue_t *value, uint32_t number)
{
    if (number == NVMLSIM_ABSENT)
        return NVML_ERROR_NOT_SUPPORTED;
    value->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
    value->value.uiVal = number;
    return NVML_SUCCESS;
}

static nvmlReturn_t as_ull(nvmlFieldValue_t *value, uint64_t number)
{
    value->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    value->value.ullVal = number;
    return NVML_SUCCESS;
}

static nvmlReturn_t ecc_field(const struct nvmlsim_gpu *gpu, nvmlFieldValue_t *value)
{
    if (!sim_model(gpu)->ecc)
        return NVML_ERROR_NOT_SUPPORTED;
    switch (value->fieldId) {
    case NVML_FI_DEV_ECC_CURRENT:
    case NVML_FI_DEV_ECC_PENDING: return as_uint(value, 1);
    case NVML_FI_DEV_ECC_SBE_VOL_TOTAL: return as_ull(value, LOAD(gpu->ecc_single_volatile));
    case NVML_FI_DEV_ECC_DBE_VOL_TOTAL: return as_ull(value, LOAD(gpu->ecc_double_volatile));
    case NVML_FI_DEV_ECC_SBE_AGG_TOTAL: return as_ull(value, LOAD(gpu->ecc_single_aggregate));
    case NVML_FI_DEV_ECC_DBE_AGG_TOTAL: return as_ull(value, LOAD(gpu->ecc_double_aggregate));
    default: return NVML_ERROR_NOT_SUPPORTED;
    }
}

static nvmlReturn_t remap_field(const struct nvmlsim_gpu *gpu, nvmlFieldValue_t *value)
{
    if (sim_model(gpu)->architecture < NVML_DEVICE_ARCH_AMPERE)
        return NVML_ERROR_NOT_SUPPORTED;
    if (sim_state()->no_remap_fields && sim_has_instances(gpu))
        return NVML_ERROR_NOT_SUPPORTED;
    switch (value->fieldId) {
    case NVML_FI_DEV_REMAPPED_COR: return as_uint(value, 0);
    case NVML_FI_DEV_REMAPPED_UNC: return as_uint(value, (uint32_t)LOAD(gpu->ecc_double_aggregate));
    case NVML_FI_DEV_REMAPPED_PENDING: return as_uint(value, LOAD(gpu->remap_pending));
    case NVML_FI_DEV_REMAPPED_FAILURE: return as_uint(value, LOAD(gpu->remap_failure));
    default: return NVML_ERROR_NOT_SUPPORTED;
    }
}

enum { RECOVERY_SINCE = 565 }; /* older drivers do not know the recovery action field */

static nvmlReturn_t recovery_field(const struct nvmlsim_gpu *gpu, nvmlFieldValue_t *value)
{
    if (strtoul(sim_state()->driver_version, NULL, 10) < RECOVERY_SINCE)
        return NVML_ERROR_NOT_SUPPORTED;
    return as_uint(value, LOAD(gpu->recovery_action));
}

static nvmlReturn_t read_field(const struct nvmlsim_gpu *gpu, nvmlFieldValue_t *value)
{
    const struct nvmlsim_model *model = sim_model(gpu);
    if (value->fieldId >= NVML_FI_MAX)
        return NVML_ERROR_INVALID_ARGUMENT; /* as driver 580.159.04 says */
    switch (value->fieldId) {
    case NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED: return as_uint(value, model->mig_supported ? !model->mig_needs_reset : NVMLSIM_ABSENT);
    case NVML_FI_DEV_IS_MIG_MODE_INDEPENDENT_MIG_QUERY_CAPABLE: return as_uint(value, model->mig_supported ? 1 : NVMLSIM_ABSENT);
    case NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: return recovery_field(gpu, value);
    case NVML_FI_DEV_POWER_AVERAGE:
    case NVML_FI_DEV_POWER_INSTANT: return as_uint(value, model->power_idle_mw);
    case NVML_FI_DEV_POWER_MAX_LIMIT:
    case NVML_FI_DEV_POWER_DEFAULT_LIMIT:
    case NVML_FI_DEV_POWER_CURRENT_LIMIT:
    case NVML_FI_DEV_POWER_REQUESTED_LIMIT: return as_uint(value, model->power_limit_mw);
    case NVML_FI_DEV_REMAPPED_COR:
    case NVML_FI_DEV_REMAPPED_UNC:
    case NVML_FI_DEV_REMAPPED_PENDING:
    case NVML_FI_DEV_REMAPPED_FAILURE: return remap_field(gpu, value);
    default: return ecc_field(gpu, value);
    }
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    ENTER_GPU(device);
    REQUIRE(values && count > 0);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    for (int i = 0; i < count; i++) {
        values[i].timestamp = (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
        values[i].latencyUsec = 0;
        values[i].nvmlReturn = read_field(gpu, &values[i]);
    }
    return NVML_SUCCESS;
}

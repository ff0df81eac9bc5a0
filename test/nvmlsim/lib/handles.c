/*
 * Handles are numbers, not pointers: they need no table, mean the same in every thread, and a wrong one is
 * recognised instead of followed.
 *
 *   bits 63..48  a tag        bits 39..32  kind        bits 31..16  GPU        bits 15..8  GPU instance        bits 7..0  compute instance
 */
#include "sim.h"

#include <string.h>

#define TAG UINT64_C(0x4e53)

static uint64_t encode(enum sim_handle_kind kind, unsigned int gpu)
{
    return TAG << 48 | (uint64_t)kind << 32 | (uint64_t)(gpu & 0xffff) << 16;
}

nvmlDevice_t sim_gpu_handle(unsigned int number)
{
    uint64_t value = encode(SIM_HANDLE_GPU, number);
    nvmlDevice_t device;
    _Static_assert(sizeof device == sizeof value, "an NVML handle holds 64 bits");
    memcpy(&device, &value, sizeof device);
    return device;
}

int sim_handle_gpu(nvmlDevice_t device)
{
    uint64_t value;
    memcpy(&value, &device, sizeof value);
    unsigned int number = (value >> 16) & 0xffff;
    if (value != encode(SIM_HANDLE_GPU, number) || number >= sim_state()->gpu_count)
        return -1;
    return (int)number;
}

nvmlReturn_t sim_enter(const char *function)
{
    nvmlReturn_t result = sim_check_initialized();
    return result == NVML_SUCCESS ? sim_fault(function, SIM_NO_GPU) : result;
}

nvmlReturn_t sim_enter_gpu(const char *function, nvmlDevice_t device, struct nvmlsim_gpu **gpu)
{
    nvmlReturn_t result = sim_check_initialized();
    if (result != NVML_SUCCESS)
        return result;
    int number = sim_handle_gpu(device);
    if (number < 0 || !sim_gpu_visible((unsigned int)number))
        return NVML_ERROR_INVALID_ARGUMENT;
    result = sim_fault(function, number);
    if (result != NVML_SUCCESS)
        return result;
    *gpu = sim_gpu_at((unsigned int)number);
    return LOAD((*gpu)->lost) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

nvmlReturn_t sim_copy_string(char *to, unsigned int size, const char *from)
{
    REQUIRE(to);
    size_t length = strlen(from) + 1;
    if (length > size)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(to, from, length);
    return NVML_SUCCESS;
}

/*
 * Handles are numbers, not pointers. They need no table, mean the same in every thread, and a wrong
 * one is detected instead of followed.
 * 
 *   bits 63..48 a tag   bits 39..32 kind   bits 31..16 GPU
 *   bits 15..8 GPU instance   bits 7..0 compute instance
 */
#include "sim.h"

#include <string.h>

#define TAG UINT64_C(0x4e53)

static uint64_t encode(enum sim_handle_kind kind, unsigned int gpu, unsigned int gi, unsigned int ci)
{
    return TAG << 48 | (uint64_t)kind << 32 | (uint64_t)(gpu & 0xffff) << 16 | (uint64_t)(gi & 0xff) << 8 | (ci & 0xff);
}

static void fill(void *handle, size_t size, uint64_t value)
{
    if (size == sizeof value)
        memcpy(handle, &value, sizeof value);
}

nvmlDevice_t sim_gpu_handle(unsigned int number)
{
    nvmlDevice_t device;
    _Static_assert(sizeof device == sizeof(uint64_t), "an NVML handle holds 64 bits");
    fill(&device, sizeof device, encode(SIM_HANDLE_GPU, number, 0, 0));
    return device;
}

nvmlDevice_t sim_mig_handle(unsigned int gpu, unsigned int gi, unsigned int ci)
{
    nvmlDevice_t device;
    fill(&device, sizeof device, encode(SIM_HANDLE_MIG, gpu, gi, ci));
    return device;
}

nvmlGpuInstance_t sim_gi_handle(unsigned int gpu, unsigned int gi)
{
    nvmlGpuInstance_t instance;
    _Static_assert(sizeof instance == sizeof(uint64_t), "an NVML handle holds 64 bits");
    fill(&instance, sizeof instance, encode(SIM_HANDLE_GI, gpu, gi, 0));
    return instance;
}

nvmlComputeInstance_t sim_ci_handle(unsigned int gpu, unsigned int gi, unsigned int ci)
{
    nvmlComputeInstance_t instance;
    _Static_assert(sizeof instance == sizeof(uint64_t), "an NVML handle holds 64 bits");
    fill(&instance, sizeof instance, encode(SIM_HANDLE_CI, gpu, gi, ci));
    return instance;
}

int sim_handle_gpu(nvmlDevice_t device)
{
    uint64_t value;
    memcpy(&value, &device, sizeof value);
    unsigned int number = (value >> 16) & 0xffff;
    if (value != encode(SIM_HANDLE_GPU, number, 0, 0) || number >= sim_state()->gpu_count)
        return -1;
    return (int)number;
}

/*
 * Decodes a handle. Fails unless every object that the handle names exists and is visible to this
 * process.
 */
static nvmlReturn_t find(uint64_t value, struct sim_target *target)
{
    nvmlReturn_t result = sim_check_initialized();
    if (result != NVML_SUCCESS)
        return result;
    memset(target, 0, sizeof *target);
    target->kind = (enum sim_handle_kind)((value >> 32) & 0xff);
    target->number = (value >> 16) & 0xffff;
    target->gi_id = (value >> 8) & 0xff;
    target->ci_id = value & 0xff;
    REQUIRE(value == encode(target->kind, target->number, target->gi_id, target->ci_id));
    REQUIRE(target->number < sim_state()->gpu_count && sim_gpu_visible(target->number));
    target->gpu = sim_gpu_at(target->number);
    target->model = sim_model(target->gpu);
    if (target->kind == SIM_HANDLE_GPU) {
        REQUIRE(target->gi_id == 0 && target->ci_id == 0);
        return NVML_SUCCESS;
    }
    target->gi = sim_gi(target->gpu, target->gi_id);
    REQUIRE(target->gi.exists);
    target->profile = sim_profile_by_id(target->model, target->gi.profile);
    REQUIRE(target->profile);
    if (target->kind == SIM_HANDLE_GI) {
        REQUIRE(target->ci_id == 0 && sim_gi_visible(target->gpu, target->gi_id));
        return NVML_SUCCESS;
    }
    REQUIRE(target->kind == SIM_HANDLE_MIG || target->kind == SIM_HANDLE_CI);
    target->ci = sim_ci(target->gpu, target->gi_id, target->ci_id);
    REQUIRE(target->ci.exists && sim_ci_visible(target->gpu, target->gi_id, target->ci_id));
    return NVML_SUCCESS;
}

nvmlReturn_t sim_find_gpu(nvmlDevice_t device, struct sim_target *target)
{
    uint64_t value;
    memcpy(&value, &device, sizeof value);
    nvmlReturn_t result = find(value, target);
    if (result == NVML_SUCCESS)
        REQUIRE(target->kind == SIM_HANDLE_GPU);
    return result;
}

nvmlReturn_t sim_find_device(nvmlDevice_t device, struct sim_target *target)
{
    uint64_t value;
    memcpy(&value, &device, sizeof value);
    nvmlReturn_t result = find(value, target);
    if (result == NVML_SUCCESS)
        REQUIRE(target->kind == SIM_HANDLE_GPU || target->kind == SIM_HANDLE_MIG);
    return result;
}

nvmlReturn_t sim_find_gi(nvmlGpuInstance_t instance, struct sim_target *target)
{
    uint64_t value;
    memcpy(&value, &instance, sizeof value);
    nvmlReturn_t result = find(value, target);
    if (result == NVML_SUCCESS)
        REQUIRE(target->kind == SIM_HANDLE_GI);
    return result;
}

nvmlReturn_t sim_find_ci(nvmlComputeInstance_t instance, struct sim_target *target)
{
    uint64_t value;
    memcpy(&value, &instance, sizeof value);
    nvmlReturn_t result = find(value, target);
    if (result == NVML_SUCCESS)
        REQUIRE(target->kind == SIM_HANDLE_CI);
    return result;
}

/*
 * Completes a call whose handle was decoded: applies the faults injected for the function, checks
 * that the GPU is not lost, and opens the GPU.
 */
static nvmlReturn_t meet(const char *function, nvmlReturn_t found, const struct sim_target *target)
{
    if (found != NVML_SUCCESS)
        return found;
    nvmlReturn_t result = sim_fault(function, (int)target->number);
    if (result != NVML_SUCCESS)
        return result;
    result = sim_gpu_answer(target->number);
    if (result != NVML_SUCCESS)
        return result;
    return sim_open_gpu(target->number); /* the handle may be older than the last nvmlShutdown, which closed the GPU */
}

nvmlReturn_t sim_enter_device(const char *function, nvmlDevice_t device, struct sim_target *target)
{
    return meet(function, sim_find_device(device, target), target);
}

nvmlReturn_t sim_enter_gi(const char *function, nvmlGpuInstance_t instance, struct sim_target *target)
{
    return meet(function, sim_find_gi(instance, target), target);
}

nvmlReturn_t sim_enter_ci(const char *function, nvmlComputeInstance_t instance, struct sim_target *target)
{
    return meet(function, sim_find_ci(instance, target), target);
}

nvmlReturn_t sim_enter(const char *function)
{
    nvmlReturn_t result = sim_check_initialized();
    return result == NVML_SUCCESS ? sim_fault(function, SIM_NO_GPU) : result;
}

nvmlReturn_t sim_enter_gpu(const char *function, nvmlDevice_t device, struct nvmlsim_gpu **gpu)
{
    struct sim_target target;
    nvmlReturn_t result = meet(function, sim_find_gpu(device, &target), &target);
    if (result == NVML_SUCCESS)
        *gpu = target.gpu;
    return result;
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

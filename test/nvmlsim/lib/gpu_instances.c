/* GPU instances: creating, listing, describing and destroying them. */
#include "sim.h"

#include <string.h>

NVMLSIM_API nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned int id, unsigned int *count)
{
    ENTER_GPU(device);
    REQUIRE(count);
    const struct nvmlsim_profile *profile = sim_profile_by_id(sim_model(gpu), id);
    if (!profile)
        return NVML_ERROR_NOT_SUPPORTED;
    /*
     * For a GPU with MIG mode off, nvml.h documents NOT_SUPPORTED. But on an H100 with driver
     * 580.159.04 nvidia-smi mig -lgip prints 7/7.
     */
    *count = sim_gi_capacity(gpu, profile);
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *instances,
                                                   unsigned int *count)
{
    ENTER_GPU(device);
    REQUIRE(count);
    if (!sim_profile_by_id(sim_model(gpu), id))
        return NVML_ERROR_NOT_SUPPORTED;
    /* nvml.h documents NOT_SUPPORTED without MIG mode. The H100 of test/hardware lists none. */
    unsigned int number = (unsigned int)sim_handle_gpu(device), found = 0;
    for (unsigned int gi = 0; gi < NVMLSIM_GPU_INSTANCES; gi++) {
        struct sim_instance instance = sim_gi(gpu, gi);
        if (!instance.exists || instance.profile != id || !sim_gi_visible(gpu, gi))
            continue;
        REQUIRE(instances);
        sim_subscribe(number, gi, -1);
        instances[found++] = sim_gi_handle(number, gi);
    }
    *count = found;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *instance)
{
    ENTER_GPU(device);
    REQUIRE(instance);
    if (!sim_model(gpu)->mig_supported)
        return NVML_ERROR_NOT_SUPPORTED;
    /* nvml.h documents NOT_SUPPORTED without MIG mode. The H100 of test/hardware finds none. */
    if (!sim_gi(gpu, id).exists || !sim_gi_visible(gpu, id))
        return NVML_ERROR_NOT_FOUND;
    sim_subscribe((unsigned int)sim_handle_gpu(device), id, -1);
    *instance = sim_gi_handle((unsigned int)sim_handle_gpu(device), id);
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
    ENTER_GI(instance);
    REQUIRE(info);
    info->device = sim_gpu_handle(at.number);
    info->id = at.gi_id;
    info->profileId = at.gi.profile;
    info->placement.start = at.gi.start;
    info->placement.size = at.gi.size;
    return NVML_SUCCESS;
}

/*
 * Creates a GPU instance while the caller holds the locks. With start below 0 the driver chooses
 * the placement.
 */
static nvmlReturn_t make(struct nvmlsim_gpu *gpu, unsigned int number, const struct nvmlsim_profile *profile, int start,
                         nvmlGpuInstance_t *instance)
{
    if (!LOAD(gpu->mig_current))
        return NVML_ERROR_NOT_SUPPORTED;
    if (LOAD(sim_state()->create_in_use) && !sim_has_instances(gpu)) {
        STORE(gpu->create_refused, !LOAD(gpu->create_refused));
        if (LOAD(gpu->create_refused))
            return NVML_ERROR_IN_USE;
    }
    if (start < 0)
        start = sim_gi_choose(gpu, profile);
    if (start < 0 || !sim_gi_fits(gpu, profile, (unsigned int)start))
        return NVML_ERROR_INSUFFICIENT_RESOURCES;
    int id = sim_gi_id(gpu, profile, (unsigned int)start);
    if (id < 0)
        return NVML_ERROR_INSUFFICIENT_RESOURCES;
    for (unsigned int ci = 0; ci < NVMLSIM_COMPUTE_INSTANCES; ci++)
        STORE(gpu->compute_instances[id][ci], 0); /* an interrupted reset may have left words here */
    STORE(gpu->instances[id], sim_pack(profile->id, (unsigned int)start, profile->placement_size));
    *instance = sim_gi_handle(number, (unsigned int)id);
    return NVML_SUCCESS;
}

static nvmlReturn_t create(const char *function, nvmlDevice_t device, unsigned int profile_id,
                           const nvmlGpuInstancePlacement_t *placement, nvmlGpuInstance_t *instance)
{
    struct sim_target at;
    nvmlReturn_t result = sim_find_gpu(device, &at);
    if (result != NVML_SUCCESS)
        return result;
    REQUIRE(instance);
    if (!at.model->mig_supported || at.gpu->virtualization == NVML_GPU_VIRTUALIZATION_MODE_VGPU)
        return NVML_ERROR_NOT_SUPPORTED;
    const struct nvmlsim_profile *profile = sim_profile_by_id(at.model, profile_id);
    REQUIRE(profile);
    if (placement) {
        bool possible = false;
        for (unsigned int i = 0; i < profile->placement_count && i < NVMLSIM_PLACEMENTS; i++)
            possible |= profile->placement_starts[i] == placement->start && profile->placement_size == placement->size;
        REQUIRE(possible);
    }
    struct sim_cut cut;
    result = sim_cut_begin(function, at.number, &cut);
    if (result != NVML_SUCCESS)
        return result;
    result = sim_cut_end(&cut, make(at.gpu, at.number, profile, placement ? (int)placement->start : -1, instance));
    struct sim_target made;
    if (result == NVML_SUCCESS && sim_find_gi(*instance, &made) == NVML_SUCCESS)
        sim_subscribe(made.number, made.gi_id, -1);
    return result;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned int profile_id, nvmlGpuInstance_t *instance)
{
    return create(__func__, device, profile_id, NULL, instance);
}

NVMLSIM_API nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned int profile_id,
                                                                  const nvmlGpuInstancePlacement_t *placement,
                                                                  nvmlGpuInstance_t *instance)
{
    REQUIRE(placement);
    return create(__func__, device, profile_id, placement, instance);
}

NVMLSIM_API nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t instance)
{
    struct sim_target at;
    nvmlReturn_t result = sim_find_gi(instance, &at);
    if (result != NVML_SUCCESS)
        return result;
    if (at.gpu->virtualization == NVML_GPU_VIRTUALIZATION_MODE_VGPU)
        return NVML_ERROR_NOT_SUPPORTED;
    struct sim_cut cut;
    result = sim_cut_begin(__func__, at.number, &cut);
    if (result != NVML_SUCCESS)
        return result;
    if (!sim_gi(at.gpu, at.gi_id).exists) /* another process has destroyed the GPU instance */
        result = NVML_ERROR_INVALID_ARGUMENT;
    else if (sim_has_compute_instances(at.gpu, at.gi_id))
        result = NVML_ERROR_IN_USE;
    else if (LOAD(sim_state()->client_blocks_destroy) && sim_subscribed_elsewhere(at.number, at.gi_id, -1))
        result = NVML_ERROR_IN_USE;
    else {
        STORE(at.gpu->instances[at.gi_id], 0);
        sim_unsubscribe(at.number, at.gi_id, -1);
        if (LOAD(sim_state()->fabric_by_instances) && !sim_has_instances(at.gpu))
            sim_rejoin_fabric(at.gpu);
    }
    return sim_cut_end(&cut, result);
}

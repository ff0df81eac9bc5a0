/* Compute instances: creating, listing, describing and destroying them. */
#include "sim.h"

#include <string.h>

static uint32_t slices_at(unsigned int start, unsigned int size) { return ((UINT32_C(1) << (size & 31)) - 1) << (start & 31); }

/*
 * Returns the slices of the GPU instance that its compute instances use, as a bit mask. Stores the
 * number of compute instances of the profile in of_profile.
 */
static uint32_t occupied(const struct nvmlsim_gpu *gpu, unsigned int gi, unsigned int profile, unsigned int *of_profile)
{
    uint32_t taken = 0;
    *of_profile = 0;
    for (unsigned int id = 0; id < NVMLSIM_COMPUTE_INSTANCES; id++) {
        struct sim_instance ci = sim_ci(gpu, gi, id);
        if (!ci.exists)
            continue;
        taken |= slices_at(ci.start, ci.size);
        *of_profile += ci.profile == profile;
    }
    return taken;
}

static unsigned int capacity(const struct nvmlsim_gpu *gpu, unsigned int gi, const struct nvmlsim_ci_profile *profile)
{
    unsigned int used, room = 0;
    uint32_t taken = occupied(gpu, gi, profile->id, &used);
    for (unsigned int i = 0; i < profile->placement_count && used + room < profile->instances_max; i++) {
        uint32_t wanted = slices_at(profile->placement_starts[i], profile->slices);
        if (taken & wanted)
            continue;
        taken |= wanted;
        room++;
    }
    return room;
}

NVMLSIM_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(nvmlGpuInstance_t instance, unsigned int id,
                                                                            unsigned int *count)
{
    ENTER_GI(instance);
    REQUIRE(count);
    struct nvmlsim_ci_profile profile;
    if (!sim_ci_profile(at.model, at.profile, id, &profile))
        return NVML_ERROR_NOT_SUPPORTED;
    *count = capacity(at.gpu, at.gi_id, &profile);
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlGpuInstanceGetComputeInstancePossiblePlacements(nvmlGpuInstance_t instance, unsigned int id,
                                                                             nvmlComputeInstancePlacement_t *placements,
                                                                             unsigned int *count)
{
    ENTER_GI(instance);
    REQUIRE(count);
    struct nvmlsim_ci_profile profile;
    if (!sim_ci_profile(at.model, at.profile, id, &profile))
        return NVML_ERROR_NOT_SUPPORTED;
    unsigned int room = *count;
    *count = profile.placement_count;
    if (!placements)
        return NVML_SUCCESS;
    if (room < profile.placement_count)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < profile.placement_count; i++) {
        placements[i].start = profile.placement_starts[i];
        placements[i].size = profile.slices;
    }
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t instance, unsigned int id,
                                                            nvmlComputeInstance_t *instances, unsigned int *count)
{
    ENTER_GI(instance);
    REQUIRE(count);
    struct nvmlsim_ci_profile profile;
    if (!sim_ci_profile(at.model, at.profile, id, &profile))
        return NVML_ERROR_NOT_SUPPORTED;
    unsigned int found = 0;
    for (unsigned int ci = 0; ci < NVMLSIM_COMPUTE_INSTANCES; ci++) {
        struct sim_instance have = sim_ci(at.gpu, at.gi_id, ci);
        if (!have.exists || have.profile != id || !sim_ci_visible(at.gpu, at.gi_id, ci))
            continue;
        REQUIRE(instances);
        sim_subscribe(at.number, at.gi_id, (int)ci);
        instances[found++] = sim_ci_handle(at.number, at.gi_id, ci);
    }
    *count = found;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance, unsigned int id,
                                                               nvmlComputeInstance_t *found)
{
    ENTER_GI(instance);
    REQUIRE(found);
    if (!sim_ci(at.gpu, at.gi_id, id).exists || !sim_ci_visible(at.gpu, at.gi_id, id))
        return NVML_ERROR_NOT_FOUND;
    sim_subscribe(at.number, at.gi_id, (int)id);
    *found = sim_ci_handle(at.number, at.gi_id, id);
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info)
{
    ENTER_CI(instance);
    REQUIRE(info);
    info->device = sim_gpu_handle(at.number);
    info->gpuInstance = sim_gi_handle(at.number, at.gi_id);
    info->id = at.ci_id;
    info->profileId = at.ci.profile;
    info->placement.start = at.ci.start;
    info->placement.size = at.ci.size;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlComputeInstanceGetInfo(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info)
{
    return nvmlComputeInstanceGetInfo_v2(instance, info);
}

/*
 * Creates a compute instance while the caller holds the locks. With start below 0 it takes the
 * first free placement.
 */
static nvmlReturn_t make(const struct sim_target *at, const struct nvmlsim_ci_profile *profile, int start,
                         nvmlComputeInstance_t *instance)
{
    struct sim_instance gi = sim_gi(at->gpu, at->gi_id);
    if (!gi.exists || gi.profile != at->gi.profile) /* another process destroyed the GPU instance */
        return NVML_ERROR_INVALID_ARGUMENT;
    unsigned int used;
    uint32_t taken = occupied(at->gpu, at->gi_id, profile->id, &used);
    for (unsigned int i = 0; i < profile->placement_count && used < profile->instances_max; i++) {
        unsigned int place = profile->placement_starts[i];
        if ((start >= 0 && place != (unsigned int)start) || taken & slices_at(place, profile->slices))
            continue;
        for (unsigned int id = 0; id < NVMLSIM_COMPUTE_INSTANCES; id++) {
            if (sim_ci(at->gpu, at->gi_id, id).exists)
                continue;
            uint64_t pipe = LOAD(sim_state()->uuid_by_syspipe) ? sim_next_syspipe(at->gpu) : 0;
            STORE(at->gpu->compute_instances[at->gi_id][id], sim_pack(profile->id, place, profile->slices) | pipe);
            *instance = sim_ci_handle(at->number, at->gi_id, id);
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_INSUFFICIENT_RESOURCES;
}

static nvmlReturn_t create(const char *function, nvmlGpuInstance_t gi, unsigned int profile_id,
                           const nvmlComputeInstancePlacement_t *placement, nvmlComputeInstance_t *instance)
{
    struct sim_target at;
    nvmlReturn_t result = sim_find_gi(gi, &at);
    if (result != NVML_SUCCESS)
        return result;
    REQUIRE(instance);
    if (at.gpu->virtualization == NVML_GPU_VIRTUALIZATION_MODE_VGPU)
        return NVML_ERROR_NOT_SUPPORTED;
    struct nvmlsim_ci_profile profile;
    REQUIRE(sim_ci_profile(at.model, at.profile, profile_id, &profile));
    if (placement) {
        bool possible = false;
        for (unsigned int i = 0; i < profile.placement_count; i++)
            possible |= profile.placement_starts[i] == placement->start && profile.slices == placement->size;
        REQUIRE(possible);
    }
    struct sim_cut cut;
    result = sim_cut_begin(function, at.number, &cut);
    if (result != NVML_SUCCESS)
        return result;
    result = sim_cut_end(&cut, make(&at, &profile, placement ? (int)placement->start : -1, instance));
    struct sim_target made;
    if (result == NVML_SUCCESS && sim_find_ci(*instance, &made) == NVML_SUCCESS)
        sim_subscribe(made.number, made.gi_id, (int)made.ci_id);
    return result;
}

NVMLSIM_API nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t gi, unsigned int profile_id,
                                                              nvmlComputeInstance_t *instance)
{
    return create(__func__, gi, profile_id, NULL, instance);
}

NVMLSIM_API nvmlReturn_t nvmlGpuInstanceCreateComputeInstanceWithPlacement(nvmlGpuInstance_t gi, unsigned int profile_id,
                                                                           const nvmlComputeInstancePlacement_t *placement,
                                                                           nvmlComputeInstance_t *instance)
{
    REQUIRE(placement);
    return create(__func__, gi, profile_id, placement, instance);
}

NVMLSIM_API nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t instance)
{
    struct sim_target at;
    nvmlReturn_t result = sim_find_ci(instance, &at);
    if (result != NVML_SUCCESS)
        return result;
    if (at.gpu->virtualization == NVML_GPU_VIRTUALIZATION_MODE_VGPU)
        return NVML_ERROR_NOT_SUPPORTED;
    struct sim_cut cut;
    result = sim_cut_begin(__func__, at.number, &cut);
    if (result != NVML_SUCCESS)
        return result;
    if (!sim_ci(at.gpu, at.gi_id, at.ci_id).exists)
        result = NVML_ERROR_INVALID_ARGUMENT;
    else if (sim_is_busy(at.gpu, at.gi_id, at.ci_id))
        result = NVML_ERROR_IN_USE;
    else if (LOAD(sim_state()->client_blocks_destroy) && sim_subscribed_elsewhere(at.number, at.gi_id, (int)at.ci_id))
        result = NVML_ERROR_IN_USE;
    else {
        STORE(at.gpu->compute_instances[at.gi_id][at.ci_id], 0);
        sim_unsubscribe(at.number, at.gi_id, (int)at.ci_id);
    }
    return sim_cut_end(&cut, result);
}

/* Compute instance profiles: the parts that a GPU instance can be divided into. */
#include "sim.h"

#include <stdio.h>
#include <string.h>

/*
 * Finds a compute instance profile by ID. Most profiles depend only on the number of slices of the
 * GPU instance. The profile that fills the GPU instance has all its multiprocessors, and may have
 * its own ID.
 */
bool sim_ci_profile(const struct nvmlsim_model *model, const struct nvmlsim_profile *gi, unsigned int id, struct nvmlsim_ci_profile *found)
{
    for (unsigned int i = 0; i < model->ci_profile_count && i < NVMLSIM_CI_PROFILES; i++) {
        const struct nvmlsim_ci_profile *profile = &model->ci_profiles[i];
        if (profile->gi_slices != gi->slices)
            continue;
        bool fills = profile->slices == gi->slices;
        unsigned int its_id = fills && gi->whole_ci != NVMLSIM_ABSENT ? gi->whole_ci : profile->id;
        if (its_id != id)
            continue;
        *found = *profile;
        found->id = its_id;
        if (fills)
            found->sm = gi->sm;
        if (found->placement_count > ARRAY_SIZE(found->placement_starts))
            found->placement_count = ARRAY_SIZE(found->placement_starts);
        return true;
    }
    return false;
}

/*
 * Sets the profile's name as nvidia-smi prints it: the GPU instance's name if the profile fills the
 * GPU instance, and a name such as "MIG 1c.3g.40gb" otherwise.
 */
static void name_profile(const struct nvmlsim_profile *gi, const struct nvmlsim_ci_profile *ci, char *name, size_t size)
{
    static const char prefix[] = "MIG ";
    const char *bare = strncmp(gi->name, prefix, sizeof prefix - 1) == 0 ? gi->name + sizeof prefix - 1 : gi->name;
    if (ci->slices == gi->slices)
        snprintf(name, size, "%s", gi->name);
    else
        snprintf(name, size, "%s%uc.%s", prefix, ci->slices, bare);
}

void sim_mig_device_name(const struct sim_target *at, char *name, size_t size)
{
    struct nvmlsim_ci_profile profile;
    char part[64] = "MIG";
    if (sim_ci_profile(at->model, at->profile, at->ci.profile, &profile))
        name_profile(at->profile, &profile, part, sizeof part);
    snprintf(name, size, "%s %s", at->model->name, part);
}

/* Finds a profile by its NVML_COMPUTE_INSTANCE_PROFILE_* value, which equals the profile's ID. */
static nvmlReturn_t find(const struct sim_target *at, unsigned int profile, unsigned int engines, struct nvmlsim_ci_profile *found)
{
    REQUIRE(profile < NVML_COMPUTE_INSTANCE_PROFILE_COUNT && engines < NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT);
    return sim_ci_profile(at->model, at->profile, profile, found) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

NVMLSIM_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t instance, unsigned int profile,
                                                                      unsigned int engines, nvmlComputeInstanceProfileInfo_t *info)
{
    ENTER_GI(instance);
    REQUIRE(info);
    struct nvmlsim_ci_profile found;
    nvmlReturn_t result = find(&at, profile, engines, &found);
    if (result != NVML_SUCCESS)
        return result;
    memset(info, 0, sizeof *info);
    info->id = found.id;
    info->sliceCount = found.slices;
    info->instanceCount = found.instances_max;
    info->multiprocessorCount = found.sm;
    info->sharedCopyEngineCount = at.profile->copy_engines;
    info->sharedDecoderCount = at.profile->decoders;
    info->sharedEncoderCount = at.profile->encoders;
    info->sharedJpegCount = at.profile->jpeg_engines;
    info->sharedOfaCount = at.profile->ofa_engines;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t instance, unsigned int profile,
                                                                       unsigned int engines, nvmlComputeInstanceProfileInfo_v2_t *info)
{
    ENTER_GI(instance);
    REQUIRE(info);
    if (info->version != nvmlComputeInstanceProfileInfo_v2 && info->version != nvmlComputeInstanceProfileInfo_v3)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    struct nvmlsim_ci_profile found;
    nvmlReturn_t result = find(&at, profile, engines, &found);
    if (result != NVML_SUCCESS)
        return result;
    /* The struct of version 3 is that of version 2 with one more field at its end. */
    info->id = found.id;
    info->sliceCount = found.slices;
    info->instanceCount = found.instances_max;
    info->multiprocessorCount = found.sm;
    info->sharedCopyEngineCount = at.profile->copy_engines;
    info->sharedDecoderCount = at.profile->decoders;
    info->sharedEncoderCount = at.profile->encoders;
    info->sharedJpegCount = at.profile->jpeg_engines;
    info->sharedOfaCount = at.profile->ofa_engines;
    name_profile(at.profile, &found, info->name, sizeof info->name);
    if (info->version == nvmlComputeInstanceProfileInfo_v3)
        ((nvmlComputeInstanceProfileInfo_v3_t *)(void *)info)->capabilities = 0;
    return NVML_SUCCESS;
}

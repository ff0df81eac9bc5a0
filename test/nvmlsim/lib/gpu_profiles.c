/*
 * GPU instance profiles and all their possible placements, including those that existing GPU
 * instances occupy.
 */
#include "sim.h"

#include <string.h>

static const struct nvmlsim_profile *profile_by_enum(const struct nvmlsim_model *model, unsigned int nvml_profile)
{
    for (unsigned int i = 0; i < model->profile_count && i < NVMLSIM_PROFILES; i++)
        if (model->profiles[i].nvml_profile == nvml_profile)
            return &model->profiles[i];
    return NULL;
}

/*
 * A number that the driver's version does not know is an invalid argument. The header of 595 names
 * 18 profiles, and driver 580.159.04 knows the first 17 (test/hardware).
 */
static nvmlReturn_t find_profile(const struct nvmlsim_gpu *gpu, unsigned int nvml_profile, const struct nvmlsim_profile **found)
{
    *found = profile_by_enum(sim_model(gpu), nvml_profile);
    if (*found)
        return NVML_SUCCESS;
    return nvml_profile > NVML_GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int profile,
                                                             nvmlGpuInstanceProfileInfo_t *info)
{
    ENTER_GPU(device);
    REQUIRE(info);
    const struct nvmlsim_profile *found;
    nvmlReturn_t result = find_profile(gpu, profile, &found);
    if (result != NVML_SUCCESS)
        return result;
    memset(info, 0, sizeof *info);
    info->id = found->id;
    info->isP2pSupported = found->p2p;
    info->sliceCount = found->slices;
    info->instanceCount = found->instances_max;
    info->multiprocessorCount = found->sm;
    info->copyEngineCount = found->copy_engines;
    info->decoderCount = found->decoders;
    info->encoderCount = found->encoders;
    info->jpegCount = found->jpeg_engines;
    info->ofaCount = found->ofa_engines;
    info->memorySizeMB = found->memory_mib;
    return NVML_SUCCESS;
}

static void fill_v2(const struct nvmlsim_profile *from, nvmlGpuInstanceProfileInfo_v2_t *info)
{
    info->id = from->id;
    info->isP2pSupported = from->p2p;
    info->sliceCount = from->slices;
    info->instanceCount = from->instances_max;
    info->multiprocessorCount = from->sm;
    info->copyEngineCount = from->copy_engines;
    info->decoderCount = from->decoders;
    info->encoderCount = from->encoders;
    info->jpegCount = from->jpeg_engines;
    info->ofaCount = from->ofa_engines;
    info->memorySizeMB = from->memory_mib;
    sim_copy_string(info->name, sizeof info->name, from->name);
}

static void fill_v3(const struct nvmlsim_profile *from, nvmlGpuInstanceProfileInfo_v3_t *info)
{
    info->id = from->id;
    info->sliceCount = from->slices;
    info->instanceCount = from->instances_max;
    info->multiprocessorCount = from->sm;
    info->copyEngineCount = from->copy_engines;
    info->decoderCount = from->decoders;
    info->encoderCount = from->encoders;
    info->jpegCount = from->jpeg_engines;
    info->ofaCount = from->ofa_engines;
    info->memorySizeMB = from->memory_mib;
    info->capabilities = from->p2p ? NVML_GPU_INSTANCE_PROFILE_CAPS_P2P : 0;
    sim_copy_string(info->name, sizeof info->name, ""); /* as driver 580.159.04 leaves it (test/hardware) */
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned int profile,
                                                              nvmlGpuInstanceProfileInfo_v2_t *info)
{
    ENTER_GPU(device);
    REQUIRE(info);
    unsigned int version = info->version;
    if (version != nvmlGpuInstanceProfileInfo_v2 && version != nvmlGpuInstanceProfileInfo_v3)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    const struct nvmlsim_profile *found;
    nvmlReturn_t result = find_profile(gpu, profile, &found);
    if (result != NVML_SUCCESS)
        return result;
    if (version == nvmlGpuInstanceProfileInfo_v2)
        fill_v2(found, info);
    else
        fill_v3(found, (nvmlGpuInstanceProfileInfo_v3_t *)(void *)info); /* info->version says which struct info points to */
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned int id,
                                                                  nvmlGpuInstanceProfileInfo_v2_t *info)
{
    ENTER_GPU(device);
    REQUIRE(info);
    const struct nvmlsim_profile *found = sim_profile_by_id(sim_model(gpu), id);
    if (!found)
        return NVML_ERROR_NOT_SUPPORTED;
    return nvmlDeviceGetGpuInstanceProfileInfoV(device, found->nvml_profile, info);
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned int id,
                                                                       nvmlGpuInstancePlacement_t *placements,
                                                                       unsigned int *count)
{
    ENTER_GPU(device);
    REQUIRE(count);
    const struct nvmlsim_profile *profile = sim_profile_by_id(sim_model(gpu), id);
    if (!profile)
        return NVML_ERROR_NOT_SUPPORTED;
    unsigned int room = *count;
    *count = profile->placement_count;
    if (!placements)
        return NVML_SUCCESS;
    if (room < profile->placement_count)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < profile->placement_count && i < NVMLSIM_PLACEMENTS; i++) {
        placements[i].start = profile->placement_starts[i];
        placements[i].size = profile->placement_size;
    }
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements(nvmlDevice_t device, unsigned int id,
                                                                    nvmlGpuInstancePlacement_t *placements, unsigned int *count)
{
    return nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, id, placements, count);
}

/*
 * MIG as far as it can be read: mode, profiles, placements. Instances are not simulated yet: there are none, and
 * making one answers NOT_SUPPORTED (the generated stubs).
 */
#include "sim.h"

#include <string.h>

NVMLSIM_API nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig)
{
    ENTER_GPU(device);
    (void)gpu;
    REQUIRE(is_mig);
    *is_mig = 0;
    return NVML_SUCCESS;
}

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

NVMLSIM_API nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    ENTER_GPU(device);
    REQUIRE(count);
    *count = LOAD(gpu->mig_current) ? sim_model(gpu)->mig_max_instances : 0; /* "zero if MIG is not supported or enabled" */
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig)
{
    ENTER_GPU(device);
    REQUIRE(mig);
    if (!sim_model(gpu)->mig_supported)
        return NVML_ERROR_NOT_SUPPORTED;
    REQUIRE(index < sim_model(gpu)->mig_max_instances);
    return NVML_ERROR_NOT_FOUND;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device)
{
    ENTER_GPU(mig);
    (void)gpu;
    REQUIRE(device);
    return NVML_ERROR_INVALID_ARGUMENT; /* a whole GPU's handle is no MIG device's */
}

static const struct nvmlsim_profile *profile_by_enum(const struct nvmlsim_model *model, unsigned int nvml_profile)
{
    for (unsigned int i = 0; i < model->profile_count && i < NVMLSIM_PROFILES; i++)
        if (model->profiles[i].nvml_profile == nvml_profile)
            return &model->profiles[i];
    return NULL;
}

static const struct nvmlsim_profile *profile_by_id(const struct nvmlsim_model *model, unsigned int id)
{
    for (unsigned int i = 0; i < model->profile_count && i < NVMLSIM_PROFILES; i++)
        if (model->profiles[i].id == id)
            return &model->profiles[i];
    return NULL;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int profile,
                                                             nvmlGpuInstanceProfileInfo_t *info)
{
    ENTER_GPU(device);
    REQUIRE(info && profile < NVML_GPU_INSTANCE_PROFILE_COUNT);
    const struct nvmlsim_profile *found = profile_by_enum(sim_model(gpu), profile);
    if (!found)
        return NVML_ERROR_NOT_SUPPORTED;
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
    sim_copy_string(info->name, sizeof info->name, from->name);
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned int profile,
                                                              nvmlGpuInstanceProfileInfo_v2_t *info)
{
    ENTER_GPU(device);
    REQUIRE(info && profile < NVML_GPU_INSTANCE_PROFILE_COUNT);
    unsigned int version = info->version;
    if (version != nvmlGpuInstanceProfileInfo_v2 && version != nvmlGpuInstanceProfileInfo_v3)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    const struct nvmlsim_profile *found = profile_by_enum(sim_model(gpu), profile);
    if (!found)
        return NVML_ERROR_NOT_SUPPORTED;
    if (version == nvmlGpuInstanceProfileInfo_v2)
        fill_v2(found, info);
    else
        fill_v3(found, (nvmlGpuInstanceProfileInfo_v3_t *)(void *)info); /* the caller's struct is of the version it names */
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned int id,
                                                                  nvmlGpuInstanceProfileInfo_v2_t *info)
{
    ENTER_GPU(device);
    REQUIRE(info);
    const struct nvmlsim_profile *found = profile_by_id(sim_model(gpu), id);
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
    const struct nvmlsim_profile *profile = profile_by_id(sim_model(gpu), id);
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

NVMLSIM_API nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned int id, unsigned int *count)
{
    ENTER_GPU(device);
    REQUIRE(count);
    const struct nvmlsim_profile *profile = profile_by_id(sim_model(gpu), id);
    if (!profile)
        return NVML_ERROR_NOT_SUPPORTED;
    /* nvml.h names NOT_SUPPORTED for a GPU with MIG off; but nvidia-smi mig -lgip, which stops on that, was seen to print 0/7. */
    *count = LOAD(gpu->mig_current) ? profile->instances_max : 0;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *instances,
                                                   unsigned int *count)
{
    ENTER_GPU(device);
    REQUIRE(count);
    (void)instances;
    *count = 0;
    if (!LOAD(gpu->mig_current) || !profile_by_id(sim_model(gpu), id))
        return NVML_ERROR_NOT_SUPPORTED;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *instance)
{
    ENTER_GPU(device);
    REQUIRE(instance);
    (void)id;
    return LOAD(gpu->mig_current) ? NVML_ERROR_NOT_FOUND : NVML_ERROR_NOT_SUPPORTED;
}

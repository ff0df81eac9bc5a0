/* MIG devices. Each handle of a MIG device refers to one compute instance. */
#include "sim.h"

#include <stdio.h>
#include <string.h>

NVMLSIM_API nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig)
{
    ENTER_DEVICE(device);
    REQUIRE(is_mig);
    *is_mig = at.kind == SIM_HANDLE_MIG;
    return NVML_SUCCESS;
}

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

void sim_mig_uuid(const struct nvmlsim_gpu *gpu, unsigned int gi, unsigned int ci, char uuid[NVML_DEVICE_UUID_BUFFER_SIZE])
{
    /* With syspipes the same IDs have another UUID if the compute instance got another syspipe. */
    unsigned int pipe = gi < NVMLSIM_GPU_INSTANCES && ci < NVMLSIM_COMPUTE_INSTANCES ? sim_syspipe(LOAD(gpu->compute_instances[gi][ci])) : 0;
    unsigned int own = pipe ? 0x80 | pipe : ci;
    uint64_t half[2];
    for (unsigned int i = 0; i < 2; i++) {
        uint64_t hash = UINT64_C(0xcbf29ce484222325) + i; /* FNV-1a */
        for (const char *c = gpu->uuid; *c; c++)
            hash = (hash ^ (unsigned char)*c) * UINT64_C(0x100000001b3);
        half[i] = mix(hash ^ (uint64_t)(gi << 8 | own) << 20);
    }
    half[0] = (half[0] & ~UINT64_C(0xf000)) | 0x5000;                       /* version 5: derived from a name */
    half[1] = (half[1] & ~(UINT64_C(3) << 62)) | UINT64_C(2) << 62;         /* variant of RFC 9562 */
    snprintf(uuid, NVML_DEVICE_UUID_BUFFER_SIZE, "MIG-%08x-%04x-%04x-%04x-%012llx", (unsigned int)(half[0] >> 32),
             (unsigned int)(half[0] >> 16) & 0xffff, (unsigned int)half[0] & 0xffff, (unsigned int)(half[1] >> 48),
             (unsigned long long)(half[1] & UINT64_C(0xffffffffffff)));
}

/*
 * A position in the list of a GPU's visible MIG devices, ordered by GPU instance and compute
 * instance. index counts the MIG devices so far.
 */
struct walk {
    const struct nvmlsim_gpu *gpu;
    unsigned int index, gi, ci;
};

static bool next(struct walk *walk)
{
    for (; walk->gi < NVMLSIM_GPU_INSTANCES; walk->gi++, walk->ci = 0)
        for (; walk->ci < NVMLSIM_COMPUTE_INSTANCES; walk->ci++)
            if (sim_ci(walk->gpu, walk->gi, walk->ci).exists && sim_ci_visible(walk->gpu, walk->gi, walk->ci))
                return true;
    return false;
}

static void step(struct walk *walk)
{
    walk->index++;
    walk->ci++;
}

bool sim_find_mig_device(unsigned int number, const char *uuid, nvmlDevice_t *device)
{
    for (struct walk walk = {.gpu = sim_gpu_at(number)}; next(&walk); step(&walk)) {
        char its[NVML_DEVICE_UUID_BUFFER_SIZE];
        sim_mig_uuid(walk.gpu, walk.gi, walk.ci, its);
        if (strcmp(its, uuid) == 0) {
            *device = sim_mig_handle(number, walk.gi, walk.ci);
            return true;
        }
    }
    return false;
}

unsigned int sim_mig_index(const struct sim_target *at)
{
    struct walk walk = {.gpu = at->gpu};
    while (next(&walk) && (walk.gi != at->gi_id || walk.ci != at->ci_id))
        step(&walk);
    return walk.index;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig)
{
    ENTER_GPU(device);
    REQUIRE(mig);
    if (!sim_model(gpu)->mig_supported)
        return NVML_ERROR_NOT_SUPPORTED;
    REQUIRE(index < sim_model(gpu)->mig_max_instances);
    for (struct walk walk = {.gpu = gpu}; next(&walk); step(&walk))
        if (walk.index == index) {
            *mig = sim_mig_handle((unsigned int)sim_handle_gpu(device), walk.gi, walk.ci);
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device)
{
    ENTER_DEVICE(mig);
    REQUIRE(device && at.kind == SIM_HANDLE_MIG);
    *device = sim_gpu_handle(at.number);
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    ENTER_DEVICE(device);
    REQUIRE(id);
    if (at.kind != SIM_HANDLE_MIG)
        return NVML_ERROR_NOT_SUPPORTED;
    *id = at.gi_id;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    ENTER_DEVICE(device);
    REQUIRE(id);
    if (at.kind != SIM_HANDLE_MIG)
        return NVML_ERROR_NOT_SUPPORTED;
    *id = at.ci_id;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    ENTER_DEVICE(device);
    REQUIRE(attributes);
    struct nvmlsim_ci_profile profile;
    if (at.kind != SIM_HANDLE_MIG || !sim_ci_profile(at.model, at.profile, at.ci.profile, &profile))
        return NVML_ERROR_NOT_SUPPORTED;
    memset(attributes, 0, sizeof *attributes);
    attributes->multiprocessorCount = profile.sm;
    attributes->sharedCopyEngineCount = at.profile->copy_engines;
    attributes->sharedDecoderCount = at.profile->decoders;
    attributes->sharedEncoderCount = at.profile->encoders;
    attributes->sharedJpegCount = at.profile->jpeg_engines;
    attributes->sharedOfaCount = at.profile->ofa_engines;
    attributes->gpuInstanceSliceCount = at.profile->slices;
    attributes->computeInstanceSliceCount = profile.slices;
    attributes->memorySizeMB = at.profile->memory_mib;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    return nvmlDeviceGetAttributes_v2(device, attributes);
}

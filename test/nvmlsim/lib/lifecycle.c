/*
 * nvmlInit, nvmlShutdown, the system's versions, and what an initialised process may see.
 * 
 * As in the real library, a process's GPUs are determined when it initialises, and again at its
 * next nvmlInit after its last nvmlShutdown.
 */
#include "sim.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t process_lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned int init_count;
static uint32_t driver_epoch; /* driver_epoch of the state at nvmlInit */

enum { MAX_VISIBLE = 4096 };
static uint16_t visible[MAX_VISIBLE]; /* GPU numbers by NVML index */
static uint32_t epochs[MAX_VISIBLE];  /* epoch of each GPU at nvmlInit, by NVML index */
static unsigned int visible_count;

static void find_visible(void)
{
    const struct nvmlsim_header *state = sim_state();
    unsigned int count = 0;
    for (unsigned int i = 0; i < state->gpu_count && count < MAX_VISIBLE; i++) {
        const struct nvmlsim_gpu *gpu = sim_gpu_at(i);
        if (!LOAD(gpu->present) || !sim_gpu_bound(gpu) || !sim_gpu_device_opens(gpu->minor))
            continue;
        epochs[count] = LOAD(gpu->epoch);
        visible[count++] = (uint16_t)i;
    }
    STORE(visible_count, count);
}

unsigned int sim_visible_count(void) { return LOAD(visible_count); }

int sim_visible_gpu(unsigned int index) { return index < sim_visible_count() ? visible[index] : -1; }

int sim_index_of(unsigned int number)
{
    for (unsigned int i = 0; i < sim_visible_count(); i++)
        if (visible[i] == number)
            return (int)i;
    return -1;
}

bool sim_gpu_bound(const struct nvmlsim_gpu *gpu)
{
    uint64_t binding = LOAD(gpu->binding);
    return binding == NVMLSIM_BOUND || binding == NVMLSIM_BOUND_OVERRIDDEN;
}

bool sim_gpu_lost(unsigned int number)
{
    const struct nvmlsim_gpu *gpu = sim_gpu_at(number);
    int index = sim_index_of(number);
    /* The driver lets go of a GPU when no process has it open. Until then it serves them. */
    if (!sim_gpu_bound(gpu) && !sim_gpu_opened(number))
        return true;
    return LOAD(gpu->lost) || (index >= 0 && LOAD(gpu->epoch) != epochs[index]);
}

nvmlReturn_t sim_gpu_answer(unsigned int number)
{
    if (!sim_gpu_lost(number))
        return NVML_SUCCESS;
    const struct nvmlsim_gpu *gpu = sim_gpu_at(number);
    if (LOAD(gpu->lost) == NVMLSIM_LOST_SILENT) {
        enum { STEP_MS = 50 };
        for (uint32_t waited = 0; waited < LOAD(sim_state()->gsp_timeout_ms) && LOAD(gpu->lost) == NVMLSIM_LOST_SILENT; waited += STEP_MS)
            sim_wait_ms(STEP_MS);
        if (LOAD(gpu->lost) != NVMLSIM_LOST_SILENT) /* it was restored meanwhile */
            return sim_gpu_answer(number);
        sim_post_xid(number, 119); /* "Timeout waiting for RPC from GSP" */
        return NVML_ERROR_UNKNOWN;
    }
    return LOAD(gpu->lost) == NVMLSIM_LOST_UNKNOWN ? NVML_ERROR_UNKNOWN : NVML_ERROR_GPU_IS_LOST;
}

bool sim_gpu_visible(unsigned int number) { return sim_index_of(number) >= 0; }

nvmlReturn_t sim_check_initialized(void)
{
    if (LOAD(init_count) == 0)
        return NVML_ERROR_UNINITIALIZED;
    /* With force, the control tool can unload the driver while this process uses it. */
    const struct nvmlsim_header *state = sim_state();
    if (!LOAD(state->driver_loaded) || LOAD(state->driver_epoch) != driver_epoch)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    return NVML_SUCCESS;
}

static nvmlReturn_t first_init(void)
{
    nvmlReturn_t result = sim_attach();
    if (result != NVML_SUCCESS)
        return result;
    const struct nvmlsim_header *state = sim_state();
    if (!LOAD(state->driver_loaded))
        return NVML_ERROR_DRIVER_NOT_LOADED;
    const char *version = sim_library_version();
    if (*version && strcmp(version, state->driver_version) != 0)
        return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    result = sim_fault("nvmlInit_v2", SIM_NO_GPU);
    if (result != NVML_SUCCESS)
        return result;
    if (!sim_control_device_opens())
        return NVML_ERROR_DRIVER_NOT_LOADED;
    driver_epoch = LOAD(state->driver_epoch);
    result = sim_hold_driver();
    if (result != NVML_SUCCESS)
        return result;
    find_visible();
    sim_sync_capabilities(); /* a process may have been killed before it updated them */
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags; /* the flags only matter without GPUs; this library initialises even then */
    pthread_mutex_lock(&process_lock);
    nvmlReturn_t result = init_count > 0 ? NVML_SUCCESS : first_init();
    if (result == NVML_SUCCESS)
        STORE(init_count, init_count + 1);
    pthread_mutex_unlock(&process_lock);
    return result;
}

NVMLSIM_API nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
NVMLSIM_API nvmlReturn_t nvmlInit(void) { return nvmlInitWithFlags(0); }
NVMLSIM_API nvmlReturn_t nvmlInit_v1(void) { return nvmlInitWithFlags(0); }

NVMLSIM_API nvmlReturn_t nvmlShutdown(void)
{
    nvmlReturn_t result = NVML_SUCCESS;
    pthread_mutex_lock(&process_lock);
    if (init_count == 0)
        result = NVML_ERROR_UNINITIALIZED;
    else if (init_count == 1)
        sim_release_driver();
    if (result == NVML_SUCCESS)
        STORE(init_count, init_count - 1);
    pthread_mutex_unlock(&process_lock);
    return result;
}

NVMLSIM_API const char *nvmlErrorString(nvmlReturn_t result)
{
    switch (result) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
    case NVML_ERROR_ALREADY_INITIALIZED: return "Already Initialized";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
    case NVML_ERROR_INSUFFICIENT_POWER: return "Insufficient External Power";
    case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case NVML_ERROR_TIMEOUT: return "Timeout";
    case NVML_ERROR_IRQ_ISSUE: return "Interrupt Request Issue";
    case NVML_ERROR_LIBRARY_NOT_FOUND: return "NVML Shared Library Not Found";
    case NVML_ERROR_FUNCTION_NOT_FOUND: return "Function Not Found";
    case NVML_ERROR_CORRUPTED_INFOROM: return "Corrupted infoROM";
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    case NVML_ERROR_RESET_REQUIRED: return "GPU requires reset";
    case NVML_ERROR_OPERATING_SYSTEM: return "GPU access blocked by the operating system";
    case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    case NVML_ERROR_IN_USE: return "In use by another client";
    case NVML_ERROR_MEMORY: return "Insufficient Memory";
    case NVML_ERROR_NO_DATA: return "No data";
    case NVML_ERROR_VGPU_ECC_NOT_SUPPORTED: return "VGPU ECC not supported";
    case NVML_ERROR_INSUFFICIENT_RESOURCES: return "Insufficient Resources";
    case NVML_ERROR_FREQ_NOT_SUPPORTED: return "Frequency not supported";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    case NVML_ERROR_DEPRECATED: return "Deprecated";
    case NVML_ERROR_NOT_READY: return "Not Ready";
    case NVML_ERROR_GPU_NOT_FOUND: return "GPU not found";
    case NVML_ERROR_INVALID_STATE: return "Invalid State";
    default: return "Unknown Error";
    }
}

NVMLSIM_API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    ENTER();
    return sim_copy_string(version, length, sim_state()->driver_version);
}

NVMLSIM_API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    ENTER();
    char text[NVML_SYSTEM_NVML_VERSION_BUFFER_SIZE];
    snprintf(text, sizeof text, "%u.%.60s", sim_state()->cuda_version / 1000, sim_state()->driver_version);
    return sim_copy_string(version, length, text);
}

NVMLSIM_API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    ENTER();
    REQUIRE(version);
    *version = (int)sim_state()->cuda_version;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlSystemGetConfComputeState(nvmlConfComputeSystemState_t *state)
{
    ENTER();
    REQUIRE(state);
    memset(state, 0, sizeof *state);
    state->ccFeature = LOAD(sim_state()->conf_compute) != NVMLSIM_CC_OFF ? NVML_CC_SYSTEM_FEATURE_ENABLED : NVML_CC_SYSTEM_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlSystemGetConfComputeGpusReadyState(unsigned int *accepting)
{
    ENTER();
    REQUIRE(accepting);
    bool ready = LOAD(sim_state()->conf_compute) == NVMLSIM_CC_READY;
    *accepting = ready ? NVML_CC_ACCEPTING_CLIENT_REQUESTS_TRUE : NVML_CC_ACCEPTING_CLIENT_REQUESTS_FALSE;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

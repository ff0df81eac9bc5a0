/*
 * Processes that compute on a GPU. A simulated GPU has none: the control tool sets the list
 * (nvmlsim busy).
 * 
 * A GPU lists all of them, a MIG device those of its compute instance.
 */
#include "sim.h"

#include <string.h>

struct listed {
    unsigned int pid, gi, ci;
};

static unsigned int collect(const struct sim_target *at, struct listed found[NVMLSIM_PROCESSES])
{
    unsigned int count = 0;
    for (unsigned int i = 0; i < NVMLSIM_PROCESSES; i++) {
        uint64_t process = LOAD(at->gpu->processes[i]);
        struct listed one = {.pid = process >> 32, .gi = (process >> 16) & 0xffff, .ci = process & 0xffff};
        if (process == 0 || (at->kind == SIM_HANDLE_MIG && (one.gi != at->gi_id || one.ci != at->ci_id)))
            continue;
        if (one.gi == NVMLSIM_NO_INSTANCE)
            one.gi = one.ci = UINT32_MAX;
        found[count++] = one;
    }
    return count;
}

/* Stores the number of processes in count. Fails if they do not fit into the caller's array. */
static nvmlReturn_t fit(unsigned int *count, unsigned int found, const void *list)
{
    unsigned int room = *count;
    *count = found;
    if (room < found)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    REQUIRE(list || found == 0);
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *processes)
{
    ENTER_DEVICE(device);
    REQUIRE(count);
    struct listed found[NVMLSIM_PROCESSES];
    unsigned int number = collect(&at, found);
    nvmlReturn_t result = fit(count, number, processes);
    for (unsigned int i = 0; result == NVML_SUCCESS && i < number; i++)
        processes[i] = (nvmlProcessInfo_v1_t){.pid = found[i].pid};
    return result;
}

static nvmlReturn_t list_v2(const char *function, nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v2_t *processes)
{
    struct sim_target at;
    nvmlReturn_t result = sim_enter_device(function, device, &at);
    if (result != NVML_SUCCESS)
        return result;
    REQUIRE(count);
    struct listed found[NVMLSIM_PROCESSES];
    unsigned int number = collect(&at, found);
    result = fit(count, number, processes);
    for (unsigned int i = 0; result == NVML_SUCCESS && i < number; i++)
        processes[i] = (nvmlProcessInfo_v2_t){.pid = found[i].pid, .gpuInstanceId = found[i].gi, .computeInstanceId = found[i].ci};
    return result;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count,
                                                                 nvmlProcessInfo_v2_t *processes)
{
    return list_v2(__func__, device, count, processes);
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *processes)
{
    return list_v2(__func__, device, count, processes);
}

/* No simulated process uses graphics, and none is listed as an MPS client. */
#define NO_PROCESSES(name, entry)                                                                 \
    NVMLSIM_API nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, entry *processes)     \
    {                                                                                             \
        ENTER_DEVICE(device);                                                                     \
        (void)processes;                                                                          \
        REQUIRE(count);                                                                           \
        *count = 0;                                                                               \
        return NVML_SUCCESS;                                                                      \
    }

NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t)

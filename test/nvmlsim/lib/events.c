/*
 * Events: a ring in the shared state, and event sets of this process.
 * 
 * The control tool posts an event: it fills an entry and then stores the entry's number. A set
 * remembers the number of the last event that it has read, and skips events that were overwritten
 * before. A waiting process sleeps on the shared futex word and also checks from time to time, in
 * case it missed a wake-up.
 */
#define _GNU_SOURCE
#include "sim.h"

#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/*
 * LOOK_AGAIN_MS limits the delay that a missed wake-up causes. It is long because waiting on real
 * hardware uses no processor time, and tests measure the processor time of waiting programs.
 */
enum { MAX_SETS = 256, LOOK_AGAIN_MS = 1000 };
#define SET_TAG UINT64_C(0x4e5345)

struct registration {
    uint64_t types; /* registered event types; 0 if none */
    uint64_t since; /* number of the first event that came after the registration */
};

struct event_set {
    uint64_t serial; /* new for every set in this slot; 0 if the slot is free */
    uint64_t cursor; /* number of the next event to read */
    uint32_t gpus;   /* length of registrations */
    struct registration *registrations; /* by GPU number */
};

static pthread_mutex_t sets_lock = PTHREAD_MUTEX_INITIALIZER;
static struct event_set sets[MAX_SETS];
static uint64_t last_serial;

/*
 * An event set's handle consists of its slot and its serial, so that the handle of a freed set is
 * refused.
 */
static nvmlEventSet_t set_handle(unsigned int slot)
{
    uint64_t value = SET_TAG << 40 | (sets[slot].serial & 0xffffffff) << 8 | slot;
    nvmlEventSet_t handle;
    memcpy(&handle, &value, sizeof handle);
    return handle;
}

static struct event_set *find_set(nvmlEventSet_t handle)
{
    uint64_t value;
    memcpy(&value, &handle, sizeof value);
    struct event_set *set = &sets[value & 0xff];
    if (value >> 40 != SET_TAG || set->serial == 0 || (set->serial & 0xffffffff) != ((value >> 8) & 0xffffffff))
        return NULL;
    return set;
}

NVMLSIM_API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *handle)
{
    ENTER();
    REQUIRE(handle);
    nvmlReturn_t result = NVML_ERROR_MEMORY;
    pthread_mutex_lock(&sets_lock);
    for (unsigned int slot = 0; slot < MAX_SETS; slot++) {
        struct event_set *set = &sets[slot];
        if (set->serial != 0)
            continue;
        uint32_t gpus = sim_state()->gpu_count;
        set->registrations = calloc(gpus > 0 ? gpus : 1, sizeof *set->registrations);
        if (!set->registrations)
            break;
        set->gpus = gpus;
        set->cursor = LOAD(sim_state()->event_seq);
        set->serial = ++last_serial;
        *handle = set_handle(slot);
        result = NVML_SUCCESS;
        break;
    }
    pthread_mutex_unlock(&sets_lock);
    return result;
}

NVMLSIM_API nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t handle)
{
    nvmlReturn_t result = NVML_ERROR_INVALID_ARGUMENT;
    pthread_mutex_lock(&sets_lock);
    struct event_set *set = find_set(handle);
    if (set) {
        free(set->registrations);
        memset(set, 0, sizeof *set);
        result = NVML_SUCCESS;
    }
    pthread_mutex_unlock(&sets_lock);
    return result;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    ENTER_GPU(device);
    REQUIRE(types);
    *types = LOAD(gpu->event_types);
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t handle)
{
    ENTER_GPU(device);
    types &= ~0x60ULL; /* bits without a meaning, which driver 580.159.04 ignores */
    if (types & ~LOAD(gpu->event_types))
        return NVML_ERROR_NOT_SUPPORTED;
    unsigned int number = (unsigned int)sim_handle_gpu(device);
    nvmlReturn_t result = NVML_ERROR_INVALID_ARGUMENT;
    pthread_mutex_lock(&sets_lock);
    struct event_set *set = find_set(handle);
    if (set && number < set->gpus) {
        struct registration *registration = &set->registrations[number];
        if (!registration->types)
            registration->since = LOAD(sim_state()->event_seq);
        registration->types |= types;
        result = NVML_SUCCESS;
    }
    pthread_mutex_unlock(&sets_lock);
    return result;
}

/* Finds the next event that the set is registered for. Returns false if there is none yet. */
static bool next_event(struct event_set *set, nvmlEventData_t *data)
{
    const struct nvmlsim_header *state = sim_state();
    uint64_t posted = LOAD(state->event_seq);
    if (posted - set->cursor > state->event_count)
        set->cursor = posted - state->event_count;
    while (set->cursor < posted) {
        const struct nvmlsim_event *slot = sim_event_at(set->cursor);
        struct nvmlsim_event event = *slot;
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        bool complete = event.seq == set->cursor + 1 && LOAD(slot->seq) == event.seq;
        set->cursor++;
        if (!complete || event.gpu >= set->gpus)
            continue; /* the entry was overwritten, or is for an unknown GPU */
        const struct registration *wanted = &set->registrations[event.gpu];
        if (!(wanted->types & event.type) || event.seq <= wanted->since)
            continue;
        const struct nvmlsim_gpu *gpu = sim_gpu_at(event.gpu);
        bool of_instance = event.gpu_instance < NVMLSIM_GPU_INSTANCES;
        if (of_instance && !sim_gi_visible(gpu, event.gpu_instance))
            continue; /* nvml.h: a process without the privilege gets only events of the whole GPU */
        memset(data, 0, sizeof *data);
        data->device = sim_gpu_handle(event.gpu);
        data->eventType = event.type;
        data->eventData = event.data;
        data->gpuInstanceId = event.gpu_instance;
        data->computeInstanceId = event.compute_instance;
        return true;
    }
    return false;
}

/* The driver does not notice that a silent GPU is lost, so a wait for its events does not fail. */
static nvmlReturn_t answer_of_lost_gpu(const struct event_set *set)
{
    for (uint32_t i = 0; i < set->gpus; i++)
        if (set->registrations[i].types && sim_gpu_lost(i) && LOAD(sim_gpu_at(i)->lost) != NVMLSIM_LOST_SILENT)
            return sim_gpu_answer(i);
    return NVML_ERROR_TIMEOUT;
}

void sim_post_xid(unsigned int number, uint64_t xid)
{
    if (sim_write_begin() != NVML_SUCCESS)
        return;
    struct nvmlsim_header *state = sim_state();
    uint64_t seq = LOAD(state->event_seq);
    struct nvmlsim_event *event = sim_event_at(seq);
    STORE(event->seq, 0);
    event->type = nvmlEventTypeXidCriticalError;
    event->data = xid;
    event->gpu = number;
    event->gpu_instance = event->compute_instance = UINT32_MAX;
    STORE(event->seq, seq + 1);
    STORE(state->event_seq, seq + 1);
    __atomic_add_fetch(&state->event_wake, 1, __ATOMIC_ACQ_REL);
    sim_write_end();
    syscall(SYS_futex, &state->event_wake, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static nvmlReturn_t look(nvmlEventSet_t handle, nvmlEventData_t *data)
{
    nvmlReturn_t result = NVML_ERROR_TIMEOUT;
    pthread_mutex_lock(&sets_lock);
    struct event_set *set = find_set(handle);
    if (!set)
        result = NVML_ERROR_INVALID_ARGUMENT;
    else if (next_event(set, data))
        result = NVML_SUCCESS;
    else
        result = answer_of_lost_gpu(set);
    pthread_mutex_unlock(&sets_lock);
    return result;
}

static uint64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* Applies the faults injected for waiting on one of the GPUs that the set is registered for. */
static nvmlReturn_t meet_gpu_faults(nvmlEventSet_t handle)
{
    nvmlReturn_t result = NVML_SUCCESS;
    for (uint32_t i = 0; result == NVML_SUCCESS && i < sim_state()->gpu_count; i++) {
        pthread_mutex_lock(&sets_lock);
        const struct event_set *set = find_set(handle);
        bool listens = set && i < set->gpus && set->registrations[i].types;
        pthread_mutex_unlock(&sets_lock);
        if (listens)
            result = sim_fault_of_gpu("nvmlEventSetWait_v2", i);
    }
    return result;
}

NVMLSIM_API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t handle, nvmlEventData_t *data, unsigned int timeout_ms)
{
    ENTER();
    REQUIRE(data);
    nvmlReturn_t ordered = meet_gpu_faults(handle);
    if (ordered != NVML_SUCCESS)
        return ordered;
    if (LOAD(sim_state()->early_wait)) /* early, but not at once: NVML uses no processor time meanwhile */
        timeout_ms /= 10;
    uint64_t start = now_ms();
    for (;;) {
        uint32_t wake = LOAD(sim_state()->event_wake); /* read before the check, so that no later wake-up is missed */
        nvmlReturn_t result = sim_check_initialized();
        if (result == NVML_SUCCESS)
            result = look(handle, data);
        uint64_t waited = now_ms() - start;
        if (result != NVML_ERROR_TIMEOUT || waited >= timeout_ms)
            return result;
        uint64_t nap = timeout_ms - waited < LOOK_AGAIN_MS ? timeout_ms - waited : LOOK_AGAIN_MS;
        struct timespec pause = {.tv_sec = (time_t)(nap / 1000), .tv_nsec = (long)(nap % 1000) * 1000000};
        syscall(SYS_futex, &sim_state()->event_wake, FUTEX_WAIT, wake, &pause, NULL, 0);
    }
}

NVMLSIM_API nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t handle, nvmlEventData_t *data, unsigned int timeout_ms)
{
    return nvmlEventSetWait_v2(handle, data, timeout_ms);
}

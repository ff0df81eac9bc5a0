/*
 * Faults that the control tool injected: a named function is slow, fails, or kills its caller,
 * always or n times, for one GPU or all. A fault comes before the call's effect or, for calls that
 * change something, after the effect.
 * 
 * A call increments the fault's counter before it waits, so that a test can see that the call has
 * begun. A wait ends early when the fault is cleared. A process with a read-only state cannot
 * count, so faults for a limited number of calls do not apply to it.
 */
#define _GNU_SOURCE
#include "sim.h"

#include <linux/futex.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LOOK_AGAIN_MS = 100 }; /* longest delay after a missed wake-up */

static uint64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static void wait_while_in_force(const struct nvmlsim_fault *fault, uint64_t serial, uint64_t delay_ms)
{
    uint64_t end = now_ms() + delay_ms;
    for (uint64_t now = now_ms(); now < end; now = now_ms()) {
        uint32_t wake = LOAD(sim_state()->event_wake); /* read before the check, so that no later wake-up is missed */
        if (LOAD(fault->serial) != serial)
            return;
        uint64_t nap = end - now < LOOK_AGAIN_MS ? end - now : LOOK_AGAIN_MS;
        struct timespec pause = {.tv_nsec = (long)nap * 1000000};
        syscall(SYS_futex, &sim_state()->event_wake, FUTEX_WAIT, wake, &pause, NULL, 0);
    }
}

void sim_wait_ms(uint64_t duration)
{
    struct timespec left = {.tv_sec = (time_t)(duration / 1000), .tv_nsec = (long)(duration % 1000) * 1000000};
    while (nanosleep(&left, &left) != 0)
        ;
}

static bool matches(const struct nvmlsim_fault *fault, const char *function, int gpu)
{
    if (fault->gpu >= 0 && fault->gpu != gpu)
        return false;
    return strcmp(fault->function, "*") == 0 || strncmp(fault->function, function, sizeof fault->function) == 0;
}

/* Uses up one of the calls that the fault still applies to. Returns false if none is left. */
static bool take(struct nvmlsim_fault *fault)
{
    int32_t left = LOAD(fault->remaining);
    if (sim_state_read_only())
        return left < 0;
    while (left > 0)
        if (__atomic_compare_exchange_n(&fault->remaining, &left, left - 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            break;
    if (left == 0)
        return false;
    __atomic_add_fetch(&fault->hits, 1, __ATOMIC_ACQ_REL);
    return true;
}

/*
 * Kills the calling process, or its process group, like kill -9. No code of this process runs
 * afterwards.
 */
static void end_caller(bool group)
{
    kill(group ? 0 : getpid(), SIGKILL);
    for (;;)
        pause();
}

static nvmlReturn_t meet_faults(const char *function, int gpu_number, bool after, bool of_gpu)
{
    const struct nvmlsim_header *state = sim_state();
    for (unsigned int i = 0; i < state->fault_count; i++) {
        struct nvmlsim_fault *fault = sim_fault_at(i);
        uint64_t serial = LOAD(fault->serial);
        if (of_gpu && fault->gpu < 0)
            continue;
        if (serial == 0 || (fault->after != 0) != after || !matches(fault, function, gpu_number) || !take(fault))
            continue;
        if (fault->kind == NVMLSIM_FAULT_KILL)
            end_caller(fault->group != 0);
        if (fault->kind == NVMLSIM_FAULT_FAIL)
            return (nvmlReturn_t)fault->error;
        wait_while_in_force(fault, serial, fault->delay_ms);
    }
    return NVML_SUCCESS;
}

nvmlReturn_t sim_fault(const char *function, int gpu_number)
{
    if (LOAD(sim_state()->cut_lock) == NVMLSIM_CUT_LOCK_ALL)
        sim_lock_close(sim_lock_open(NVMLSIM_LOCK_CUT, true));
    return meet_faults(function, gpu_number, false, false);
}

nvmlReturn_t sim_fault_in_cut(const char *function, int gpu_number) { return meet_faults(function, gpu_number, false, false); }

nvmlReturn_t sim_fault_after(const char *function, int gpu_number) { return meet_faults(function, gpu_number, true, false); }

nvmlReturn_t sim_fault_of_gpu(const char *function, unsigned int gpu_number)
{
    return meet_faults(function, (int)gpu_number, false, true);
}

/* The generated stubs call this for every exported function that the library does not simulate. */
nvmlReturn_t sim_unsimulated(const char *function);
nvmlReturn_t sim_unsimulated(const char *function)
{
    nvmlReturn_t result = sim_check_initialized();
    if (result == NVML_SUCCESS)
        result = sim_fault(function, SIM_NO_GPU);
    return result == NVML_SUCCESS ? NVML_ERROR_NOT_SUPPORTED : result;
}

/*
 * The beginning and end of every call that changes MIG mode or MIG instances.
 * 
 * The driver does this work under a lock: one for all GPUs (the default here), or one for each GPU.
 * The control tool chooses. Injected faults (slow, fail, kill) happen while the lock is held. The
 * lock is a kernel lock, so the next process gets it at once, even after a kill.
 */
#include "sim.h"

nvmlReturn_t sim_cut_begin(const char *function, unsigned int number, struct sim_cut *cut)
{
    if (sim_state_read_only())
        return NVML_ERROR_NO_PERMISSION;
    *cut = (struct sim_cut){.function = function, .number = number, .lock = -1};
    switch (LOAD(sim_state()->cut_lock)) {
    case NVMLSIM_CUT_LOCK_NONE: break;
    case NVMLSIM_CUT_LOCK_GPU: cut->lock = sim_lock_open(NVMLSIM_LOCK_CUT + 1 + number, false); break;
    default: cut->lock = sim_lock_open(NVMLSIM_LOCK_CUT, false); break;
    }
    nvmlReturn_t result = sim_fault_in_cut(function, (int)number);
    if (result == NVML_SUCCESS) /* the driver may have been unloaded during the wait */
        result = sim_check_initialized();
    if (result == NVML_SUCCESS)
        result = sim_gpu_answer(number);
    if (result == NVML_SUCCESS)
        result = sim_write_begin();
    if (result != NVML_SUCCESS)
        sim_lock_close(cut->lock);
    return result;
}

nvmlReturn_t sim_cut_end(struct sim_cut *cut, nvmlReturn_t result)
{
    sim_write_end();
    if (result == NVML_SUCCESS) {
        sim_sync_capabilities_of(cut->number);
        result = sim_fault_after(cut->function, (int)cut->number);
    }
    sim_lock_close(cut->lock);
    return result;
}

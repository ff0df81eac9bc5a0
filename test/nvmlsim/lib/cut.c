/*
 * What every call that changes MIG mode or instances goes through.
 *
 * The driver does such work under a lock of its own: for all GPUs (the default here), or for each; the control tool says which. Whatever is ordered
 * for the call (slow, fail, kill) happens inside that lock. Waiting is by the kernel's lock, so nobody polls, and a killed holder is
 * followed at once.
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
    if (result == NVML_SUCCESS) /* the driver may have gone while the call waited */
        result = sim_check_initialized();
    if (result == NVML_SUCCESS && sim_gpu_lost(number))
        result = NVML_ERROR_GPU_IS_LOST;
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

/*
 * What the library's files share: this process's view of the node, and the steps every NVML function begins with.
 */
#ifndef NVMLSIM_SIM_H
#define NVMLSIM_SIM_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS /* define the plain names too, not only what they are macros for */
#include "nvml.h"

#include <stdbool.h>
#include <stddef.h>

#include "state.h"

#define NVMLSIM_API __attribute__((visibility("default")))
#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

/* ---- attach.c: the mapped state */

/* Finds and maps the state, or keeps the one mapped. Caller holds the process lock. */
nvmlReturn_t sim_attach(void);
/* Takes and drops the shared in-use lock. */
nvmlReturn_t sim_hold_driver(void);
void sim_release_driver(void);
/* Version in the library's own file name (libnvidia-ml.so.<version>), or "" where it has none. */
const char *sim_library_version(void);

/* The library's own real path, or "". */
const char *sim_library_path(void);

struct nvmlsim_header *sim_state(void);
struct nvmlsim_model *sim_model(const struct nvmlsim_gpu *gpu);
struct nvmlsim_gpu *sim_gpu_at(unsigned int number);
struct nvmlsim_event *sim_event_at(uint64_t seq);
struct nvmlsim_fault *sim_fault_at(unsigned int number);
bool sim_state_read_only(void);

/* A change of the state is made between these two. Begin answers NO_PERMISSION where the state is mapped
 * read-only, as it is in containers. */
nvmlReturn_t sim_write_begin(void);
void sim_write_end(void);

/* ---- visibility.c: which GPUs this process was given */

bool sim_control_device_opens(void);
bool sim_gpu_device_opens(unsigned int minor);

/* ---- lifecycle.c */

bool sim_gpu_visible(unsigned int number);
unsigned int sim_visible_count(void);
/* Number in the state of the GPU with this NVML index, or -1. */
int sim_visible_gpu(unsigned int index);
int sim_index_of(unsigned int number);
nvmlReturn_t sim_check_initialized(void);

/* ---- faults.c: slow and failing functions, ordered by the control tool */

enum { SIM_NO_GPU = -1 };
/* Waits and fails as ordered for this function and GPU. */
nvmlReturn_t sim_fault(const char *function, int gpu_number);

/* ---- handles.c */

enum sim_handle_kind { SIM_HANDLE_GPU = 1, SIM_HANDLE_MIG = 2, SIM_HANDLE_GI = 3, SIM_HANDLE_CI = 4 };
nvmlDevice_t sim_gpu_handle(unsigned int number);
/* Number of the GPU that the handle is of, or -1. */
int sim_handle_gpu(nvmlDevice_t device);

/* What nearly every function does first: is NVML initialised, is the driver still there, is a fault ordered,
 * does the handle name a visible GPU, is that GPU still on the bus? */
nvmlReturn_t sim_enter(const char *function);
nvmlReturn_t sim_enter_gpu(const char *function, nvmlDevice_t device, struct nvmlsim_gpu **gpu);

#define ENTER()                                     \
    do {                                            \
        nvmlReturn_t enter_ = sim_enter(__func__);  \
        if (enter_ != NVML_SUCCESS)                 \
            return enter_;                          \
    } while (0)

/* Declares `gpu`. A null output pointer is checked by REQUIRE. */
#define ENTER_GPU(device)                                                     \
    struct nvmlsim_gpu *gpu;                                                  \
    do {                                                                      \
        nvmlReturn_t enter_ = sim_enter_gpu(__func__, (device), &gpu);        \
        if (enter_ != NVML_SUCCESS)                                           \
            return enter_;                                                    \
    } while (0)

#define REQUIRE(condition)                      \
    do {                                        \
        if (!(condition))                       \
            return NVML_ERROR_INVALID_ARGUMENT; \
    } while (0)

/* Copies a string as NVML does: INSUFFICIENT_SIZE where the buffer is too short. */
nvmlReturn_t sim_copy_string(char *to, unsigned int size, const char *from);

#define LOAD(field) __atomic_load_n(&(field), __ATOMIC_ACQUIRE)
#define STORE(field, value) __atomic_store_n(&(field), (value), __ATOMIC_RELEASE)

#endif

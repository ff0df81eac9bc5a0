/*
 * What the library's files share: this process's view of the node, and the steps every NVML function begins with.
 */
#ifndef NVMLSIM_SIM_H
#define NVMLSIM_SIM_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS /* define the plain names too, not only what they are macros for */
#include "nvml.h"

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

#include "state.h"

#define NVMLSIM_API __attribute__((visibility("default")))
#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

/* ---- find.c: where the library and the state file lie */

#define STATE_FILE "gsp_nvmlsim.bin"
/* Where the layout's folder may be mounted too, for containers that are given /dev. */
#define NVMLSIM_REACH "/dev/.udev/nvmlsim"

struct sim_found {
    int fd;
    bool read_only;
    char path[PATH_MAX];
};
bool sim_find_state(struct sim_found *found);
/* Version in the library's own file name (libnvidia-ml.so.<version>), or "" where it has none. */
const char *sim_library_version(void);

/* The library's own real path, or "". */
const char *sim_library_path(void);
/* Calls `visit` with each folder above the library, the nearest first, until it says true. */
bool sim_above_library(bool (*visit)(const char *folder, void *data), void *data);

/* ---- attach.c: the mapped state */

/* Finds and maps the state, or keeps the one mapped. Caller holds the process lock. */
nvmlReturn_t sim_attach(void);
/* Takes and drops the shared in-use lock. */
nvmlReturn_t sim_hold_driver(void);
void sim_release_driver(void);
/* Opens the GPU for this process, until its last nvmlShutdown. That takes as long as the driver takes to attach it. */
void sim_open_gpu(unsigned int number);
/* Whether another process has the GPU open. */
bool sim_opened_elsewhere(unsigned int number);
/* Notes that this process has a handle of a GPU instance, or, with ci >= 0, of a compute instance, until its last nvmlShutdown. */
void sim_subscribe(unsigned int number, unsigned int gi, int ci);
/* Whether another process has such a handle. */
bool sim_subscribed_elsewhere(unsigned int number, unsigned int gi, int ci);
/* Ends this process's own: the instance is gone. */
void sim_unsubscribe(unsigned int number, unsigned int gi, int ci);
/* Whether another process computes on the GPU, or, with slot > 0, on that compute instance of it. */
bool sim_computed_on(unsigned int number, unsigned int slot);
/* A lock on one byte of the state file with an open file description of its own, so that it excludes threads of this process too. The kernel
 * drops it with the process. Negative: it could not be taken. */
int sim_lock_open(uint64_t byte, bool shared);
void sim_lock_close(int lock);
/* Whether the file at this path is the mapped state. */
bool sim_is_state(const char *path);

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
/* Whether this process has the capability with this minor. */
bool sim_capability_opens(unsigned int minor);
/* A descriptor of the node, as a process has one while it uses the GPU or the capability; negative where there is none. */
int sim_gpu_descriptor(unsigned int minor);
int sim_capability_descriptor(unsigned int minor);
/* The folder of the device nodes. */
void sim_device_folder(char *folder, size_t size);

/* ---- lifecycle.c */

bool sim_gpu_visible(unsigned int number);
unsigned int sim_visible_count(void);
/* Number in the state of the GPU with this NVML index, or -1. */
int sim_visible_gpu(unsigned int index);
int sim_index_of(unsigned int number);
/* Whether the card that this process found is off the bus, though another may be in its slot. */
bool sim_gpu_lost(unsigned int number);
nvmlReturn_t sim_check_initialized(void);

/* ---- faults.c: slow and failing functions, ordered by the control tool */

enum { SIM_NO_GPU = -1 };
void sim_wait_ms(uint64_t duration);
/* Waits and fails as ordered for this function and GPU. */
nvmlReturn_t sim_fault(const char *function, int gpu_number);
/* The same, but only what is ordered for this very GPU. */
nvmlReturn_t sim_fault_of_gpu(const char *function, unsigned int gpu_number);
/* The same inside a cut, which has the driver's lock. */
nvmlReturn_t sim_fault_in_cut(const char *function, int gpu_number);
/* The same for what is ordered to happen when the call has had its effect. */
nvmlReturn_t sim_fault_after(const char *function, int gpu_number);

/* ---- handles.c */

enum sim_handle_kind { SIM_HANDLE_GPU = 1, SIM_HANDLE_MIG = 2, SIM_HANDLE_GI = 3, SIM_HANDLE_CI = 4 };
nvmlDevice_t sim_gpu_handle(unsigned int number);
/* Number of the GPU that the handle is of, or -1. */
int sim_handle_gpu(nvmlDevice_t device);
nvmlDevice_t sim_mig_handle(unsigned int gpu, unsigned int gi, unsigned int ci);
nvmlGpuInstance_t sim_gi_handle(unsigned int gpu, unsigned int gi);
nvmlComputeInstance_t sim_ci_handle(unsigned int gpu, unsigned int gi, unsigned int ci);

/* A GPU instance or compute instance of the state, unpacked. */
struct sim_instance {
    bool exists;
    unsigned int profile, start, size;
};

/* What a handle of any kind is of. */
struct sim_target {
    enum sim_handle_kind kind;
    unsigned int number; /* of the GPU */
    unsigned int gi_id, ci_id;
    struct nvmlsim_gpu *gpu;
    struct nvmlsim_model *model;
    struct sim_instance gi, ci;              /* as far as the kind has them */
    const struct nvmlsim_profile *profile;   /* of the GPU instance */
};

/* What nearly every function does first: is NVML initialised, is the driver still there, is a fault ordered,
 * does the handle name a visible GPU, is that GPU still on the bus? */
nvmlReturn_t sim_enter(const char *function);
nvmlReturn_t sim_enter_gpu(const char *function, nvmlDevice_t device, struct nvmlsim_gpu **gpu);

/* The same for a GPU or a MIG device, a GPU instance, a compute instance. They exist and are visible. */
nvmlReturn_t sim_enter_device(const char *function, nvmlDevice_t device, struct sim_target *target);
nvmlReturn_t sim_enter_gi(const char *function, nvmlGpuInstance_t instance, struct sim_target *target);
nvmlReturn_t sim_enter_ci(const char *function, nvmlComputeInstance_t instance, struct sim_target *target);
/* The looking up alone: no fault is met. */
nvmlReturn_t sim_find_gpu(nvmlDevice_t device, struct sim_target *target);
nvmlReturn_t sim_find_device(nvmlDevice_t device, struct sim_target *target);
nvmlReturn_t sim_find_gi(nvmlGpuInstance_t instance, struct sim_target *target);
nvmlReturn_t sim_find_ci(nvmlComputeInstance_t instance, struct sim_target *target);

/* ---- instances.c: what exists, what is visible, what has room */

struct sim_instance sim_unpack(uint64_t word);
uint64_t sim_pack(unsigned int profile, unsigned int start, unsigned int size);
struct sim_instance sim_gi(const struct nvmlsim_gpu *gpu, unsigned int id);
struct sim_instance sim_ci(const struct nvmlsim_gpu *gpu, unsigned int gi, unsigned int id);
bool sim_has_instances(const struct nvmlsim_gpu *gpu);
bool sim_has_compute_instances(const struct nvmlsim_gpu *gpu, unsigned int gi);
/* Whether a process is said to compute on this compute instance, or, with NVMLSIM_NO_INSTANCE, anywhere on the GPU. */
bool sim_is_busy(const struct nvmlsim_gpu *gpu, unsigned int gi, unsigned int ci);
unsigned int sim_gi_minor(const struct nvmlsim_gpu *gpu, unsigned int gi);
unsigned int sim_ci_minor(const struct nvmlsim_gpu *gpu, unsigned int gi, unsigned int ci);
bool sim_gi_visible(const struct nvmlsim_gpu *gpu, unsigned int gi);
bool sim_ci_visible(const struct nvmlsim_gpu *gpu, unsigned int gi, unsigned int ci);
const struct nvmlsim_profile *sim_profile_by_id(const struct nvmlsim_model *model, unsigned int id);
/* Whether a GPU instance of this profile can be made here. */
bool sim_gi_fits(const struct nvmlsim_gpu *gpu, const struct nvmlsim_profile *profile, unsigned int start);
/* How many more of the profile can be made. */
unsigned int sim_gi_capacity(const struct nvmlsim_gpu *gpu, const struct nvmlsim_profile *profile);
/* Where the driver puts an instance that may lie anywhere, or -1. */
int sim_gi_choose(const struct nvmlsim_gpu *gpu, const struct nvmlsim_profile *profile);
/* ID of a GPU instance at this place, or -1. */
int sim_gi_id(const struct nvmlsim_gpu *gpu, const struct nvmlsim_profile *profile, unsigned int start);

/* ---- compute_profiles.c */

/* Compute instance profile by ID, for a GPU instance of this profile. */
bool sim_ci_profile(const struct nvmlsim_model *model, const struct nvmlsim_profile *gi, unsigned int id, struct nvmlsim_ci_profile *found);

void sim_mig_device_name(const struct sim_target *at, char *name, size_t size);

/* ---- mig_devices.c */

void sim_mig_uuid(const struct nvmlsim_gpu *gpu, unsigned int gi, unsigned int ci, char uuid[NVML_DEVICE_UUID_BUFFER_SIZE]);
bool sim_find_mig_device(unsigned int number, const char *uuid, nvmlDevice_t *device);
unsigned int sim_mig_index(const struct sim_target *at);

/* ---- cut.c: calls that change MIG mode or instances */

struct sim_cut {
    const char *function;
    unsigned int number;
    int lock;
};
/* Takes the driver's lock and meets the faults ordered for the call. On failure there is nothing to end. */
nvmlReturn_t sim_cut_begin(const char *function, unsigned int number, struct sim_cut *cut);
/* Ends a change, whatever came of it: capability files and nodes follow the instances; then what is ordered to happen afterwards does. */
nvmlReturn_t sim_cut_end(struct sim_cut *cut, nvmlReturn_t result);

/* ---- time_slice.c: what nvidia-smi compute-policy calls */

struct sim_policy {
    uint32_t name, value;
};
struct sim_policies {
    uint32_t count;
    struct sim_policy list[32];
};
nvmlReturn_t sim_set_policy(nvmlDevice_t device, const struct sim_policy *policy);
nvmlReturn_t sim_list_policies(nvmlDevice_t device, struct sim_policies *policies);

/* ---- capabilities.c */

/* Makes the capability files and device nodes of every GPU what its instances call for. */
void sim_sync_capabilities(void);
/* The same for one GPU. */
void sim_sync_capabilities_of(unsigned int number);

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

/* Declare `at`. */
#define ENTER_DEVICE(device) ENTER_TARGET(sim_enter_device, device)
#define ENTER_GI(instance) ENTER_TARGET(sim_enter_gi, instance)
#define ENTER_CI(instance) ENTER_TARGET(sim_enter_ci, instance)
#define ENTER_TARGET(enter, handle)                                \
    struct sim_target at;                                          \
    do {                                                           \
        nvmlReturn_t enter_ = enter(__func__, (handle), &at);      \
        if (enter_ != NVML_SUCCESS)                                \
            return enter_;                                         \
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

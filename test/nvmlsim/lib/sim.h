/*
 * Shared by the library's files: this process's view of the node, and the first steps of every NVML
 * function.
 */
#ifndef NVMLSIM_SIM_H
#define NVMLSIM_SIM_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS /* also define the plain names */
#include "nvml.h"

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

#include "state.h"

#define NVMLSIM_API __attribute__((visibility("default")))
#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

/* ---- find.c: where the library and the state file lie */

#define STATE_FILE "gsp_nvmlsim.bin"
/* Where the layout's folder may also be mounted, for containers that have all of /dev. */
#define NVMLSIM_REACH "/dev/.udev/nvmlsim"

struct sim_found {
    int fd;
    bool read_only;
    char path[PATH_MAX];
};
bool sim_find_state(struct sim_found *found);
/*
 * Returns the version in the library's own file name, libnvidia-ml.so.<version>, or "" if the name
 * has no version.
 */
const char *sim_library_version(void);

/* Returns the real path of the library file, or "" if it is unknown. */
const char *sim_library_path(void);
/* Calls visit with each folder above the library, nearest first, until visit returns true. */
bool sim_above_library(bool (*visit)(const char *folder, void *data), void *data);

/* ---- attach.c: the mapped state */

/*
 * Finds and maps the state file, or keeps the current mapping. The caller holds the process lock.
 */
nvmlReturn_t sim_attach(void);
/*
 * sim_hold_driver takes the shared in-use lock; sim_release_driver drops it with all other locks.
 */
nvmlReturn_t sim_hold_driver(void);
void sim_release_driver(void);
/*
 * Opens the GPU for this process until its last nvmlShutdown. Waits for the attach cost if the GPU
 * is closed. Returns GPU_IS_LOST if the driver lets go of the GPU at this moment.
 */
nvmlReturn_t sim_open_gpu(unsigned int number);
/* Returns whether this process has the GPU open. */
bool sim_gpu_opened(unsigned int number);
/* Returns whether another process has the GPU open. */
bool sim_opened_elsewhere(unsigned int number);
/*
 * Records that this process has a handle of a GPU instance or, with ci >= 0, of a compute instance.
 * The record ends with the last nvmlShutdown.
 */
void sim_subscribe(unsigned int number, unsigned int gi, int ci);
/* Returns whether another process has a handle that sim_subscribe recorded. */
bool sim_subscribed_elsewhere(unsigned int number, unsigned int gi, int ci);
/* Removes this process's record of a handle, after the MIG instance was destroyed. */
void sim_unsubscribe(unsigned int number, unsigned int gi, int ci);
/*
 * Returns whether another process computes on the GPU or, with slot > 0, on one of its compute
 * instances.
 */
bool sim_computed_on(unsigned int number, unsigned int slot);
/*
 * Locks one byte of the state file through a new open file description, so that the lock also
 * excludes other threads of this process. The kernel drops the lock with the process. Returns a
 * negative number on failure.
 */
int sim_lock_open(uint64_t byte, bool shared);
void sim_lock_close(int lock);
/* Returns whether the file at this path is the mapped state file. */
bool sim_is_state(const char *path);

struct nvmlsim_header *sim_state(void);
struct nvmlsim_model *sim_model(const struct nvmlsim_gpu *gpu);
struct nvmlsim_gpu *sim_gpu_at(unsigned int number);
struct nvmlsim_event *sim_event_at(uint64_t seq);
struct nvmlsim_fault *sim_fault_at(unsigned int number);
bool sim_state_read_only(void);

/*
 * Begin and end of a change of the state. Begin returns NO_PERMISSION if the state file is
 * read-only, as in containers.
 */
nvmlReturn_t sim_write_begin(void);
void sim_write_end(void);

/* ---- visibility.c: which GPUs and capabilities this process may use */

bool sim_control_device_opens(void);
bool sim_gpu_device_opens(unsigned int minor);
/* Returns whether this process has the capability with this minor number. */
bool sim_capability_opens(unsigned int minor);
/*
 * Opens a descriptor of the device node, as a real process has one while it uses the GPU or the
 * capability. Negative if there is no such device node.
 */
int sim_gpu_descriptor(unsigned int minor);
int sim_capability_descriptor(unsigned int minor);
/* Stores the path of the folder of the device nodes in folder. */
void sim_device_folder(char *folder, size_t size);

/* ---- lifecycle.c */

bool sim_gpu_visible(unsigned int number);
unsigned int sim_visible_count(void);
/* Returns the number in the state file of the GPU with this NVML index, or -1. */
int sim_visible_gpu(unsigned int index);
int sim_index_of(unsigned int number);
/* Returns whether NVIDIA's kernel driver has the GPU. */
bool sim_gpu_bound(const struct nvmlsim_gpu *gpu);
/*
 * Returns whether the GPU that this process found is off the bus, even if another GPU is now in its
 * slot.
 */
bool sim_gpu_lost(unsigned int number);
/*
 * Returns SUCCESS, or the error of every call on a lost GPU. A silent GPU first waits for the
 * driver's timeout and reports XID 119.
 */
nvmlReturn_t sim_gpu_answer(unsigned int number);
nvmlReturn_t sim_check_initialized(void);

/* ---- events.c */

/* Reports an XID on a GPU, unless this process cannot change the state. */
void sim_post_xid(unsigned int number, uint64_t xid);

/* ---- mig_mode.c */

/* The GPU registers with its NVLink fabric again, which takes a moment. */
void sim_rejoin_fabric(struct nvmlsim_gpu *gpu);

/* ---- faults.c: faults that the control tool injected */

enum { SIM_NO_GPU = -1 };
void sim_wait_ms(uint64_t duration);
/*
 * Applies the faults injected for this function and GPU: waits, returns an error or kills the
 * process.
 */
nvmlReturn_t sim_fault(const char *function, int gpu_number);
/* Like sim_fault, but applies only faults that name this GPU. */
nvmlReturn_t sim_fault_of_gpu(const char *function, unsigned int gpu_number);
/* Like sim_fault, for a caller that has the driver's lock because of sim_cut_begin. */
nvmlReturn_t sim_fault_in_cut(const char *function, int gpu_number);
/* Like sim_fault, but applies only faults that come after the call's effect. */
nvmlReturn_t sim_fault_after(const char *function, int gpu_number);

/* ---- handles.c */

enum sim_handle_kind { SIM_HANDLE_GPU = 1, SIM_HANDLE_MIG = 2, SIM_HANDLE_GI = 3, SIM_HANDLE_CI = 4 };
nvmlDevice_t sim_gpu_handle(unsigned int number);
/* Returns the number of the GPU of a GPU handle, or -1. */
int sim_handle_gpu(nvmlDevice_t device);
nvmlDevice_t sim_mig_handle(unsigned int gpu, unsigned int gi, unsigned int ci);
nvmlGpuInstance_t sim_gi_handle(unsigned int gpu, unsigned int gi);
nvmlComputeInstance_t sim_ci_handle(unsigned int gpu, unsigned int gi, unsigned int ci);

/* A GPU instance or compute instance, unpacked from its word in the state. */
struct sim_instance {
    bool exists;
    unsigned int profile, start, size;
};

/* The objects that a handle names. */
struct sim_target {
    enum sim_handle_kind kind;
    unsigned int number; /* the GPU's number in the state file */
    unsigned int gi_id, ci_id;
    struct nvmlsim_gpu *gpu;
    struct nvmlsim_model *model;
    struct sim_instance gi, ci;              /* set if the kind of handle names them */
    const struct nvmlsim_profile *profile;   /* profile of gi */
};

/*
 * The first steps of nearly every function. They check that NVML is initialised, the driver is
 * still loaded, the handle names a visible GPU and that GPU is on the bus, and apply injected
 * faults.
 */
nvmlReturn_t sim_enter(const char *function);
nvmlReturn_t sim_enter_gpu(const char *function, nvmlDevice_t device, struct nvmlsim_gpu **gpu);

/*
 * Like sim_enter_gpu, but for a GPU or MIG device, a GPU instance, and a compute instance. The
 * objects must exist and be visible.
 */
nvmlReturn_t sim_enter_device(const char *function, nvmlDevice_t device, struct sim_target *target);
nvmlReturn_t sim_enter_gi(const char *function, nvmlGpuInstance_t instance, struct sim_target *target);
nvmlReturn_t sim_enter_ci(const char *function, nvmlComputeInstance_t instance, struct sim_target *target);
/* These functions only decode a handle and apply no faults. */
nvmlReturn_t sim_find_gpu(nvmlDevice_t device, struct sim_target *target);
nvmlReturn_t sim_find_device(nvmlDevice_t device, struct sim_target *target);
nvmlReturn_t sim_find_gi(nvmlGpuInstance_t instance, struct sim_target *target);
nvmlReturn_t sim_find_ci(nvmlComputeInstance_t instance, struct sim_target *target);

/* ---- instances.c: what exists, what is visible, what has room */

struct sim_instance sim_unpack(uint64_t word);
/* Returns 1 + the syspipe of a compute instance's word, or 0 if it has none. */
unsigned int sim_syspipe(uint64_t word);
/* Returns a new compute instance's syspipe, in place in its word: the lowest one that is free. */
uint64_t sim_next_syspipe(const struct nvmlsim_gpu *gpu);
uint64_t sim_pack(unsigned int profile, unsigned int start, unsigned int size);
struct sim_instance sim_gi(const struct nvmlsim_gpu *gpu, unsigned int id);
struct sim_instance sim_ci(const struct nvmlsim_gpu *gpu, unsigned int gi, unsigned int id);
bool sim_has_instances(const struct nvmlsim_gpu *gpu);
bool sim_has_compute_instances(const struct nvmlsim_gpu *gpu, unsigned int gi);
/*
 * Returns whether a listed process computes on this compute instance or, with NVMLSIM_NO_INSTANCE,
 * anywhere on the GPU.
 */
bool sim_is_busy(const struct nvmlsim_gpu *gpu, unsigned int gi, unsigned int ci);
unsigned int sim_gi_minor(const struct nvmlsim_gpu *gpu, unsigned int gi);
unsigned int sim_ci_minor(const struct nvmlsim_gpu *gpu, unsigned int gi, unsigned int ci);
bool sim_gi_visible(const struct nvmlsim_gpu *gpu, unsigned int gi);
bool sim_ci_visible(const struct nvmlsim_gpu *gpu, unsigned int gi, unsigned int ci);
const struct nvmlsim_profile *sim_profile_by_id(const struct nvmlsim_model *model, unsigned int id);
/* Returns whether a GPU instance of this profile can be created at start. */
bool sim_gi_fits(const struct nvmlsim_gpu *gpu, const struct nvmlsim_profile *profile, unsigned int start);
/* Returns how many more GPU instances of the profile can be created. */
unsigned int sim_gi_capacity(const struct nvmlsim_gpu *gpu, const struct nvmlsim_profile *profile);
/* Returns the placement that the driver chooses for a new GPU instance, or -1 if none fits. */
int sim_gi_choose(const struct nvmlsim_gpu *gpu, const struct nvmlsim_profile *profile);
/* Returns the ID of a new GPU instance at this placement, or -1 if no ID is free. */
int sim_gi_id(const struct nvmlsim_gpu *gpu, const struct nvmlsim_profile *profile, unsigned int start);

/* ---- compute_profiles.c */

/* Finds a compute instance profile by ID, for a GPU instance of profile gi. */
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
/*
 * Takes the driver's lock and applies the faults injected for the call. After a failure the caller
 * must not call sim_cut_end.
 */
nvmlReturn_t sim_cut_begin(const char *function, unsigned int number, struct sim_cut *cut);
/*
 * Ends a change, whether it succeeded or not. After a success it updates capability files and
 * device nodes, and then applies the faults that come after the effect.
 */
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

/*
 * Creates and removes capability files and device nodes so that they match the MIG instances of
 * every GPU.
 */
void sim_sync_capabilities(void);
/* Like sim_sync_capabilities, for one GPU. */
void sim_sync_capabilities_of(unsigned int number);

#define ENTER()                                     \
    do {                                            \
        nvmlReturn_t enter_ = sim_enter(__func__);  \
        if (enter_ != NVML_SUCCESS)                 \
            return enter_;                          \
    } while (0)

/* Declares the variable gpu. REQUIRE checks output pointers for null. */
#define ENTER_GPU(device)                                                     \
    struct nvmlsim_gpu *gpu;                                                  \
    do {                                                                      \
        nvmlReturn_t enter_ = sim_enter_gpu(__func__, (device), &gpu);        \
        if (enter_ != NVML_SUCCESS)                                           \
            return enter_;                                                    \
    } while (0)

/* These macros declare the variable at. */
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

/* Copies a string like NVML: returns INSUFFICIENT_SIZE if the buffer is too small. */
nvmlReturn_t sim_copy_string(char *to, unsigned int size, const char *from);

#define LOAD(field) __atomic_load_n(&(field), __ATOMIC_ACQUIRE)
#define STORE(field, value) __atomic_store_n(&(field), (value), __ATOMIC_RELEASE)

#endif

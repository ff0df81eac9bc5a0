/*
 * The simulated node's state: one file that every process maps.
 * 
 * The control tool (Go, package state) writes it from YAML and changes it later. The library reads
 * it, and changes the few words that NVML's setters need. Both sides share the layout below. Every
 * field has a fixed width and natural alignment, and a test compares each offset and size with the
 * Go structs.
 * 
 * Rules that keep the file valid when any process is killed at any time:
 *   - The file is changed in place and never replaced, because containers bind-mount its inode.
 *   - A writer holds an open-file-description lock on byte NVMLSIM_LOCK_WRITE, which the kernel
 *     drops with the process. `generation` is odd during a write. The next writer takes over an
 *     odd one.
 *   - A reader takes no lock. Every change becomes visible by one aligned store: of the value, or,
 *     for an event or a fault, of the number that marks the entry as complete. A GPU instance or
 *     compute instance is one word, so it exists or not. Words of compute instances count only
 *     below an existing GPU instance.
 *   - A process between nvmlInit and nvmlShutdown holds a shared lock on byte
 *     NVMLSIM_LOCK_IN_USE. So the tool knows whether a driver unload would affect a process.
 *   - A process holds a shared lock on byte NVMLSIM_LOCK_OPEN plus the GPU's number from its first
 *     handle of a GPU to its last nvmlShutdown. A GPU without persistence mode loses its settings
 *     when no process holds this lock. The next process that opens it resets them.
 *   - The process that opens such a GPU attaches it. That takes attach_cost_ms with byte
 *     NVMLSIM_LOCK_CUT held, so that GPUs attach one after another.
 *   - A computing process holds a shared lock on byte NVMLSIM_LOCK_COMPUTE plus 256 times the GPU's
 *     number. On a MIG device it adds 1 + 9 times the GPU instance's ID + the compute instance's.
 *     A process checks the compute mode and takes this lock under flock() of the file, which even a
 *     process with a read-only file can take.
 *   - A process with a handle of a GPU or compute instance holds a shared lock until its last
 *     nvmlShutdown: on byte NVMLSIM_LOCK_SUBSCRIBE plus 256 times the GPU's number, plus 9 times
 *     the GPU instance's ID, plus, for a compute instance, 1 + its ID.
 *   - A process that creates or removes capability files and nodes holds byte
 *     NVMLSIM_LOCK_CAPABILITIES.
 *   - A call that changes MIG mode or instances holds byte NVMLSIM_LOCK_CUT, or that byte plus 1 +
 *     the GPU's number, during the whole call, as the driver does.
 */
#ifndef NVMLSIM_STATE_H
#define NVMLSIM_STATE_H

#include <stdint.h>

#define NVMLSIM_MAGIC UINT64_C(0x314d49534c4d564e) /* "NVMLSIM1", little endian */
#define NVMLSIM_LAYOUT 8u

enum {
    NVMLSIM_LOCK_WRITE = 0,
    NVMLSIM_LOCK_IN_USE = 1,
    NVMLSIM_LOCK_CAPABILITIES = 2,
    NVMLSIM_LOCK_CUT = 1024,
    NVMLSIM_LOCK_OPEN = 8192,
    NVMLSIM_LOCK_COMPUTE = 16384,
    NVMLSIM_COMPUTE_BYTES = 256, /* for each GPU */
    NVMLSIM_LOCK_SUBSCRIBE = 2097152,

    NVMLSIM_GPU_INSTANCES = 15,
    NVMLSIM_COMPUTE_INSTANCES = 8,
    NVMLSIM_PROCESSES = 16,

    NVMLSIM_NAME = 96,
    NVMLSIM_PROFILES = 24,
    NVMLSIM_CI_PROFILES = 40,
    NVMLSIM_PLACEMENTS = 16,
};

#define NVMLSIM_ABSENT UINT32_MAX /* the model file has no value: NVML returns NOT_SUPPORTED */

/*
 * A GPU instance or compute instance in one word: profile ID in bits 0-15, start in bits 16-23,
 * size in bits 24-31. Bits 32-39 of a compute instance are 1 + its syspipe, or 0 if the node does
 * not count syspipes. The word is 0 if there is no such MIG instance.
 */
#define NVMLSIM_INSTANCE (UINT64_C(1) << 63)

/*
 * A process that computes on a GPU, in one word: PID in bits 32-63, GPU instance ID in bits 16-31,
 * compute instance ID in bits 0-15. The word is 0 if the entry is empty.
 */
#define NVMLSIM_NO_INSTANCE 0xffffu

enum nvmlsim_cut_lock {
    NVMLSIM_CUT_LOCK_DRIVER = 0,
    NVMLSIM_CUT_LOCK_GPU = 1,
    NVMLSIM_CUT_LOCK_NONE = 2,
    NVMLSIM_CUT_LOCK_ALL = 3, /* like DRIVER, and calls that change nothing wait for it too */
};

struct nvmlsim_header {
    uint64_t magic;
    uint32_t layout;
    uint32_t header_size;
    uint32_t model_size;
    uint32_t gpu_size;
    uint32_t event_size;
    uint32_t fault_size;
    uint32_t model_count;
    uint32_t gpu_count;
    uint32_t event_count; /* capacity of the ring */
    uint32_t fault_count; /* capacity of the table */
    uint64_t model_offset;
    uint64_t gpu_offset;
    uint64_t event_offset;
    uint64_t fault_offset;
    uint64_t total_size;

    uint64_t generation;   /* odd while a writer changes the state */
    uint64_t event_seq;    /* events posted so far */
    uint32_t event_wake;   /* futex word: changes whenever waiting processes must check the state */
    uint32_t driver_loaded;
    uint32_t driver_epoch; /* changes with every load of the driver */
    uint32_t cuda_version; /* 12040 for 12.4 */
    char driver_version[32];
    char node_name[64];
    char seed[64];

    /*
     * The layout's location on the node, for processes that create and remove capability files.
     * Empty if the node has no layout.
     */
    char root[256];
    char devices[256];
    uint32_t caps_major;
    uint32_t plain_devices; /* 1: ordinary files instead of device nodes */
    uint32_t cut_lock;      /* enum nvmlsim_cut_lock */
    uint32_t reserved;
    uint64_t fabric_settle_ms; /* how long a GPU that left MIG mode takes to register with the fabric */
    uint32_t client_blocks_mode;    /* 1: another process that has the GPU open blocks a change of MIG mode */
    uint32_t client_blocks_destroy; /* 1: another process's handle blocks the destruction of a MIG instance */
    uint32_t create_in_use;         /* 1: the first creation of a GPU's first GPU instance fails with IN_USE */
    uint32_t no_capability_nodes;   /* 1: NVML creates no device nodes for MIG instances */
    uint32_t settings_stay;         /* 1: a GPU that no process has open keeps its time slice and compute mode */
    uint32_t conf_compute;          /* enum nvmlsim_conf_compute */
    uint32_t topology_stays;        /* 1: MIG mode and instances survive a reset and a driver load */
    uint32_t uuid_by_syspipe;       /* 1: a MIG device's UUID depends on its syspipe instead of its compute instance's ID */
    uint32_t fabric_by_instances;   /* 1: the fabric follows the instances instead of the MIG mode */
    uint32_t early_wait;            /* 1: nvmlEventSetWait returns TIMEOUT early */
    uint32_t lost_answer;           /* enum nvmlsim_lost: what `lose` makes a GPU answer */
    uint32_t gsp_timeout_ms;        /* how long a call on a silent GPU takes */
    uint64_t attach_cost_ms;   /* how long the driver takes to open a closed GPU */
    uint32_t vfio_loaded;      /* 1: the kernel has the module vfio_pci */
    uint32_t no_remap_fields;  /* 1: a GPU with MIG instances refuses the fields of row remaps */
};

/*
 * Which kernel driver a GPU is bound to. The simulated sysfs changes it. The last two say which
 * GPUs the next load of NVIDIA's driver leaves alone.
 */
enum nvmlsim_binding {
    NVMLSIM_BOUND = 0,            /* to NVIDIA's driver */
    NVMLSIM_UNBOUND = 1,          /* to none */
    NVMLSIM_AWAY = 2,             /* to another driver, or its driver_override names another one */
    NVMLSIM_BOUND_OVERRIDDEN = 3, /* to NVIDIA's driver, but its driver_override names another one */
};

/*
 * How a lost GPU answers: GPU_IS_LOST, or UNKNOWN, or after a timeout UNKNOWN and XID 119, because
 * its system processor is silent.
 */
enum nvmlsim_lost { NVMLSIM_LOST_GONE = 1, NVMLSIM_LOST_UNKNOWN = 2, NVMLSIM_LOST_SILENT = 3 };

/* Confidential computing: off, or on, with or without the ready state that an admin sets. */
enum nvmlsim_conf_compute { NVMLSIM_CC_OFF, NVMLSIM_CC_NOT_READY, NVMLSIM_CC_READY };

/* A GPU instance profile of a model, with the values that nvidia-smi mig -lgip and -lgipp print. */
struct nvmlsim_profile {
    uint32_t nvml_profile; /* NVML_GPU_INSTANCE_PROFILE_* */
    uint32_t id;           /* the profile ID that the hardware reports */
    uint32_t slices;
    uint32_t instances_max;
    uint32_t p2p;
    uint32_t sm;
    uint32_t copy_engines;
    uint32_t decoders;
    uint32_t encoders;
    uint32_t jpeg_engines;
    uint32_t ofa_engines;
    uint32_t placement_size;
    uint32_t placement_count;
    uint32_t placement_starts[NVMLSIM_PLACEMENTS];
    uint32_t whole_ci; /* ID of the compute instance profile that fills it, or ABSENT for the usual ID */
    uint64_t memory_mib;
    char name[32];
};

/* A compute instance profile, for GPU instances with gi_slices slices. */
struct nvmlsim_ci_profile {
    uint32_t gi_slices;
    uint32_t id;
    uint32_t slices;
    uint32_t instances_max;
    uint32_t sm;
    uint32_t placement_count;
    uint32_t placement_starts[8];
};

struct nvmlsim_model {
    char key[64]; /* the model file's name without .yaml */
    char name[NVMLSIM_NAME];
    uint32_t brand;
    uint32_t architecture;
    uint32_t cc_major;
    uint32_t cc_minor;
    uint32_t pci_device_id;    /* device << 16 | vendor, as NVML gives it */
    uint32_t pci_subsystem_id;
    uint32_t multiprocessors;
    uint32_t ecc;              /* ECC supported and on */
    uint32_t power_limit_mw;
    uint32_t power_idle_mw;
    uint32_t addressing_mode;  /* NVML_DEVICE_ADDRESSING_MODE_*, or ABSENT */
    uint32_t mig_supported;
    uint32_t mig_max_instances;
    uint32_t profile_count;
    uint32_t ci_profile_count;
    uint32_t bar1_mib;
    uint32_t mig_needs_reset; /* a new MIG mode takes effect at a reset, and survives resets */
    uint32_t memory_slices;
    uint32_t time_slices; /* the length of a time-slice can be set */
    uint32_t event_types; /* supported nvmlEventType*, unless the control tool sets others */
    uint64_t memory_mib;
    struct nvmlsim_profile profiles[NVMLSIM_PROFILES];
    struct nvmlsim_ci_profile ci_profiles[NVMLSIM_CI_PROFILES];
};

/* A GPU of the node. The table orders GPUs by PCI address. */
struct nvmlsim_gpu {
    uint32_t model; /* index into the models */
    uint32_t minor; /* N of /dev/nvidiaN */
    uint32_t pci_domain;
    uint32_t pci_bus;
    uint32_t pci_device;
    int32_t numa_node;
    uint32_t pci_root;   /* number of the root complex: equal for GPUs below one host bridge */
    uint32_t pci_switch; /* number of the nearest bridge, 0: none */
    uint32_t module_id;
    uint32_t present; /* enumerated by the driver; 0: it was lost when the driver loaded */
    uint32_t lost;    /* enum nvmlsim_lost if it fell off the bus while the driver was loaded */
    uint32_t persistence_mode;
    uint32_t compute_mode;
    uint32_t mig_current;
    uint32_t mig_pending;
    uint32_t recovery_action; /* NVML_GPU_RECOVERY_ACTION_* */
    uint32_t remap_pending;
    uint32_t remap_failure;
    uint64_t ecc_single_volatile;
    uint64_t ecc_double_volatile;
    uint64_t ecc_single_aggregate;
    uint64_t ecc_double_aggregate;
    uint32_t fabric_state;  /* NVML_GPU_FABRIC_STATE_* */
    uint32_t fabric_clique;
    uint8_t fabric_cluster[16];
    uint64_t fabric_until_ms; /* until then (CLOCK_REALTIME) the state is fabric_interim */
    uint32_t fabric_interim;
    uint32_t virtualization;  /* NVML_GPU_VIRTUALIZATION_MODE_* */
    uint32_t time_slice;      /* 0 default, 1 short, 2 medium, 3 long */
    uint32_t epoch;           /* changes when a card is plugged in and invalidates handles */
    uint64_t event_types;     /* nvmlEventType* that can be registered for */
    uint64_t energy_since_ms; /* start of the energy count (CLOCK_REALTIME) */
    uint32_t fabric_status;   /* nvmlReturn_t of the completed fabric registration */
    uint32_t create_refused;  /* 1: create_in_use has refused a creation, so the next one succeeds */
    uint64_t processes[NVMLSIM_PROCESSES];
    uint64_t instances[NVMLSIM_GPU_INSTANCES]; /* by GPU instance ID */
    uint64_t compute_instances[NVMLSIM_GPU_INSTANCES][NVMLSIM_COMPUTE_INSTANCES];
    char uuid[48];
    char serial[32];
    uint64_t no_memory_info; /* 1: NVML returns NOT_SUPPORTED for the memory size */
    uint64_t binding;        /* enum nvmlsim_binding */
};

struct nvmlsim_event {
    uint64_t seq; /* 1 + the event's number; stored last, to show that the entry is complete */
    uint64_t type;
    uint64_t data;
    uint32_t gpu;
    uint32_t gpu_instance;
    uint32_t compute_instance;
    uint32_t reserved;
};

/* IGNORE is for writes to the simulated sysfs only. */
enum nvmlsim_fault_kind { NVMLSIM_FAULT_SLOW = 1, NVMLSIM_FAULT_FAIL = 2, NVMLSIM_FAULT_KILL = 3, NVMLSIM_FAULT_IGNORE = 4 };

struct nvmlsim_fault {
    uint64_t serial; /* unique number of the fault, or 0 if the entry is free; stored last */
    uint64_t delay_ms;
    uint64_t hits;      /* calls that the fault has affected */
    uint32_t kind;
    uint32_t error;     /* nvmlReturn_t */
    int32_t gpu;        /* -1: calls on any GPU or on none */
    int32_t remaining;  /* how many more calls the fault affects; -1: every call */
    uint32_t after;     /* 1: the fault comes after the call's effect instead of before */
    uint32_t group;     /* 1: a kill fault kills the whole process group */
    char function[64];  /* an NVML function's name, or "*" */
};

#endif

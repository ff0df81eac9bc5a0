/* Maps, checks and locks the state file. */
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static struct {
    char path[PATH_MAX];    /* the state file that is mapped */
    int fd;
    pid_t opened_by;        /* a forked child needs its own open file description, and so its own lock */
    bool read_only;
    struct nvmlsim_header *state;
    dev_t device;
    ino_t inode;
    pthread_mutex_t write_lock;
    uint8_t open[512];      /* one bit for each GPU: this process has it open */
} view = {.fd = -1, .write_lock = PTHREAD_MUTEX_INITIALIZER};

/*
 * This process's descriptors of device nodes. Each has the number of the lock byte in the state
 * file that the process locks together with the descriptor.
 */
enum { MAX_HELD = 4096 };
static struct {
    pthread_mutex_t lock;
    unsigned int count;
    struct {
        uint64_t byte;
        int fd;
    } held[MAX_HELD];
} nodes = {.lock = PTHREAD_MUTEX_INITIALIZER};

__attribute__((destructor)) static void detach(void)
{
    if (view.state)
        munmap(view.state, view.state->total_size);
    if (view.fd >= 0)
        close(view.fd);
    view.state = NULL;
    view.fd = -1;
}

struct nvmlsim_header *sim_state(void) { return view.state; }
bool sim_state_read_only(void) { return view.read_only; }

static void *at(uint64_t offset) { return (char *)view.state + offset; }

struct nvmlsim_model *sim_model(const struct nvmlsim_gpu *gpu)
{
    return (struct nvmlsim_model *)at(view.state->model_offset) + gpu->model;
}

struct nvmlsim_gpu *sim_gpu_at(unsigned int number)
{
    return (struct nvmlsim_gpu *)at(view.state->gpu_offset) + number;
}

struct nvmlsim_event *sim_event_at(uint64_t seq)
{
    return (struct nvmlsim_event *)at(view.state->event_offset) + seq % view.state->event_count;
}

struct nvmlsim_fault *sim_fault_at(unsigned int number)
{
    return (struct nvmlsim_fault *)at(view.state->fault_offset) + number;
}

static bool within(uint64_t total, uint64_t offset, uint64_t count, uint64_t size)
{
    return offset % 8 == 0 && offset <= total && count <= (total - offset) / size;
}

static bool sound(const struct nvmlsim_header *h, uint64_t file_size)
{
    if (h->magic != NVMLSIM_MAGIC || h->layout != NVMLSIM_LAYOUT || h->header_size != sizeof *h ||
        h->model_size != sizeof(struct nvmlsim_model) || h->gpu_size != sizeof(struct nvmlsim_gpu) ||
        h->event_size != sizeof(struct nvmlsim_event) || h->fault_size != sizeof(struct nvmlsim_fault))
        return false;
    if (h->total_size > file_size || h->event_count == 0 ||
        !within(h->total_size, h->model_offset, h->model_count, h->model_size) ||
        !within(h->total_size, h->gpu_offset, h->gpu_count, h->gpu_size) ||
        !within(h->total_size, h->event_offset, h->event_count, h->event_size) ||
        !within(h->total_size, h->fault_offset, h->fault_count, h->fault_size))
        return false;
    for (uint32_t i = 0; i < h->gpu_count; i++)
        if (((const struct nvmlsim_gpu *)((const char *)h + h->gpu_offset))[i].model >= h->model_count)
            return false;
    for (uint32_t i = 0; i < h->model_count; i++)
        if (((const struct nvmlsim_model *)((const char *)h + h->model_offset))[i].memory_slices > 32)
            return false;
    return true;
}

/* Maps the file behind fd and makes this mapping the view. On failure the view stays unchanged. */
static nvmlReturn_t map_state(int fd, bool read_only)
{
    struct stat info;
    if (fstat(fd, &info) != 0 || (size_t)info.st_size < sizeof(struct nvmlsim_header)) {
        fprintf(stderr, "nvmlsim: %s is no state file: too short\n", view.path);
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
    if (view.state && view.device == info.st_dev && view.inode == info.st_ino &&
        view.state->total_size <= (uint64_t)info.st_size && view.read_only == read_only) {
        if (view.fd >= 0)
            close(view.fd);
        view.fd = fd;
        view.opened_by = getpid();
        return NVML_SUCCESS;
    }
    int protection = read_only ? PROT_READ : PROT_READ | PROT_WRITE;
    void *mapped = mmap(NULL, (size_t)info.st_size, protection, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
        return NVML_ERROR_MEMORY;
    if (!sound(mapped, (uint64_t)info.st_size)) {
        fprintf(stderr, "nvmlsim: %s is no state file of layout %u: make it again with the tool of this build\n", view.path,
                NVMLSIM_LAYOUT);
        munmap(mapped, (size_t)info.st_size);
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
    /*
     * An older mapping is never unmapped, because another thread may still read it. Mappings are
     * small, and a process rarely makes a second one.
     */
    if (view.fd >= 0)
        close(view.fd);
    view.fd = fd;
    view.opened_by = getpid();
    view.read_only = read_only;
    view.state = mapped;
    view.device = info.st_dev;
    view.inode = info.st_ino;
    return NVML_SUCCESS;
}

nvmlReturn_t sim_attach(void)
{
    struct sim_found found;
    if (!sim_find_state(&found))
        return NVML_ERROR_DRIVER_NOT_LOADED;
    memcpy(view.path, found.path, sizeof view.path);
    nvmlReturn_t result = map_state(found.fd, found.read_only);
    if (result != NVML_SUCCESS)
        close(found.fd);
    return result;
}

static int lock_byte(short type, off_t byte, bool wait)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    int result;
    do
        result = fcntl(view.fd, wait ? F_OFD_SETLKW : F_OFD_SETLK, &lock);
    while (result != 0 && errno == EINTR);
    return result;
}

int sim_lock_open(uint64_t byte, bool shared)
{
    char path[64];
    int mode = (shared ? O_RDONLY : O_RDWR) | O_CLOEXEC;
    snprintf(path, sizeof path, "/proc/self/fd/%d", view.fd);
    int fd = open(path, mode);
    if (fd < 0)
        fd = open(view.path, mode);
    if (fd < 0)
        return -1;
    struct flock lock = {.l_type = shared ? F_RDLCK : F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};
    while (fcntl(fd, F_OFD_SETLKW, &lock) != 0)
        if (errno != EINTR) {
            close(fd);
            return -1;
        }
    return fd;
}

void sim_lock_close(int lock)
{
    if (lock >= 0)
        close(lock);
}

bool sim_is_state(const char *path)
{
    struct stat info;
    return view.state && stat(path, &info) == 0 && info.st_dev == view.device && info.st_ino == view.inode;
}

nvmlReturn_t sim_hold_driver(void)
{
    return lock_byte(F_RDLCK, NVMLSIM_LOCK_IN_USE, false) == 0 ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED;
}

/* Locks the byte and opens the descriptor of its device node, unless this process has done both. */
static void hold(uint64_t byte, int (*descriptor)(unsigned int minor), unsigned int minor)
{
    pthread_mutex_lock(&nodes.lock);
    bool has = false;
    for (unsigned int i = 0; i < nodes.count && !has; i++)
        has = nodes.held[i].byte == byte;
    if (!has && nodes.count == MAX_HELD) { /* without the lock other processes could make changes that a driver refuses */
        fprintf(stderr, "nvmlsim: this process holds more than %d instances and nodes\n", MAX_HELD);
        abort();
    }
    if (!has) {
        lock_byte(F_RDLCK, (off_t)byte, false);
        nodes.held[nodes.count].byte = byte;
        nodes.held[nodes.count++].fd = descriptor(minor);
    }
    pthread_mutex_unlock(&nodes.lock);
}

/* Unlocks the bytes from start and closes their descriptors. */
static void let_go(uint64_t start, uint64_t count)
{
    pthread_mutex_lock(&nodes.lock);
    for (unsigned int i = 0; i < nodes.count;) {
        uint64_t byte = nodes.held[i].byte;
        if (byte < start || byte - start >= count) {
            i++;
            continue;
        }
        if (nodes.held[i].fd >= 0)
            close(nodes.held[i].fd);
        lock_byte(F_UNLCK, (off_t)byte, false);
        nodes.held[i] = nodes.held[--nodes.count];
    }
    pthread_mutex_unlock(&nodes.lock);
}

static uint64_t subscription(unsigned int number, unsigned int gi, int ci)
{
    return NVMLSIM_LOCK_SUBSCRIBE + (uint64_t)number * NVMLSIM_COMPUTE_BYTES + gi * (1 + NVMLSIM_COMPUTE_INSTANCES) + (unsigned int)(1 + ci);
}

void sim_subscribe(unsigned int number, unsigned int gi, int ci)
{
    const struct nvmlsim_gpu *gpu = sim_gpu_at(number);
    hold(subscription(number, gi, ci), sim_capability_descriptor, ci < 0 ? sim_gi_minor(gpu, gi) : sim_ci_minor(gpu, gi, (unsigned int)ci));
}

void sim_unsubscribe(unsigned int number, unsigned int gi, int ci) { let_go(subscription(number, gi, ci), 1); }

void sim_release_driver(void)
{
    let_go(0, UINT64_MAX);
    for (size_t i = 0; i < sizeof view.open; i++)
        STORE(view.open[i], 0);
    lock_byte(F_UNLCK, NVMLSIM_LOCK_IN_USE, false);
}

/* Returns whether another open file description has a lock on any of the bytes. */
static bool held_elsewhere(uint64_t start, uint64_t count)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)start, .l_len = (off_t)count};
    return fcntl(view.fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

bool sim_opened_elsewhere(unsigned int number) { return held_elsewhere(NVMLSIM_LOCK_OPEN + number, 1); }

bool sim_subscribed_elsewhere(unsigned int number, unsigned int gi, int ci) { return held_elsewhere(subscription(number, gi, ci), 1); }

bool sim_computed_on(unsigned int number, unsigned int slot)
{
    uint64_t first = NVMLSIM_LOCK_COMPUTE + (uint64_t)number * NVMLSIM_COMPUTE_BYTES;
    return slot > 0 ? held_elsewhere(first + slot, 1) : held_elsewhere(first, NVMLSIM_COMPUTE_BYTES);
}

/*
 * Resets the settings of a GPU that no process has open and that has no persistence mode, unless
 * the node's driver keeps them. The caller holds the write lock.
 */
static void forget_if_closed(unsigned int number)
{
    struct nvmlsim_gpu *gpu = sim_gpu_at(number);
    if (LOAD(gpu->persistence_mode) || LOAD(view.state->settings_stay) || held_elsewhere(NVMLSIM_LOCK_OPEN + number, 1))
        return;
    STORE(gpu->compute_mode, NVML_COMPUTEMODE_DEFAULT);
    STORE(gpu->time_slice, 0);
}

/*
 * Returns whether the GPU must be attached: it has an attach cost, no persistence mode, and no
 * other process has it open.
 */
static bool detached(unsigned int number)
{
    return LOAD(view.state->attach_cost_ms) > 0 && !LOAD(sim_gpu_at(number)->persistence_mode) &&
           !held_elsewhere(NVMLSIM_LOCK_OPEN + number, 1);
}

static bool open_now(unsigned int number)
{
    uint8_t bit = (uint8_t)(1u << number % 8);
    if (__atomic_fetch_or(&view.open[number / 8], bit, __ATOMIC_ACQ_REL) & bit)
        return true;
    bool writing = sim_write_begin() == NVML_SUCCESS; /* a process with a read-only state cannot reset the GPU */
    /* The binding changes under the write lock. So an unbind sees this process, or the reverse. */
    bool bound = sim_gpu_bound(sim_gpu_at(number));
    if (bound) {
        if (writing)
            forget_if_closed(number);
        hold(NVMLSIM_LOCK_OPEN + number, sim_gpu_descriptor, sim_gpu_at(number)->minor);
    } else {
        __atomic_fetch_and(&view.open[number / 8], (uint8_t)~bit, __ATOMIC_ACQ_REL);
    }
    if (writing)
        sim_write_end();
    return bound;
}

bool sim_gpu_opened(unsigned int number) { return LOAD(view.open[number / 8]) >> number % 8 & 1; }

nvmlReturn_t sim_open_gpu(unsigned int number)
{
    if (number / 8 >= sizeof view.open || sim_gpu_opened(number))
        return NVML_SUCCESS;
    if (!detached(number))
        return open_now(number) ? NVML_SUCCESS : NVML_ERROR_GPU_IS_LOST;
    int lock = sim_lock_open(NVMLSIM_LOCK_CUT, false);
    bool open = sim_gpu_opened(number);
    if (!open) {
        if (detached(number)) /* another process may have attached the GPU during the wait for the lock */
            sim_wait_ms(LOAD(view.state->attach_cost_ms));
        open = open_now(number);
    }
    sim_lock_close(lock);
    return open ? NVML_SUCCESS : NVML_ERROR_GPU_IS_LOST;
}

nvmlReturn_t sim_write_begin(void)
{
    if (view.read_only)
        return NVML_ERROR_NO_PERMISSION;
    pthread_mutex_lock(&view.write_lock);
    if (view.opened_by != getpid()) { /* after a fork, the parent's lock would also count for this process */
        int fd = open(view.path, O_RDWR | O_CLOEXEC);
        if (fd >= 0) {
            close(view.fd);
            view.fd = fd;
            view.opened_by = getpid();
        }
    }
    if (lock_byte(F_WRLCK, NVMLSIM_LOCK_WRITE, true) != 0) {
        pthread_mutex_unlock(&view.write_lock);
        return NVML_ERROR_UNKNOWN;
    }
    STORE(view.state->generation, view.state->generation | 1);
    return NVML_SUCCESS;
}

void sim_write_end(void)
{
    STORE(view.state->generation, view.state->generation + 1);
    lock_byte(F_UNLCK, NVMLSIM_LOCK_WRITE, false);
    pthread_mutex_unlock(&view.write_lock);
}

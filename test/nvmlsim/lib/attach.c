/*
 * Finding, mapping, checking and locking the state file.
 *
 * The file is looked for, in this order:
 *   1. where the environment variable NVMLSIM_STATE says;
 *   2. in lib/firmware/nvidia/<version>/gsp_nvmlsim.bin of the driver root that the library itself lies in,
 *      which holds on the node, for a driver root mounted elsewhere, and in a container alike;
 *   3. below the same directory of "/".
 * Where the driver root is mounted read-only, the same file may be reached for writing elsewhere: in the folder of the layout above the driver root,
 * or in .udev/nvmlsim of /dev. A container that was given the whole /dev, as the driver plugin's, can so change the GPUs, as it could by ioctl on
 * the driver's nodes.
 */
#define _GNU_SOURCE
#include "sim.h"

#include <dirent.h>
#include <dlfcn.h>
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
    char library[PATH_MAX]; /* real path at load time: the file may be renamed when the driver changes */
    char path[PATH_MAX];    /* the state file that is mapped */
    int fd;
    pid_t opened_by;        /* a forked child needs an open file description, and so a lock, of its own */
    bool read_only;
    struct nvmlsim_header *state;
    dev_t device;
    ino_t inode;
    pthread_mutex_t write_lock;
} view = {.fd = -1, .write_lock = PTHREAD_MUTEX_INITIALIZER};

__attribute__((constructor)) static void remember_own_path(void)
{
    Dl_info self;
    if (!dladdr((void *)&sim_attach, &self) || !self.dli_fname || !realpath(self.dli_fname, view.library))
        view.library[0] = '\0';
}

__attribute__((destructor)) static void detach(void)
{
    if (view.state)
        munmap(view.state, view.state->total_size);
    if (view.fd >= 0)
        close(view.fd);
    view.state = NULL;
    view.fd = -1;
}

const char *sim_library_version(void)
{
    const char *suffix = strstr(view.library, "libnvidia-ml.so.");
    if (!suffix)
        return "";
    suffix += strlen("libnvidia-ml.so.");
    return strchr(suffix, '.') ? suffix : ""; /* "1" is the SONAME, not a version */
}

const char *sim_library_path(void) { return view.library; }

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

static int open_state(const char *path, bool *read_only)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    *read_only = fd < 0;
    if (fd < 0)
        fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0)
        snprintf(view.path, sizeof view.path, "%s", path);
    return fd;
}

/* Opens the first state file in <root>/lib/firmware/nvidia/<any version>. */
static int open_below(const char *root, bool *read_only)
{
    char folder[PATH_MAX], path[2 * PATH_MAX];
    snprintf(folder, sizeof folder, "%.4000s/lib/firmware/nvidia", root);
    DIR *versions = opendir(folder);
    if (!versions)
        return -1;
    int fd = -1;
    const struct dirent *version;
    while (fd < 0 && (version = readdir(versions))) {
        if (version->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%s/%s", folder, version->d_name, STATE_FILE);
        if (strlen(path) < PATH_MAX)
            fd = open_state(path, read_only);
    }
    closedir(versions);
    return fd;
}

bool sim_above_library(bool (*visit)(const char *folder, void *data), void *data)
{
    char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%s", view.library);
    for (char *slash = strrchr(folder, '/'); slash && slash != folder; slash = strrchr(folder, '/')) {
        *slash = '\0';
        if (visit(folder, data))
            return true;
    }
    return false;
}

struct search {
    int fd;
    bool read_only;
};

static bool search_below(const char *folder, void *data)
{
    struct search *search = data;
    search->fd = open_below(folder, &search->read_only);
    return search->fd >= 0;
}

/* Takes the file in this folder instead, if it is the same and can be written. */
static bool search_writable(const char *folder, void *data)
{
    struct search *search = data;
    char path[PATH_MAX + sizeof STATE_FILE + 1];
    struct stat have, found;
    snprintf(path, sizeof path, "%s/%s", folder, STATE_FILE);
    int fd = strlen(path) < PATH_MAX ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return false;
    if (fstat(search->fd, &have) != 0 || fstat(fd, &found) != 0 || have.st_dev != found.st_dev || have.st_ino != found.st_ino) {
        close(fd);
        return false;
    }
    close(search->fd);
    *search = (struct search){.fd = fd};
    memcpy(view.path, path, strlen(path) + 1);
    return true;
}

static int find_state(bool *read_only)
{
    const char *named = getenv("NVMLSIM_STATE");
    if (named && *named)
        return open_state(named, read_only);

    /* The library lies one to four folders below the driver root: <root>/usr/lib/x86_64-linux-gnu/nvidia/current,
     * <root>/usr/lib64, <root>/lib64. */
    struct search search = {.fd = -1};
    if (!sim_above_library(search_below, &search) && !search_below("", &search))
        return -1;
    if (search.read_only && !search_writable(NVMLSIM_REACH, &search))
        sim_above_library(search_writable, &search);
    *read_only = search.read_only;
    return search.fd;
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

/* Maps the file behind fd, and makes it the view. On failure the view stays as it was. */
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
    /* An older mapping stays: another thread may still be reading it. It is small, and another file is rare. */
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
    bool read_only;
    int fd = find_state(&read_only);
    if (fd < 0)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    nvmlReturn_t result = map_state(fd, read_only);
    if (result != NVML_SUCCESS)
        close(fd);
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

void sim_release_driver(void) { lock_byte(F_UNLCK, NVMLSIM_LOCK_IN_USE, false); }

nvmlReturn_t sim_write_begin(void)
{
    if (view.read_only)
        return NVML_ERROR_NO_PERMISSION;
    pthread_mutex_lock(&view.write_lock);
    if (view.opened_by != getpid()) { /* forked since: the parent's lock would count as ours */
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

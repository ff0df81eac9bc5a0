/*
 * The capability files below /proc/driver/nvidia/capabilities and the device nodes in
 * /dev/nvidia-caps of existing instances.
 * 
 * The kernel driver creates the files, and NVIDIA's library the nodes, with the code of
 * nvidia-modprobe. Here the library does both. A process that changes MIG instances updates files
 * and device nodes before the call returns. nvmlInit updates them too, and so repairs what a killed
 * process left. Each update compares the files with the state under a lock of its own. Only a
 * process that can write the state file and the layout's folder updates them; most containers
 * cannot.
 */
#define _GNU_SOURCE
#include "sim.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/* A path. A path that would be too long is empty, so that no file is found or created there. */
struct path {
    char text[PATH_MAX];
};

__attribute__((format(printf, 1, 2))) static struct path path_of(const char *format, ...)
{
    struct path path;
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(path.text, sizeof path.text, format, arguments);
    va_end(arguments);
    if (length < 0 || (size_t)length >= sizeof path.text)
        path.text[0] = '\0';
    return path;
}

static bool is_root(const char *folder, void *data)
{
    if (!*folder || !sim_is_state(path_of("%s/%s", folder, STATE_FILE).text) || access(path_of("%s/proc/driver", folder).text, W_OK) != 0)
        return false;
    *(struct path *)data = path_of("%s", folder);
    return true;
}

/* Finds the layout's folder by a path through which this process can write. */
static bool find_root(struct path *root)
{
    return is_root(sim_state()->root, root) || is_root(NVMLSIM_REACH, root) || sim_above_library(is_root, root);
}

/* Finds the folder of the device nodes. A driver container's /dev lies inside the layout. */
static struct path find_devices(const struct path *root)
{
    const struct nvmlsim_header *state = sim_state();
    size_t length = strlen(state->root);
    if (length > 0 && strncmp(state->devices, state->root, length) == 0 && state->devices[length] == '/')
        return path_of("%s%s", root->text, state->devices + length);
    if (access(state->devices, W_OK) == 0)
        return path_of("%s", state->devices);
    struct path folder;
    sim_device_folder(folder.text, sizeof folder.text);
    return folder;
}

static void write_capability(const char *folder, unsigned int minor)
{
    struct path file = path_of("%s/access", folder), fresh = path_of("%s/.access", folder);
    char want[128], have[128] = "";
    int length = snprintf(want, sizeof want, "DeviceFileMinor: %u\nDeviceFileMode: %d\nDeviceFileModify: 1\n", minor, 0444);
    int fd = open(file.text, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t got = read(fd, have, sizeof have - 1);
        close(fd);
        if (got == length && strcmp(have, want) == 0)
            return;
    }
    mkdir(folder, 0755);
    fd = open(fresh.text, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0444);
    if (fd < 0)
        return;
    bool written = write(fd, want, (size_t)length) == length && fchmod(fd, 0444) == 0;
    close(fd);
    if (!written || rename(fresh.text, file.text) != 0)
        unlink(fresh.text);
}

/*
 * Removes a capability's folder with its files. For a GPU instance this includes the folders of its
 * compute instances.
 */
static void remove_capability(const char *folder, int depth)
{
    DIR *entries = opendir(folder);
    const struct dirent *entry;
    while (entries && (entry = readdir(entries))) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        struct path below = path_of("%s/%s", folder, entry->d_name);
        if (unlink(below.text) != 0 && depth > 0)
            remove_capability(below.text, depth - 1);
    }
    if (entries)
        closedir(entries);
    rmdir(folder);
}

static void make_node(const char *devices, unsigned int minor)
{
    const struct nvmlsim_header *state = sim_state();
    struct path node = path_of("%s/nvidia-caps/nvidia-cap%u", devices, minor);
    struct stat have;
    dev_t number = makedev(state->caps_major, minor);
    bool there = lstat(node.text, &have) == 0;
    if (there && (state->plain_devices ? S_ISREG(have.st_mode) : S_ISCHR(have.st_mode) && have.st_rdev == number))
        return;
    if (there)
        unlink(node.text);
    if (state->no_capability_nodes)
        return;
    mode_t type = state->plain_devices ? S_IFREG : S_IFCHR;
    if (mknod(node.text, type | 0444, state->plain_devices ? 0 : number) == 0)
        chmod(node.text, 0444); /* mknod applies the umask */
}

static void remove_node(const char *devices, unsigned int minor)
{
    unlink(path_of("%s/nvidia-caps/nvidia-cap%u", devices, minor).text);
}

/*
 * A capability's folder is created before its device node and removed after it. While the folder
 * exists, a process checks the device node.
 */
static void sync_instance(const struct nvmlsim_gpu *gpu, unsigned int gi, const char *mig, const char *devices)
{
    struct path folder = path_of("%s/gi%u", mig, gi);
    bool exists = sim_gi(gpu, gi).exists;
    if (exists) {
        write_capability(folder.text, sim_gi_minor(gpu, gi));
        make_node(devices, sim_gi_minor(gpu, gi));
    }
    bool had = exists || access(folder.text, F_OK) == 0;
    for (unsigned int ci = 0; had && ci < NVMLSIM_COMPUTE_INSTANCES; ci++) {
        struct path below = path_of("%s/ci%u", folder.text, ci);
        if (sim_ci(gpu, gi, ci).exists) {
            write_capability(below.text, sim_ci_minor(gpu, gi, ci));
            make_node(devices, sim_ci_minor(gpu, gi, ci));
        } else if (access(below.text, F_OK) == 0) {
            remove_node(devices, sim_ci_minor(gpu, gi, ci));
            remove_capability(below.text, 0);
        }
    }
    if (had && !exists) {
        remove_node(devices, sim_gi_minor(gpu, gi));
        remove_capability(folder.text, 1);
    }
}

static void sync_gpus(unsigned int first, unsigned int end)
{
    struct path root;
    if (sim_state_read_only() || !find_root(&root))
        return;
    int lock = sim_lock_open(NVMLSIM_LOCK_CAPABILITIES, false);
    if (lock < 0)
        return;
    struct path devices = find_devices(&root);
    for (unsigned int i = first; i < end; i++) {
        const struct nvmlsim_gpu *gpu = sim_gpu_at(i);
        struct path mig = path_of("%s/proc/driver/nvidia/capabilities/gpu%u/mig", root.text, gpu->minor);
        if (!sim_model(gpu)->mig_supported || access(mig.text, F_OK) != 0)
            continue; /* no capabilities: the driver is not loaded, or did not find the GPU */
        for (unsigned int gi = 0; gi < NVMLSIM_GPU_INSTANCES; gi++)
            sync_instance(gpu, gi, mig.text, devices.text);
    }
    sim_lock_close(lock);
}

void sim_sync_capabilities(void) { sync_gpus(0, sim_state()->gpu_count); }

void sim_sync_capabilities_of(unsigned int number) { sync_gpus(number, number + 1); }

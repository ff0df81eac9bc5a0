/*
 * Which GPUs this process may use: the error of open() shows it.
 * 
 * The device nodes are real ones with the driver's numbers, but no kernel driver is behind them. So
 * open() fails with
 *   ENXIO, ENODEV  the node exists and the device cgroup allows it: the GPU is available
 *   EPERM          the node exists, the device cgroup forbids it
 *   ENOENT         this /dev has no such node
 * Success also means available: the node is a plain file, which the layout creates without mknod.
 * The folder is the first of
 *   1. the environment variable NVMLSIM_DEV;
 *   2. dev in the library's own driver root, where it has nvidiactl: that of a driver container.
 *      The host's /dev may lack nodes, which the real library, run by root, creates itself;
 *   3. /dev.
 */
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CONTROL_DEVICE "nvidiactl"

static bool has_control_device(const char *folder)
{
    char path[3 * PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, CONTROL_DEVICE);
    return access(path, F_OK) == 0;
}

void sim_device_folder(char *folder, size_t size)
{
    const char *named = getenv("NVMLSIM_DEV");
    snprintf(folder, size, "%s", named && *named ? named : "/dev");
    if (named && *named)
        return;
    char root[PATH_MAX], candidate[2 * PATH_MAX];
    snprintf(root, sizeof root, "%s", sim_library_path());
    for (char *slash = strrchr(root, '/'); slash && slash != root; slash = strrchr(root, '/')) {
        *slash = '\0';
        snprintf(candidate, sizeof candidate, "%s/dev", root);
        if (strlen(candidate) < size && has_control_device(candidate)) {
            memcpy(folder, candidate, strlen(candidate) + 1);
            return;
        }
    }
}

static bool opens(const char *name, int access_mode)
{
    char folder[PATH_MAX], path[2 * PATH_MAX];
    sim_device_folder(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, access_mode | O_CLOEXEC | O_NONBLOCK);
    if (fd >= 0) {
        close(fd);
        return true;
    }
    return errno == ENXIO || errno == ENODEV;
}

bool sim_control_device_opens(void) { return opens(CONTROL_DEVICE, O_RDWR); }

bool sim_gpu_device_opens(unsigned int minor)
{
    char name[32];
    snprintf(name, sizeof name, "nvidia%u", minor);
    return opens(name, O_RDWR);
}

bool sim_capability_opens(unsigned int minor)
{
    char name[64];
    snprintf(name, sizeof name, "nvidia-caps/nvidia-cap%u", minor);
    return opens(name, O_RDONLY); /* capability nodes have mode 0400 or 0444 */
}

/*
 * Opens the device node with O_PATH, because no kernel driver handles it and open() would fail.
 * /proc shows the node's numbers even for such a descriptor.
 */
static int point_at(const char *name)
{
    char folder[PATH_MAX], path[2 * PATH_MAX];
    sim_device_folder(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return open(path, O_PATH | O_CLOEXEC);
}

int sim_gpu_descriptor(unsigned int minor)
{
    char name[32];
    snprintf(name, sizeof name, "nvidia%u", minor);
    return point_at(name);
}

int sim_capability_descriptor(unsigned int minor)
{
    char name[64];
    snprintf(name, sizeof name, "nvidia-caps/nvidia-cap%u", minor);
    return point_at(name);
}

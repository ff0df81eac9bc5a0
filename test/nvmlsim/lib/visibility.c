/*
 * Which GPUs this process was given: the answer is in how open() fails.
 *
 * The device nodes are real ones with the driver's numbers, but no kernel driver is behind them. So open() says
 *   ENXIO, ENODEV  the node is there and the device cgroup lets us through: the GPU was given to us
 *   EPERM          the node is there, the device cgroup forbids it
 *   ENOENT         it was not put into this /dev
 * Success counts as given too: that is a plain file, which the layout makes where mknod is not allowed.
 * NVMLSIM_DEV names another folder than /dev.
 */
#include "sim.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static bool opens(const char *name)
{
    char path[PATH_MAX];
    const char *folder = getenv("NVMLSIM_DEV");
    snprintf(path, sizeof path, "%s/%s", folder && *folder ? folder : "/dev", name);
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (fd >= 0) {
        close(fd);
        return true;
    }
    return errno == ENXIO || errno == ENODEV;
}

bool sim_control_device_opens(void) { return opens("nvidiactl"); }

bool sim_gpu_device_opens(unsigned int minor)
{
    char name[32];
    snprintf(name, sizeof name, "nvidia%u", minor);
    return opens(name);
}

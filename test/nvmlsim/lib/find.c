/*
 * The locations of the library and the state file.
 * 
 * The file's location is, in this order:
 *   1. the environment variable NVMLSIM_STATE;
 *   2. lib/firmware/nvidia/<version>/gsp_nvmlsim.bin of the library's own driver root. This works
 *      on the node, for a driver root mounted elsewhere, and in a container;
 *   3. below the same directory of "/".
 * If the driver root is mounted read-only, the same file may be writable by another path: in the
 * layout's folder above the driver root, or in /dev/.udev/nvmlsim. A container with all of /dev,
 * such as the plugin's, can thus change the GPUs. With a real driver it could do so by ioctl.
 */
#define _GNU_SOURCE
#include "sim.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char library[PATH_MAX]; /* real path of the library file when it was loaded */

__attribute__((constructor)) static void remember_own_path(void)
{
    Dl_info self;
    if (!dladdr((void *)&sim_find_state, &self) || !self.dli_fname || !realpath(self.dli_fname, library))
        library[0] = '\0';
}

const char *sim_library_version(void)
{
    const char *suffix = strstr(library, "libnvidia-ml.so.");
    if (!suffix)
        return "";
    suffix += strlen("libnvidia-ml.so.");
    return strchr(suffix, '.') ? suffix : ""; /* "1" is the SONAME, not a version */
}

const char *sim_library_path(void) { return library; }

/* Opens the state file at path, read-only if it cannot be written, and stores the path in found. */
static bool open_state(const char *path, struct sim_found *found)
{
    found->fd = open(path, O_RDWR | O_CLOEXEC);
    found->read_only = found->fd < 0;
    if (found->fd < 0)
        found->fd = open(path, O_RDONLY | O_CLOEXEC);
    snprintf(found->path, sizeof found->path, "%s", path);
    return found->fd >= 0;
}

/* Opens the first state file in root/lib/firmware/nvidia/<any version>. */
static bool open_below(const char *root, void *data)
{
    struct sim_found *found = data;
    char folder[PATH_MAX], path[2 * PATH_MAX];
    snprintf(folder, sizeof folder, "%.4000s/lib/firmware/nvidia", root);
    DIR *versions = opendir(folder);
    if (!versions)
        return false;
    const struct dirent *version;
    while (found->fd < 0 && (version = readdir(versions))) {
        if (version->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%s/%s", folder, version->d_name, STATE_FILE);
        if (strlen(path) < PATH_MAX)
            open_state(path, found);
    }
    closedir(versions);
    return found->fd >= 0;
}

bool sim_above_library(bool (*visit)(const char *folder, void *data), void *data)
{
    char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%s", library);
    for (char *slash = strrchr(folder, '/'); slash && slash != folder; slash = strrchr(folder, '/')) {
        *slash = '\0';
        if (visit(folder, data))
            return true;
    }
    return false;
}

/*
 * If the folder has the same state file and this process can write it there, opens that path
 * instead.
 */
static bool open_writable(const char *folder, void *data)
{
    struct sim_found *found = data;
    char path[PATH_MAX + sizeof STATE_FILE + 1];
    struct stat have, other;
    snprintf(path, sizeof path, "%s/%s", folder, STATE_FILE);
    int fd = strlen(path) < PATH_MAX ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return false;
    if (fstat(found->fd, &have) != 0 || fstat(fd, &other) != 0 || have.st_dev != other.st_dev || have.st_ino != other.st_ino) {
        close(fd);
        return false;
    }
    close(found->fd);
    found->fd = fd;
    found->read_only = false;
    memcpy(found->path, path, strlen(path) + 1);
    return true;
}

bool sim_find_state(struct sim_found *found)
{
    found->fd = -1;
    const char *named = getenv("NVMLSIM_STATE");
    if (named && *named)
        return open_state(named, found);

    /*
     * The library lies one to four folders below the driver root:
     * <root>/usr/lib/x86_64-linux-gnu/nvidia/current, <root>/usr/lib64, <root>/lib64.
     */
    if (!sim_above_library(open_below, found) && !open_below("", found))
        return false;
    if (found->read_only && !open_writable(NVMLSIM_REACH, found))
        sim_above_library(open_writable, found);
    return true;
}

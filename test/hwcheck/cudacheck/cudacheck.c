/*
 * Computes 1024 values on the first GPU that CUDA shows this process, and prints the result as one
 * line of JSON. It needs the C library and the driver's libcuda.so.1, and no toolkit: the kernel is
 * PTX text, which the driver compiles.
 *
 * With the argument mps it starts an MPS daemon of its own and two clients with a pinned memory
 * limit, and prints what they got. It changes no setting of the GPU: MPS works in the default
 * compute mode. It leaves files in /tmp and maybe a daemon, so it starts one only as the first
 * process of a container, with whose end the kernel kills the others.
 *
 * With mps-daemon, mps-client, mps-many, mps-neighbour, mps-faulty, ipc-export and ipc-import it is
 * one of several programs in containers of their own. They meet in their working directory.
 *
 * With fault, and as mps-faulty, it writes to an address that it does not have, which NVML reports
 * as XID 31. hwcheck never passes the first: the end-to-end test does. It passes the second only
 * with --fault.
 *
 * The exit code is 0 if the line was printed, even if a call of CUDA or NVML failed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Errors of this program, next to those of CUDA, are negative. */
enum { VALUES = 1024, THREADS = 128, NO_SYMBOL = -1, NO_LIBRARY = -2 };

/* Value i of the buffer becomes 3 * i + 7. Each of VALUES threads writes one value. */
static const char kernel[] =
    ".version 6.0\n"
    ".target sm_50\n"
    ".address_size 64\n"
    ".visible .entry fill(.param .u64 values)\n"
    "{\n"
    "    .reg .b32 %r<6>;\n"
    "    .reg .b64 %rd<5>;\n"
    "    ld.param.u64 %rd1, [values];\n"
    "    cvta.to.global.u64 %rd2, %rd1;\n"
    "    mov.u32 %r1, %ctaid.x;\n"
    "    mov.u32 %r2, %ntid.x;\n"
    "    mov.u32 %r3, %tid.x;\n"
    "    mad.lo.s32 %r4, %r1, %r2, %r3;\n"
    "    mul.wide.u32 %rd3, %r4, 4;\n"
    "    add.s64 %rd4, %rd2, %rd3;\n"
    "    mad.lo.s32 %r5, %r4, 3, 7;\n"
    "    st.global.u32 [%rd4], %r5;\n"
    "    ret;\n"
    "}\n";

/* What the program prints, in the fields of CUDAResult (test/hwcheck/facts). */
static struct {
    int driver_version;
    int devices;
    char uuid[64];
    int correct;
    int wrong;
} result;

static int print_result(const char *step, int error)
{
    printf("{\"step\":\"%s\",\"error\":%d,\"driverVersion\":%d,\"devices\":%d,\"uuid\":\"%s\",\"correct\":%d,\"wrong\":%d}\n",
           step, error, result.driver_version, result.devices, result.uuid, result.correct, result.wrong);
    return 0;
}

static void format_uuid(const unsigned char *b)
{
    snprintf(result.uuid, sizeof result.uuid,
             "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
             b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

/* Declares a function of libcuda or NVML and looks it up, or gives its name to FAIL and returns. */
#define CUDA(name, ...)                                          \
    int (*name)(__VA_ARGS__) = (int (*)(__VA_ARGS__))dlsym(library, #name); \
    if (!name)                                                   \
        return FAIL(#name, NO_SYMBOL)

/* Calls a function, or gives its name and error to FAIL and returns. */
#define CALL(name, ...)                          \
    do {                                         \
        int error = name(__VA_ARGS__);           \
        if (error)                               \
            return FAIL(#name, error);           \
    } while (0)

#define FAIL print_result

/*
 * Computes the values. If faulty, it writes to an address that the process does not have. With
 * between, it calls that function and then computes again.
 */
static int compute(bool faulty, void (*between)(void))
{
    /* The driver would write the compiled kernel to the home directory. */
    setenv("CUDA_CACHE_DISABLE", "1", 1);
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return print_result("dlopen", NO_LIBRARY);
    }
    CUDA(cuDriverGetVersion, int *);
    CALL(cuDriverGetVersion, &result.driver_version);
    CUDA(cuInit, unsigned int);
    CALL(cuInit, 0);
    CUDA(cuDeviceGetCount, int *);
    CALL(cuDeviceGetCount, &result.devices);
    if (result.devices == 0)
        return print_result("cuDeviceGetCount", 0);

    int device;
    unsigned char uuid[16];
    void *context;
    CUDA(cuDeviceGet, int *, int);
    CALL(cuDeviceGet, &device, 0);
    CUDA(cuDeviceGetUuid, unsigned char *, int);
    CALL(cuDeviceGetUuid, uuid, device);
    format_uuid(uuid);
    CUDA(cuDevicePrimaryCtxRetain, void **, int);
    CALL(cuDevicePrimaryCtxRetain, &context, device);
    CUDA(cuCtxSetCurrent, void *);
    CALL(cuCtxSetCurrent, context);

    unsigned long long values; /* a CUdeviceptr */
    static unsigned int computed[VALUES];
    CUDA(cuMemAlloc_v2, unsigned long long *, size_t);
    CALL(cuMemAlloc_v2, &values, sizeof computed);

    void *module, *function;
    unsigned long long nowhere = values + (1ULL << 42);
    void *parameters[] = {faulty ? &nowhere : &values};
    CUDA(cuModuleLoadData, void **, const void *);
    CALL(cuModuleLoadData, &module, kernel);
    CUDA(cuModuleGetFunction, void **, void *, const char *);
    CALL(cuModuleGetFunction, &function, module, "fill");
    CUDA(cuLaunchKernel, void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    CALL(cuLaunchKernel, function, VALUES / THREADS, 1, 1, THREADS, 1, 1, 0, NULL, parameters, NULL);
    CUDA(cuCtxSynchronize, void);
    CALL(cuCtxSynchronize);
    CUDA(cuMemcpyDtoH_v2, void *, unsigned long long, size_t);
    CALL(cuMemcpyDtoH_v2, computed, values, sizeof computed);
    for (unsigned int i = 0; i < VALUES; i++) {
        if (computed[i] == 3 * i + 7)
            result.correct++;
        else
            result.wrong++;
    }
    if (between) {
        between();
        CALL(cuLaunchKernel, function, VALUES / THREADS, 1, 1, THREADS, 1, 1, 0, NULL, parameters, NULL);
        CALL(cuCtxSynchronize);
    }

    CUDA(cuMemFree_v2, unsigned long long);
    CALL(cuMemFree_v2, values);
    CUDA(cuDevicePrimaryCtxRelease_v2, int);
    CALL(cuDevicePrimaryCtxRelease_v2, device);
    return print_result("done", 0);
}

#undef FAIL

/* ---- two clients of an MPS daemon */

#define CONTROL "nvidia-cuda-mps-control"
#define LIMIT "0=1024M"
enum {
    CLIENTS = 2,
    MIB = 1 << 20,
    /* If the limit fails, the clients take 2560 MiB and their contexts. With less memory a refusal
       would not prove the limit. mpsFreeMiB in mps.go is the same value. */
    ENOUGH_MIB = 3072,
    OUT_OF_MEMORY = 2, /* CUresult */
    PATIENCE_MS = 20000,
    PAUSE_MS = 100,
};

/* What a client allocates below the limit, for contexts of any size, and above it. */
static int fits_mib = 256, exceeds_mib = 1024;

/* What the program prints, in the fields of MPS (test/hwcheck/facts). */
static struct {
    long free_mib;
    bool started;
    int servers;
    int clients;
    int allocated;
    int refused;
    bool ended;
} shared;

static int print_shared(const char *step, int error)
{
    printf("{\"step\":\"%s\",\"error\":%d,\"freeMiB\":%ld,\"started\":%s,\"servers\":%d,\"clients\":%d,"
           "\"allocated\":%d,\"refused\":%d,\"ended\":%s}\n",
           step, error, shared.free_mib, shared.started ? "true" : "false", shared.servers, shared.clients,
           shared.allocated, shared.refused, shared.ended ? "true" : "false");
    return 0;
}

/* What a client sends to its parent. step is the call that failed, or "done". */
struct client_result {
    char step[40];
    int error;
    int allocated; /* 1: memory below the limit was granted */
    int refused;   /* 1: memory above the limit was refused as out of memory */
};

static int note(struct client_result *r, const char *step, int error)
{
    snprintf(r->step, sizeof r->step, "%s", step);
    r->error = error;
    return error;
}

#define FAIL(step, error) note(r, step, error)

/* Opens the first GPU in a context of its own. library is libcuda's. */
static int open_gpu(struct client_result *r, void **opened, int *device)
{
    void *library = *opened = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library)
        return FAIL("dlopen", NO_LIBRARY);
    int devices = 0;
    void *context;
    CUDA(cuInit, unsigned int);
    CALL(cuInit, 0);
    CUDA(cuDeviceGetCount, int *);
    CALL(cuDeviceGetCount, &devices);
    CUDA(cuDeviceGet, int *, int);
    CALL(cuDeviceGet, device, 0);
    CUDA(cuDevicePrimaryCtxRetain, void **, int);
    CALL(cuDevicePrimaryCtxRetain, &context, *device);
    CUDA(cuCtxSetCurrent, void *);
    CALL(cuCtxSetCurrent, context);
    return 0;
}

/*
 * Allocates memory below and above the limit, sends the result, and keeps the memory until the
 * parent closes its end of until.
 */
static int client(struct client_result *r, int out, int until)
{
    void *library;
    int device;
    int unopened = open_gpu(r, &library, &device);
    if (unopened)
        return unopened;
    unsigned long long small, large;
    CUDA(cuMemAlloc_v2, unsigned long long *, size_t);
    CALL(cuMemAlloc_v2, &small, (size_t)fits_mib * MIB);
    r->allocated = 1;
    r->refused = exceeds_mib > 0 && cuMemAlloc_v2(&large, (size_t)exceeds_mib * MIB) == OUT_OF_MEMORY;
    FAIL("done", 0);
    char byte;
    if (write(out, r, sizeof *r) != sizeof *r || read(until, &byte, 1) < 0)
        return 1;
    CUDA(cuDevicePrimaryCtxRelease_v2, int);
    return cuDevicePrimaryCtxRelease_v2(device); /* also frees the memory */
}

/* Reads the free memory of the first GPU with NVML, which itself takes none. */
static int read_free_memory(struct client_result *r)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library)
        return FAIL("dlopen", NO_LIBRARY);
    void *device;
    unsigned long long memory[3] = {0}; /* nvmlMemory_t: total, free, used */
    CUDA(nvmlInit_v2, void);
    CALL(nvmlInit_v2);
    CUDA(nvmlDeviceGetHandleByIndex_v2, unsigned int, void **);
    CALL(nvmlDeviceGetHandleByIndex_v2, 0, &device);
    CUDA(nvmlDeviceGetMemoryInfo, void *, unsigned long long *);
    CALL(nvmlDeviceGetMemoryInfo, device, memory);
    shared.free_mib = (long)(memory[1] / MIB);
    CUDA(nvmlShutdown, void);
    CALL(nvmlShutdown);
    return 0;
}

static void pause_ms(int ms)
{
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
    nanosleep(&t, NULL);
}

/* Sends a command to the daemon. Returns whether there was an answer without an error. */
static bool ask(const char *command, char *answer, size_t size)
{
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0)
        return false;
    pid_t pid = fork();
    if (pid == 0) {
        dup2(in[0], 0);
        dup2(out[1], 1);
        execlp(CONTROL, CONTROL, (char *)NULL);
        _exit(127);
    }
    close(in[0]);
    close(out[1]);
    bool sent = write(in[1], command, strlen(command)) == (ssize_t)strlen(command);
    close(in[1]);
    size_t length = 0;
    for (ssize_t n; length + 1 < size && (n = read(out[0], answer + length, size - 1 - length)) > 0;)
        length += (size_t)n;
    answer[length] = 0;
    close(out[0]);
    int status = 0;
    return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0 && sent && !strstr(answer, "annot");
}

/* Counts the lines of text that begin with a number. The first one becomes *first. */
static int count_numbers(const char *text, long *first)
{
    int count = 0;
    for (const char *line = text; *line; line += *line == '\n') {
        if (*line >= '0' && *line <= '9' && count++ == 0)
            *first = strtol(line, NULL, 10);
        line += strcspn(line, "\n");
    }
    return count;
}

static pid_t start_daemon(void)
{
    pid_t pid = fork();
    if (pid == 0) {
        dup2(2, 1); /* standard output is for the result */
        execlp(CONTROL, CONTROL, "-f", (char *)NULL);
        _exit(127);
    }
    return pid;
}

/* Starts the daemon and waits until it answers, which shared.started says. */
static pid_t begin_daemon(void)
{
    char answer[4096];
    signal(SIGPIPE, SIG_IGN);
    pid_t daemon = start_daemon();
    if (daemon < 0)
        perror("fork");
    for (int waited = 0; daemon > 0 && !shared.started && waited < PATIENCE_MS && waitpid(daemon, NULL, WNOHANG) == 0; waited += PAUSE_MS) {
        shared.started = ask("get_default_active_thread_percentage\n", answer, sizeof answer) && answer[0];
        if (!shared.started)
            pause_ms(PAUSE_MS);
    }
    return daemon;
}

/* Asks the daemon for its servers and the clients of the first. */
static void count_clients(int *servers, int *clients)
{
    char answer[4096], command[64];
    long server = 0, ignored;
    *clients = 0;
    *servers = ask("get_server_list\n", answer, sizeof answer) ? count_numbers(answer, &server) : 0;
    snprintf(command, sizeof command, "get_client_list %ld\n", server);
    if (*servers > 0 && ask(command, answer, sizeof answer))
        *clients = count_numbers(answer, &ignored);
}

/*
 * Starts a client that waits for the parent to close its end of release. Its result comes from the
 * other pipe. earlier are the pipes of the count clients before it.
 */
static pid_t start_client(int results[2], int release[2], int earlier[][2], int count)
{
    if (pipe2(results, O_CLOEXEC) != 0 || pipe2(release, O_CLOEXEC) != 0)
        return -1;
    pid_t pid = fork();
    if (pid == 0) {
        for (int i = 0; i < count; i++)
            close(earlier[i][1]);
        close(release[1]);
        struct client_result r = {.error = 0};
        int error = client(&r, results[1], release[0]);
        if (r.error != 0 && write(results[1], &r, sizeof r) != sizeof r)
            error = 1;
        _exit(error != 0);
    }
    close(results[1]); /* without a client, reading from it ends at once */
    close(release[0]);
    return pid;
}

static void await(int results, struct client_result *r)
{
    struct pollfd ready = {.fd = results, .events = POLLIN};
    if (poll(&ready, 1, PATIENCE_MS) != 1 || read(results, r, sizeof *r) != sizeof *r)
        note(r, "wait for the client", -3);
}

/*
 * Waits until all processes below this one have ended. Returns whether they did. The server, which
 * the daemon leaves, is among them: orphans become children of a container's first process.
 */
static bool all_ended(void)
{
    for (int waited = 0; waited < PATIENCE_MS; waited += PAUSE_MS) {
        pid_t ended;
        while ((ended = waitpid(-1, NULL, WNOHANG)) > 0)
            ;
        if (ended < 0)
            return errno == ECHILD;
        pause_ms(PAUSE_MS);
    }
    return false;
}

static int mps(void)
{
    struct client_result memory = {.error = 0}, got[CLIENTS] = {0};
    int release[CLIENTS][2], results[CLIENTS][2];
    char answer[4096], folder[] = "/tmp/mps-XXXXXX";
    if (getpid() != 1) {
        fputs("mps: not the first process of a container, so no daemon was started\n", stderr);
        return 1;
    }
    if (read_free_memory(&memory) != 0 || shared.free_mib < ENOUGH_MIB)
        return print_shared(memory.error != 0 ? memory.step : "free memory", memory.error);
    mkdir("/dev/shm", 01777); /* they exist, except in a bare container */
    mkdir("/tmp", 01777);
    if (!mkdtemp(folder) || setenv("CUDA_MPS_PIPE_DIRECTORY", folder, 1) != 0 || setenv("CUDA_MPS_LOG_DIRECTORY", folder, 1) != 0) {
        perror(folder);
        return 1;
    }
    pid_t daemon = begin_daemon();
    if (daemon < 0)
        return 1;
    if (!shared.started) /* as the first process, this one takes the daemon with it */
        return print_shared("", 0);
    setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", LIMIT, 1);
    for (int i = 0; i < CLIENTS; i++)
        if (start_client(results[i], release[i], release, i) < 0)
            return 1;
    for (int i = 0; i < CLIENTS; i++)
        await(results[i][0], &got[i]);
    count_clients(&shared.servers, &shared.clients);
    for (int i = 0; i < CLIENTS; i++)
        close(release[i][1]);
    ask("quit\n", answer, sizeof answer);
    shared.ended = all_ended();
    const struct client_result *worst = &got[0];
    for (int i = 0; i < CLIENTS; i++) {
        if (worst->error == 0 && got[i].error != 0)
            worst = &got[i];
        shared.allocated += got[i].allocated;
        shared.refused += got[i].refused;
    }
    return print_shared(worst->step, worst->error);
}

/* ---- programs in several containers */

#define PIPES "mps"
enum { MOST_CLIENTS = 72, HOLD_MS = 3000, POLL_MS = 500, RETRY_MS = 200 };

static void leave(const char *name)
{
    int fd = open(name, O_CREAT | O_WRONLY | O_CLOEXEC, 0666);
    if (fd >= 0)
        close(fd);
}

static bool met(const char *name, int patience_ms)
{
    for (int waited = 0; access(name, F_OK) != 0; waited += PAUSE_MS) {
        if (waited >= patience_ms)
            return false;
        pause_ms(PAUSE_MS);
    }
    return true;
}

static bool use_pipes(void)
{
    char folder[512];
    if (!getcwd(folder, sizeof folder - sizeof "/" PIPES))
        return false;
    strcat(folder, "/" PIPES);
    return setenv("CUDA_MPS_PIPE_DIRECTORY", folder, 1) == 0 && setenv("CUDA_MPS_LOG_DIRECTORY", folder, 1) == 0;
}

/* Prints a file of the daemon, but for the lines about this program's own questions. */
static void print_log(const char *name)
{
    char line[512];
    FILE *file = fopen(name, "re");
    while (file && fgets(line, sizeof line, file))
        if (!strstr(line, " UI") && !strstr(line, "Cmd:") && !strstr(line, "Accepting"))
            fputs(line, stderr);
    if (file)
        fclose(file);
}

/*
 * Runs an MPS daemon until the other containers have ended. With the host's PID namespace, runc
 * kills what remains in the container's control group.
 */
static int serve(void)
{
    struct client_result memory = {.error = 0};
    char answer[4096];
    prctl(PR_SET_CHILD_SUBREAPER, 1); /* so that the server, which the daemon leaves, is a child */
    if (read_free_memory(&memory) != 0 || shared.free_mib < ENOUGH_MIB) {
        leave("ready");
        return print_shared(memory.error != 0 ? memory.step : "free memory", memory.error);
    }
    mkdir(PIPES, 0777);
    if (!use_pipes() || begin_daemon() < 0)
        return 1;
    leave("ready");
    if (shared.started) {
        while (!met("end", 0)) {
            int servers, clients;
            count_clients(&servers, &clients);
            shared.servers = servers > shared.servers ? servers : shared.servers;
            shared.clients = clients > shared.clients ? clients : shared.clients;
            pause_ms(POLL_MS);
        }
        ask("quit\n", answer, sizeof answer);
        shared.ended = all_ended();
    }
    print_log(PIPES "/control.log");
    print_log(PIPES "/server.log");
    return print_shared("", 0);
}

static void hold(void) { pause_ms(HOLD_MS); }

static void after_the_fault(void)
{
    leave("computed");
    met("faulted", PATIENCE_MS);
}

/* Starts clients, each with a context, until one is refused or the memory is nearly used up. */
static int many(void)
{
    static int results[MOST_CLIENTS][2], release[MOST_CLIENTS][2];
    struct client_result r = {.error = 0};
    fits_mib = 1;
    exceeds_mib = 0;
    int count = 0;
    for (bool more = true; more && count < MOST_CLIENTS; count += more) {
        r = (struct client_result){.error = 0};
        if (read_free_memory(&r) != 0 || shared.free_mib < ENOUGH_MIB || start_client(results[count], release[count], release, count) < 0)
            break;
        await(results[count][0], &r);
        more = r.error == 0;
    }
    long free_mib = shared.free_mib;
    printf("{\"step\":\"%s\",\"error\":%d,\"clients\":%d,\"freeMiB\":%ld}\n", r.step, r.error, count, free_mib);
    fflush(stdout);
    hold();
    for (int i = 0; i < MOST_CLIENTS; i++)
        if (release[i][1] > 0)
            close(release[i][1]);
    return all_ended() ? 0 : 1;
}

/* Computes in a child, because CUDA does not survive a fork. Returns whether it was right. */
static bool computes(void (*between)(void), bool quiet)
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        int null = quiet ? open("/dev/null", O_WRONLY | O_CLOEXEC) : -1;
        if (null >= 0)
            dup2(null, 1);
        compute(false, between);
        fflush(stdout);
        _exit(result.correct != VALUES);
    }
    int status = 1;
    return waitpid(pid, &status, 0) == pid && status == 0;
}

/*
 * Computes before and after another client's fault, and then as new clients until one is served.
 * New clients were refused for at least the pauses between these.
 */
static int neighbour(void)
{
    bool computed = computes(after_the_fault, false), served = false;
    int waited = 0;
    leave("computed");
    if (computed && met("faulted", PATIENCE_MS)) {
        while (!(served = computes(NULL, true)) && waited < PATIENCE_MS) {
            pause_ms(RETRY_MS);
            waited += RETRY_MS;
        }
    }
    printf("{\"refusedMillis\":%d,\"served\":%s}\n", waited, served ? "true" : "false");
    return 0;
}

static int faulty(void)
{
    met("computed", PATIENCE_MS);
    compute(true, NULL);
    leave("faulted");
    return 0;
}

static int mps_client(int (*run)(void))
{
    if (!met("ready", PATIENCE_MS) || !use_pipes())
        return print_result("wait for the daemon", -3);
    return run();
}

static int held(void) { return compute(false, hold); }

struct ipc_handle {
    char bytes[64]; /* a CUipcMemHandle */
};

static unsigned int pattern(int i) { return 5 * (unsigned int)i + 11; }

/* Fills memory, leaves its handle, and keeps the memory until the other container has ended. */
static int export_memory(struct client_result *r)
{
    void *library;
    int device, unopened = open_gpu(r, &library, &device);
    if (unopened)
        return unopened;
    unsigned long long memory;
    unsigned int values[VALUES];
    struct ipc_handle handle;
    for (int i = 0; i < VALUES; i++)
        values[i] = pattern(i);
    CUDA(cuMemAlloc_v2, unsigned long long *, size_t);
    CALL(cuMemAlloc_v2, &memory, sizeof values);
    CUDA(cuMemcpyHtoD_v2, unsigned long long, const void *, size_t);
    CALL(cuMemcpyHtoD_v2, memory, values, sizeof values);
    CUDA(cuIpcGetMemHandle, struct ipc_handle *, unsigned long long);
    CALL(cuIpcGetMemHandle, &handle, memory);
    FILE *file = fopen("handle", "we");
    if (!file || fwrite(&handle, sizeof handle, 1, file) != 1 || fclose(file) != 0)
        return FAIL("write the handle", -3);
    leave("exported");
    met("end", PATIENCE_MS);
    return FAIL("done", 0);
}

static int import_memory(struct client_result *r)
{
    void *library;
    int device;
    struct ipc_handle handle;
    FILE *file = met("exported", PATIENCE_MS) ? fopen("handle", "re") : NULL;
    if (!file || fread(&handle, sizeof handle, 1, file) != 1)
        return FAIL("wait for the handle", -3);
    fclose(file);
    int unopened = open_gpu(r, &library, &device);
    if (unopened)
        return unopened;
    unsigned long long memory;
    unsigned int values[VALUES];
    CUDA(cuIpcOpenMemHandle_v2, unsigned long long *, struct ipc_handle, unsigned int);
    CALL(cuIpcOpenMemHandle_v2, &memory, handle, 1 /* CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS */);
    CUDA(cuMemcpyDtoH_v2, void *, unsigned long long, size_t);
    CALL(cuMemcpyDtoH_v2, values, memory, sizeof values);
    for (int i = 0; i < VALUES; i++)
        result.correct += values[i] == pattern(i);
    result.wrong = VALUES - result.correct;
    CUDA(cuIpcCloseMemHandle, unsigned long long);
    CALL(cuIpcCloseMemHandle, memory);
    return FAIL("done", 0);
}

static int ipc(int (*run)(struct client_result *))
{
    struct client_result r = {.error = 0};
    run(&r);
    leave("exported"); /* so that no import waits for a handle after an error */
    return print_result(r.step, r.error);
}

int main(int argc, char **argv)
{
    const char *role = argc == 2 ? argv[1] : "";
    if (strcmp(role, "mps") == 0)
        return mps();
    if (strcmp(role, "mps-daemon") == 0)
        return serve();
    if (strcmp(role, "mps-client") == 0)
        return mps_client(held);
    if (strcmp(role, "mps-many") == 0)
        return mps_client(many);
    if (strcmp(role, "mps-neighbour") == 0)
        return mps_client(neighbour);
    if (strcmp(role, "mps-faulty") == 0)
        return mps_client(faulty);
    if (strcmp(role, "ipc-export") == 0)
        return ipc(export_memory);
    if (strcmp(role, "ipc-import") == 0)
        return ipc(import_memory);
    return compute(strcmp(role, "fault") == 0, NULL);
}

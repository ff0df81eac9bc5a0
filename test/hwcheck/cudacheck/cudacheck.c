/*
 * Computes 1024 values on the first GPU that CUDA shows this process, and prints the result as one
 * line of JSON. It needs the C library and the driver's libcuda.so.1, and no toolkit: the kernel is
 * PTX text, which the driver compiles.
 *
 * The exit code is 0 if the line was printed, even if a call of CUDA failed.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

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

/* Declares a function of libcuda and looks it up, or ends the program with the function's name. */
#define CUDA(name, ...)                                          \
    int (*name)(__VA_ARGS__) = (int (*)(__VA_ARGS__))dlsym(library, #name); \
    if (!name)                                                   \
        return print_result(#name, NO_SYMBOL)

/* Calls a function, or ends the program with its name and error. */
#define CALL(name, ...)                          \
    do {                                         \
        int error = name(__VA_ARGS__);           \
        if (error)                               \
            return print_result(#name, error);   \
    } while (0)

int main(void)
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
    void *parameters[] = {&values};
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

    CUDA(cuMemFree_v2, unsigned long long);
    CALL(cuMemFree_v2, values);
    CUDA(cuDevicePrimaryCtxRelease_v2, int);
    CALL(cuDevicePrimaryCtxRelease_v2, device);
    return print_result("done", 0);
}

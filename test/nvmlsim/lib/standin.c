/*
 * Stands in for the driver's other libraries: a real ELF file with a real SONAME, so that ldconfig
 * creates its link and dlopen finds it. Built as libcuda it also answers cuInit with
 * CUDA_ERROR_NO_DEVICE. By the symbol nvmlsim_standin a program tells it from NVIDIA's library.
 */
#define API __attribute__((visibility("default")))

enum { CUDA_ERROR_NO_DEVICE = 100 };

API extern const int nvmlsim_standin;
API const int nvmlsim_standin = 1;

API int cuInit(unsigned int flags);
API int cuInit(unsigned int flags)
{
    (void)flags;
    return CUDA_ERROR_NO_DEVICE;
}

API int cuDriverGetVersion(int *version);
API int cuDriverGetVersion(int *version)
{
    if (version)
        *version = 0;
    return 0;
}

/* nvml-client has NVML open, as monitoring does, until it is killed. It prints "ready" when NVML is
 * open.
 *
 *     nvml-client PCI-ADDRESS              has the GPU open
 *     nvml-client PCI-ADDRESS GI CI        has handles of the GPU instance and its compute instance too
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* nvml.h: handles are opaque pointers, and 0 is NVML_SUCCESS. */
typedef void *handle;

static void *library;

static void *find(const char *name)
{
	void *function = dlsym(library, name);

	if (!function) {
		fprintf(stderr, "%s\n", dlerror());
		exit(1);
	}
	return function;
}

static void check(const char *what, int answer)
{
	if (answer == 0)
		return;
	fprintf(stderr, "%s: NVML error %d\n", what, answer);
	exit(1);
}

int main(int argc, char **argv)
{
	handle gpu, gi, ci;

	if (argc != 2 && argc != 4) {
		fprintf(stderr, "usage: %s PCI-ADDRESS [GI CI]\n", argv[0]);
		return 2;
	}
	library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	check("init", ((int (*)(void))find("nvmlInit_v2"))());
	check("open the GPU", ((int (*)(const char *, handle *))find("nvmlDeviceGetHandleByPciBusId_v2"))(argv[1], &gpu));
	if (argc == 4) {
		check("find the GPU instance",
		      ((int (*)(handle, unsigned int, handle *))find("nvmlDeviceGetGpuInstanceById"))(gpu, (unsigned int)atoi(argv[2]), &gi));
		check("find the compute instance",
		      ((int (*)(handle, unsigned int, handle *))find("nvmlGpuInstanceGetComputeInstanceById"))(gi, (unsigned int)atoi(argv[3]), &ci));
	}
	puts("ready");
	fflush(stdout);
	for (;;)
		pause();
}

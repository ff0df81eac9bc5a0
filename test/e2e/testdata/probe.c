/* probe prints whether its container can open device nodes or load libraries, one line for each.
 *
 *     probe open PATH…      PATH OK, or PATH and the name of open's error
 *     probe load LIBRARY…   LIBRARY OK, or LIBRARY and what the dynamic loader says
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *try_open(const char *path)
{
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return strerrorname_np(errno);
	close(fd);
	return "OK";
}

static const char *try_load(const char *library)
{
	return dlopen(library, RTLD_NOW) ? "OK" : dlerror();
}

int main(int argc, char **argv)
{
	const char *(*try)(const char *) = NULL;

	if (argc > 2 && strcmp(argv[1], "open") == 0)
		try = try_open;
	else if (argc > 2 && strcmp(argv[1], "load") == 0)
		try = try_load;
	if (!try) {
		fprintf(stderr, "usage: %s open PATH… | load LIBRARY…\n", argv[0]);
		return 2;
	}
	for (int i = 2; i < argc; i++)
		printf("%s %s\n", argv[i], try(argv[i]));
	return 0;
}

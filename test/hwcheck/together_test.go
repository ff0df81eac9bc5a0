package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// fakeCUDA is a libcuda whose memory is the process's. A context is a file in the folder clients,
// and the sixth is refused as too many. Work outside the memory fails, and so do the next two.
const fakeCUDA = `#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static char mine[64];
static unsigned long long memory;
static int faulted;
int cuInit(unsigned f) { return (int)f; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetUuid(unsigned char *u, int d) { memset(u, d, 16); return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d)
{
    int n = 0;
    DIR *all = opendir("clients");
    while (all && readdir(all)) n++;
    if (n - 2 >= 5) return 808;
    snprintf(mine, sizeof mine, "clients/%d", getpid());
    close(open(mine, O_CREAT | O_WRONLY, 0600));
    *c = mine + d;
    return 0;
}
int cuDevicePrimaryCtxRelease_v2(int d) { return unlink(mine) + d; }
int cuCtxSetCurrent(void *c) { return c != mine; }
int cuMemAlloc_v2(unsigned long long *p, size_t n) { *p = memory = (unsigned long long)calloc(1, n); return 0; }
int cuMemFree_v2(unsigned long long p) { free((void *)p); return 0; }
int cuModuleLoadData(void **m, const void *k) { *m = (void *)k; return 0; }
int cuModuleGetFunction(void **f, void *m, const char *n) { *f = m; return strcmp(n, "fill"); }
int cuLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned s, void *q, void **p, void **x)
{
    (void)f; (void)a; (void)b; (void)c; (void)d; (void)e; (void)g; (void)s; (void)q; (void)x;
    unsigned long long to = *(unsigned long long *)p[0];
    faulted = to != memory;
    for (unsigned i = 0; !faulted && i < 1024; i++) ((unsigned *)to)[i] = 3 * i + 7;
    return 0;
}
int cuCtxSynchronize(void)
{
    if (access("faulted", F_OK) != 0) return faulted ? 700 : 0;
    FILE *f = fopen("failures", "a");
    fputc('x', f);
    fflush(f);
    long failures = ftell(f);
    fclose(f);
    return failures < 3 ? 700 : 0;
}
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t n) { memcpy(to, (void *)from, n); return 0; }
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t n) { memcpy((void *)to, from, n); return 0; }
struct handle { char path[64]; };
int cuIpcGetMemHandle(struct handle *h, unsigned long long p)
{
    strcpy(h->path, "exported-memory");
    FILE *f = fopen(h->path, "w");
    return fwrite((void *)p, 4096, 1, f) != 1 || fclose(f) != 0;
}
int cuIpcOpenMemHandle_v2(unsigned long long *p, struct handle h, unsigned flags)
{
    FILE *f = fopen(h.path, "r");
    *p = (unsigned long long)malloc(4096);
    return !f || fread((void *)*p, 4096, 1, f) != 1 || flags != 1;
}
int cuIpcCloseMemHandle(unsigned long long p) { free((void *)p); return 0; }
`

// fakeControl is an MPS control program whose server 7 has the fake library's contexts as clients.
const fakeControl = `#!/bin/sh
if [ "$1" = -f ]; then until [ -e quit ]; do sleep 0.02; done; exit; fi
read -r command
case $command in
get_default*) echo 100.0;;
get_server_list) echo 7;;
get_client_list*7) ls clients;;
quit) : >quit;;
esac
`

// The programs in several containers must do what the report says of them.
func TestProgramsOfSeveralContainers(t *testing.T) {
	build := t.TempDir()
	for name, text := range map[string]string{"cuda.c": fakeCUDA, "nvml.c": fakeNVML, mpsControl: fakeControl} {
		if err := os.WriteFile(filepath.Join(build, name), []byte(text), 0o700); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	source, err := filepath.Abs("cudacheck/cudacheck.c")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/bin/sh", "-ec", `gcc -std=gnu11 -o cudacheck "$1" -ldl
		gcc -shared -fPIC -o libcuda.so.1 cuda.c
		gcc -shared -fPIC -o libnvidia-ml.so.1 nvml.c`, "sh", source)
	cmd.Dir = build
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	const computed = `"driverVersion":13000,"devices":1,"uuid":"GPU-00000000-0000-0000-0000-000000000000","correct":1024,"wrong":0}`
	const done = `{"step":"done","error":0,` + computed
	const read = `{"step":"done","error":0,"driverVersion":0,"devices":0,"uuid":"","correct":1024,"wrong":0}`
	daemon := func(clients int) string {
		const form = `{"step":"","error":0,"freeMiB":9999,"started":true,"servers":1,"clients":%d,"allocated":0,"refused":0,"ended":true}`
		return fmt.Sprintf(form, clients)
	}
	for name, x := range map[string]struct {
		roles, want []string
	}{
		"two clients": {[]string{mpsDaemon, mpsClient, mpsClient}, []string{daemon(2), done, done}},
		"many clients": {[]string{mpsDaemon, mpsMany}, []string{
			daemon(5), `{"step":"cuDevicePrimaryCtxRetain","error":808,"clients":5,"freeMiB":9999}`,
		}},
		"a fault": {[]string{mpsDaemon, mpsNeighbour, mpsFaulty}, []string{
			"", `{"step":"cuCtxSynchronize","error":700,` + computed + "\n" + `{"refusedMillis":200,"served":true}`,
			`{"step":"cuCtxSynchronize","error":700,`,
		}},
		"IPC": {[]string{ipcExport, ipcImport}, []string{strings.Replace(read, "1024", "0", 1), read}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			folder := t.TempDir()
			if err := os.Mkdir(filepath.Join(folder, "clients"), 0o700); err != nil {
				t.Fatal(err)
			}
			got := make([]string, len(x.roles))
			run := func(i int) {
				cmd := exec.Command(filepath.Join(build, "cudacheck"), x.roles[i]) //nolint:gosec // our own
				cmd.Dir, cmd.Env = folder, []string{"FREE_MIB=9999", "LD_LIBRARY_PATH=" + build, "PATH=" + build + ":/usr/bin:/bin"}
				out, err := cmd.CombinedOutput()
				if got[i] = string(out); err != nil {
					t.Errorf("%s: %v", x.roles[i], err)
				}
			}
			var first, others sync.WaitGroup
			first.Go(func() { run(0) })
			for i := 1; i < len(x.roles); i++ {
				others.Go(func() { run(i) })
			}
			others.Wait()
			if err := os.WriteFile(filepath.Join(folder, "end"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			first.Wait()
			for i, want := range x.want {
				if !strings.HasPrefix(got[i], want) {
					t.Errorf("%s: %s, want %s", x.roles[i], got[i], want)
				}
			}
		})
	}
}

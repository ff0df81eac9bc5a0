package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

func TestOnlyReadingProgramsMayRun(t *testing.T) {
	for _, call := range []struct {
		program string
		args    []string
		ok      bool
	}{
		{nvidiaSMI, nil, true},
		{nvidiaSMI, []string{"-L"}, true},
		{nvidiaSMI, []string{"compute-policy", "--list"}, true},
		{nvidiaSMI, []string{"compute-policy", "--set-timeslice=1"}, false},
		{nvidiaSMI, []string{"-r"}, false},
		{nvidiaSMI, []string{"-mig", "1"}, false},
		{nvidiaSMI, []string{"-L", "-pm", "1"}, false},
		{nvidiaSMI, []string{"mig", "-cgi", "19"}, false},
		{plugin, []string{"inventory", "-o", "cdi"}, true},
		{plugin, []string{"version"}, true},
		{plugin, []string{"watch"}, true},
		{plugin, []string{"watch", "more"}, false},
		{plugin, []string{"partition"}, false}, // it changes MIG layouts
		{cudaCheck, nil, true},
		{cudaCheck, []string{mpsArgument}, true},
		{cudaCheck, []string{"more"}, false},
		{cudaCheck, []string{"fault"}, false}, // it makes an XID
		{cudaCheck, []string{mpsMany}, true},
		{cudaCheck, []string{mpsMany, mpsMany}, false},
		{itself, []string{stageLook, kernelParameters}, true},
		{itself, []string{stageLook, "/proc/sysrq-trigger"}, false}, // it opens files for writing
		{nvidiaCTK, []string{"cdi", "generate", "--format=json"}, true},
		{nvidiaCTK, []string{"cdi", "generate", "--output=/etc/cdi/nvidia.yaml"}, false},
		{nvidiaCTK, []string{"system", "create-dev-char-symlinks", "--create-all"}, false},
		{plugin, nil, false}, // without arguments the plugin would serve the node
		{plugin, []string{"uninstall"}, false},
		{conformance, []string{"-lib", "/x", "-test.v"}, true},
		{conformance, []string{"-test.v"}, false},
		{conformance, []string{"-lib", ""}, false},
		{runc, []string{"--root", "/x", "run", "id"}, true},
		{runc, []string{"exec", "id"}, false},
		{"nvidia-modprobe", nil, false},
		{"sh", []string{"-c", "true"}, false},
	} {
		if err := checkPermitted(call.program, call.args); (err == nil) != call.ok {
			t.Errorf("%s %v: %v", call.program, call.args, err)
		}
		if call.ok {
			continue
		}
		result := (programs{dir: t.TempDir()}).run(t.Context(), call.program, call.args...)
		if result.err == nil || !strings.Contains(result.err.Error(), "may run") {
			t.Errorf("%s %v was started: %v", call.program, call.args, result.err)
		}
	}
}

// The test starts its own binary as a child. The child drops its capabilities and prints what it
// still has, and the test expects none, or CAP_SYS_ADMIN alone.
func TestDriverProgramsHaveNoCapabilities(t *testing.T) {
	const none, sysAdmin = "0000000000000000", "0000000000200000"
	show := []string{"/bin/cat", "/proc/self/status"}
	switch os.Getenv("HWCHECK_TEST_STAGE") {
	case none:
		t.Fatal(execWithoutCapabilities(show))
	case sysAdmin:
		t.Fatal(execWithoutCapabilities(show, unix.CAP_SYS_ADMIN))
	}
	for _, has := range []string{none, sysAdmin} {
		if has == sysAdmin && !hasSysAdmin() {
			t.Log("this process lacks CAP_SYS_ADMIN, so it cannot test the stage that keeps it")
			continue
		}
		cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), "HWCHECK_TEST_STAGE="+has)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		want := map[string]string{"CapInh": none, "CapPrm": has, "CapEff": has, "CapAmb": none, "NoNewPrivs": "1"}
		if os.Geteuid() == 0 {
			want["CapBnd"] = has // root could regain capabilities from the bounding set
		}
		for name, value := range want {
			if !strings.Contains(string(out), name+":\t"+value+"\n") {
				t.Errorf("%s is not %s:\n%s", name, value, out)
			}
		}
	}
}

func TestOnlyGettersRunWithSysAdmin(t *testing.T) {
	if !callsOnlyGetters([]string{"-lib", "/x", "-getters", "/y"}) {
		t.Error("the getters are refused")
	}
	for _, argv := range [][]string{
		nil,
		{"/x/" + conformance},
		{"/x/" + conformance, "-lib", "/x"},
		{"/x/" + conformance, "-lib", "/x", "-getters", ""},
		{"/x/" + conformance, "-lib", "/x", "-getters", "/y", "-test.v"},
		{"/x/" + plugin, "inventory"},
		{"/bin/true", "-lib", "/x", "-getters", "/y"},
	} {
		if err := execWithSysAdmin(argv); err == nil || !strings.Contains(err.Error(), "not the getters") {
			t.Errorf("%v was started: %v", argv, err)
		}
	}
}

func TestLaterGLIBCVersionIsFound(t *testing.T) {
	for _, x := range []struct{ version, symbol, want string }{
		{"", "GLIBC_2.2.5", "2.2.5"},
		{"2.4", "GLIBC_2.34", "2.34"},
		{"2.34", "GLIBC_2.4", "2.34"},
		{"2.34", "GLIBC_2.34", "2.34"},
		{"2.34", "GLIBC_PRIVATE", "2.34"},
		{"2.34", "GCC_3.0", "2.34"},
		{"", "CXXABI_1.3", ""},
	} {
		if got := laterGLIBC(x.version, x.symbol); got != x.want {
			t.Errorf("%q and %q: %q, want %q", x.version, x.symbol, got, x.want)
		}
	}
}

func TestDifferentAnswersAreListed(t *testing.T) {
	found := &facts.Getters{
		Privileged:   facts.Answers{"a": {Value: "1"}, "b": {Value: "2"}},
		Unprivileged: facts.Answers{"a": {Value: "1"}, "b": {Error: facts.NoPermission}},
	}
	want := []string{`b: "2" with CAP_SYS_ADMIN, "no permission" without`}
	if got := differentAnswers(found); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestInstanceNodesAreRecognized(t *testing.T) {
	for node, want := range map[string]bool{
		"nvidiactl": false, "nvidia0": false, "nvidia-caps/nvidia-cap1": false, "nvidia-caps/nvidia-cap2": false,
		"nvidia-caps/nvidia-cap3": true, "nvidia-caps/nvidia-cap21": true,
	} {
		if instanceNode.MatchString(node) != want {
			t.Errorf("%s: %t, want %t", node, !want, want)
		}
	}
}

// A GPU that does not answer is a failure, and one without events a difference. The watcher process
// of this test sends no more, so nothing waits.
func TestWatcherVerdicts(t *testing.T) {
	for _, x := range []struct {
		name     string
		answered []string
		events   bool
		want     facts.Verdict
	}{
		{"all answer and deliver events", []string{"a", "b"}, true, facts.Agreed},
		{"no events", []string{"a", "b"}, false, facts.Differed},
		{"one does not answer", []string{"a"}, true, facts.Failed},
	} {
		t.Run(x.name, func(t *testing.T) {
			s := &visit{progress: io.Discard}
			s.report.Machine.PCI = []facts.PCIFunction{{Driver: "nvidia"}, {Driver: "vfio-pci"}, {Driver: "nvidia"}}
			w := &watcherProcess{began: time.Now(), up: time.Now(), events: x.events, changed: make(chan struct{}), answered: map[string]bool{}}
			close(w.changed)
			for _, address := range x.answered {
				w.answered[address] = true
			}
			usable := s.judgeAttach(t.Context(), x.name, w, &facts.Watcher{})
			if got := s.report.Checks; usable != (x.want != facts.Failed) || len(got) != 1 || got[0].Verdict != x.want {
				t.Errorf("usable %t, %+v, want %s", usable, got, x.want)
			}
		})
	}
}

// Each result of the CUDA program must get the verdict that it proves.
func TestCUDAVerdicts(t *testing.T) {
	given := offer{name: "gpu", uuid: "GPU-11"}
	right := facts.CUDAResult{Step: "done", Devices: 1, UUID: "GPU-11", Correct: cudaValues}
	none := facts.CUDAResult{Step: "cuInit", Error: cudaNoDevice}
	other, wrong, two := right, right, right
	other.UUID, wrong.Wrong, two.Devices = "GPU-22", 1, 2
	for _, x := range []struct {
		name          string
		result        facts.CUDAResult
		way           way
		simulated     bool
		with, without facts.Verdict
	}{
		{"it computes", right, byRunc, false, facts.Agreed, facts.Differed},
		{"there is no GPU", none, byRunc, false, facts.Failed, facts.Agreed},
		{"it is another GPU", other, byRunc, false, facts.Differed, facts.Differed},
		{"a value is wrong", wrong, byRunc, false, facts.Differed, facts.Differed},
		{"there is one GPU more", two, byRunc, false, facts.Differed, facts.Differed},
		{"it computes in a chroot", right, inNamespace, false, facts.NotProven, facts.Differed},
		{"there is no GPU in a chroot", none, inNamespace, false, facts.Failed, facts.NotProven},
		{"it computes without a container", two, onTheMachine, false, facts.NotProven, facts.NotProven},
		{"the library is simulated", none, byRunc, true, facts.NotProven, facts.NotProven},
	} {
		t.Run(x.name, func(t *testing.T) {
			s := &visit{progress: io.Discard}
			s.report.Driver = &facts.Driver{Simulated: x.simulated}
			c := &containers{way: x.way}
			s.judgeCUDA("with", c, given, x.result)
			s.judgeNoCUDA("without", c, x.result)
			if got := s.report.Checks; got[0].Verdict != x.with || got[1].Verdict != x.without {
				t.Errorf("%+v, want %s and %s", got, x.with, x.without)
			}
		})
	}
}

func TestTimeSliceVerdicts(t *testing.T) {
	const row = "|   0   Timeslice       Default       |\n"
	failed := exec.Command("/bin/false").Run()
	for _, x := range []struct {
		name   string
		result outcome
		way    way
		want   facts.Verdict
	}{
		{"one row", outcome{stdout: "| GPU     Name            Value         |\n" + row}, byRunc, facts.Agreed},
		{"two rows in a container with one GPU", outcome{stdout: row + row}, byRunc, facts.Differed},
		{"two rows on the machine", outcome{stdout: row + row}, onTheMachine, facts.Agreed},
		{"no row", outcome{}, onTheMachine, facts.Differed},
		{"an unknown value", outcome{stdout: "| 0 Timeslice Enormous |\n"}, byRunc, facts.Differed},
		{"a GPU without time-slices", outcome{stdout: "Failed to get: Not Supported\n", err: failed}, byRunc, facts.Agreed},
		{"an error", outcome{stderr: "Unknown Error\n", err: failed}, byRunc, facts.Failed},
	} {
		t.Run(x.name, func(t *testing.T) {
			s := &visit{progress: io.Discard}
			s.judgeTimeSlice(&containers{way: x.way}, x.result)
			if got := s.report.Checks; len(got) != 1 || got[0].Verdict != x.want {
				t.Errorf("%+v, want %s", got, x.want)
			}
		})
	}
}

// Only a namespace that was refused may lead to the next way. An error of a program that did run
// must not, because the program would run again on the machine itself.
func TestOnlyRefusedNamespaceLeadsToNextWay(t *testing.T) {
	code := func(code string) error { return exec.Command("/bin/sh", "-c", "exit "+code).Run() }
	for _, x := range []struct {
		name string
		o    outcome
		want bool
	}{
		{"success", outcome{started: true}, false},
		{"no process", outcome{err: unix.EPERM}, true},
		{"not entered", outcome{err: code("125"), started: true}, true},
		{"the program failed", outcome{err: code("1"), started: true}, false},
		{"a process holds the output", outcome{err: exec.ErrWaitDelay, started: true}, false},
		{"it ended well after the limit", outcome{err: context.DeadlineExceeded, started: true}, false},
	} {
		if got := notEntered(x.o); got != x.want {
			t.Errorf("%s: %t, want %t", x.name, got, x.want)
		}
	}
}

// A program in a chroot that leaves a process with its output must not run again without a chroot.
func TestProcessThatStaysIsNoRefusal(t *testing.T) {
	t.Parallel() // it waits for seconds
	count := filepath.Join(t.TempDir(), "count")
	c := &containers{
		programs: programs{self: writeScript(t, "hwcheck", "echo $1 >>"+count+"\nsleep 7 &\n")}, work: t.TempDir(),
		specs: &specSet{}, libraries: []string{"/bin/true"}, way: inNamespace,
	}
	result := c.run(t.Context(), guest{host: "/bin/true", inside: filepath.Join("/usr/bin", cudaCheck)}, nil)
	if errors.Is(result.err, unix.EPERM) || !exists(count) {
		t.Skip("no mount namespace here: ", result.err)
	}
	if !errors.Is(result.err, exec.ErrWaitDelay) || c.way != inNamespace || content(count) != stageInNamespace {
		t.Errorf("%v, way %d, started as %q", result.err, c.way, content(count))
	}
}

const (
	// fakeNVML is an NVML whose one GPU has $FREE_MIB free.
	fakeNVML = `#include <stdlib.h>
int nvmlInit_v2(void) { return getenv("FREE_MIB") ? 0 : 9; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int i, void **device) { *device = 0; return i != 0; }
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *m)
{ (void)device; m[0] = ~0ull; m[1] = (atoll(getenv("FREE_MIB")) << 20) + 1; m[2] = 1; return 0; }
`
	// noFork refuses every process, and says which kill was tried.
	noFork = `#include <errno.h>
#include <stdio.h>
int fork(void) { errno = EAGAIN; return -1; }
int kill(int pid, int signal) { fprintf(stderr, "kill %d with %d\n", pid, signal); return 0; }
`
)

func TestRootsOfLibraryFolder(t *testing.T) {
	top := t.TempDir()
	for folder, want := range map[string][]string{
		"odd/place/lib64":            {"odd/place"},
		"odd/usr/local/nvidia/lib64": {"odd/usr/local/nvidia", "odd"},
		"odd/nowhere":                nil,
	} {
		path := filepath.Join(top, folder)
		if err := os.MkdirAll(path, 0o755); err != nil { //nolint:gosec // a test's folder
			t.Fatal(err)
		}
		if got := rootsOf(path); got != nil {
			t.Errorf("%s without the library leads to %v", folder, got)
		}
		if err := os.WriteFile(filepath.Join(path, nvmlName), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		got := rootsOf(path)
		for _, root := range want {
			if !slices.Contains(got, filepath.Join(top, root)) {
				t.Errorf("%s leads to %v, want %s among them", folder, got, root)
			}
		}
		if want == nil && got != nil {
			t.Errorf("%s leads to %v", folder, got)
		}
	}
}

// On some machines a script in /usr/bin starts the nvidia-smi of another folder.
func TestScriptInPlaceOfDriverProgramIsFound(t *testing.T) {
	program, other := filepath.Join(t.TempDir(), nvidiaSMI), filepath.Join(t.TempDir(), "other")
	specs := fmt.Sprintf(`{"containerEdits": {"mounts": [{"hostPath": %q}, {"hostPath": %q}]}} {}`, other, program)
	if err := os.WriteFile(other, []byte("#!/bin/sh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]string{"": "", "#": "", "\x7fELF": "", "#!/bin/sh\n": program} {
		if err := os.WriteFile(program, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := scriptIn(specs); got != want {
			t.Errorf("with %q: %q, want %q", text, got, want)
		}
	}
}

// The report promises not to name processes.
func TestReportHasNoProcesses(t *testing.T) {
	const table = "NAME\ngpu\n\nOpen in other processes:\n  gpu: python (process 7)\n\nNot checked here:\n  x\n"
	if got, want := withoutProcesses(table), "NAME\ngpu\n\nNot checked here:\n  x\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := withoutProcesses("NAME\n"); got != "NAME\n" {
		t.Errorf("%q", got)
	}
}

func TestMissingFilesAreReadFromTheTable(t *testing.T) {
	const table = "NAME\ngpu\n\nLeft out:\n  a: not found\n  b: refused\n\nNot checked here:\n  x\n"
	if got := listBelow(table, "Left out"); !slices.Equal(got, []string{"a: not found", "b: refused"}) {
		t.Errorf("%q", got)
	}
	if got := listBelow("NAME\n", "Left out"); got != nil {
		t.Errorf("%q", got)
	}
}

func TestWatcherHasThePluginsMark(t *testing.T) {
	if childMark != nvidia.ChildMark {
		t.Errorf("%q, and the plugin's is %q", childMark, nvidia.ChildMark)
	}
}

func TestDriverIsFoundByLinkerCacheAndMounts(t *testing.T) {
	folder := t.TempDir()
	cache := filepath.Join(folder, "ld.so.cache")
	table := filepath.Join(folder, "mounts")
	content := "glibc-ld.so.cache1.1\x02\x00\x00libnvidia-ml.so.1\x00" +
		"/odd/lib64/libnvidia-ml.so.1\x00/odd/lib64/libc.so.6\x00"
	if err := os.WriteFile(cache, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	content = "proc /proc proc rw 0 0\ntmpfs /mnt/nvidia-driver tmpfs ro 0 0\n" +
		"/dev/x /lib/y/libnvidia-ml.so.1 ext4 ro 0 0\nshort\n"
	if err := os.WriteFile(table, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := cachedFolders(cache); !slices.Equal(got, []string{"/odd/lib64"}) {
		t.Errorf("the cache leads to %v", got)
	}
	got := mountedFolders(table)
	for _, want := range []string{"/mnt/nvidia-driver/lib64", "/lib/y"} {
		if !slices.Contains(got, want) {
			t.Errorf("the mounts have %v, want %s among them", got, want)
		}
	}
	if cachedFolders(folder+"/none") != nil || mountedFolders(folder+"/none") != nil {
		t.Error("a missing file has folders")
	}
}

func TestWorstVerdictCounts(t *testing.T) {
	for _, x := range []struct {
		verdicts []facts.Verdict
		want     int
	}{
		{nil, exitNotProven},
		{[]facts.Verdict{facts.Agreed, facts.Agreed}, exitAgreed},
		{[]facts.Verdict{facts.NotProven, facts.Agreed}, exitNotProven},
		{[]facts.Verdict{facts.NotProven, facts.Differed}, exitDiffered},
		{[]facts.Verdict{facts.Failed, facts.NotProven}, exitDiffered},
		{[]facts.Verdict{"unheard of"}, exitDiffered},
	} {
		var checks []facts.Check
		for _, v := range x.verdicts {
			checks = append(checks, facts.Check{Verdict: v})
		}
		if got := verdict(checks); got != x.want {
			t.Errorf("%v: %d, want %d", x.verdicts, got, x.want)
		}
	}
}

func TestInvalidSpecsAreRefused(t *testing.T) {
	for name, text := range map[string]string{
		"nothing": "", "prose": "There is no GPU",
		"one spec":   `{"cdiVersion":"0.5.0","kind":"a.b/c","devices":[{"name":"x","containerEdits":{"env":["A=b"]}}]}`,
		"a bad kind": `{"cdiVersion":"0.5.0","kind":"nonsense","devices":[]}{"cdiVersion":"0.5.0","kind":"a.b/c","devices":[]}`,
		"a third":    `{}{}{}`,
	} {
		if _, err := readSpecs(text, t.TempDir()); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
}

func TestInvalidArgumentsAreRefused(t *testing.T) {
	for _, args := range [][]string{{"--nonsense"}, {"argument"}, {"--scans=0"}, {"--limit=30s"}} {
		var out, errOut strings.Builder
		if code := run(t.Context(), args, &out, &errOut); code != exitUsage || errOut.Len() == 0 {
			t.Errorf("%v: %d, %s", args, code, errOut.String())
		}
	}
}

func TestContainerGetsOnlyItsDevices(t *testing.T) {
	config := configuration("id", []string{"/usr/bin/nvidia-smi"})
	c := config.Process.Capabilities
	if len(c.Bounding)+len(c.Effective)+len(c.Permitted)+len(c.Inheritable)+len(c.Ambient) != 0 || !config.Process.NoNewPrivileges {
		t.Errorf("capabilities %+v, no new privileges: %v", c, config.Process.NoNewPrivileges)
	}
	if rules := config.Linux.Resources.Devices; len(rules) != 1 || rules[0].Allow || rules[0].Access != "rwm" || rules[0].Type != "" {
		t.Errorf("device cgroup: %+v", rules)
	}
}

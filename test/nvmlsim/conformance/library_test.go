package conformance

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/exports"
)

func exportedNames(t *testing.T) []string {
	t.Helper()
	file, err := elf.Open(simulated)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	symbols, err := file.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, symbol := range symbols {
		if symbol.Section != elf.SHN_UNDEF {
			names = append(names, symbol.Name)
		}
	}
	slices.Sort(names)
	return names
}

// go-nvml looks a function up when it is called, and a missing function kills the process. So the
// library must export every function in exports.txt and every function in the nvml.h of go-nvml.
func TestEveryNVMLNameExists(t *testing.T) {
	needSimulator(t)
	wanted := exports.Names()
	module, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		t.Fatal(err)
	}
	header, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(module)), "pkg/nvml/nvml.h"))
	if err != nil {
		t.Fatal(err)
	}
	for _, match := range regexp.MustCompile(`DECLDIR\s+(nvml\w+)\s*\(`).FindAllStringSubmatch(string(header), -1) {
		wanted = append(wanted, match[1])
	}
	if len(wanted) < 800 {
		t.Fatalf("only %d names found in the list and the header", len(wanted))
	}
	exported := exportedNames(t)
	for _, name := range wanted {
		if _, found := slices.BinarySearch(exported, name); !found {
			t.Errorf("%s is not exported", name)
		}
	}
	for _, name := range exported {
		if !strings.HasPrefix(name, "nvml") {
			t.Errorf("%s is exported, and is no name of NVML", name)
		}
	}
}

func TestLibrarySONAME(t *testing.T) {
	needSimulator(t)
	file, err := elf.Open(simulated)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	names, err := file.DynString(elf.DT_SONAME)
	if err != nil || len(names) != 1 || names[0] != "libnvidia-ml.so.1" {
		t.Errorf("SONAME %v (%v)", names, err)
	}
}

// raceDetector is true if the tests were built with -race.
var raceDetector bool

// The whole suite must also pass with a library that was built with AddressSanitizer and
// UndefinedBehaviorSanitizer.
func TestSuitePassesSanitized(t *testing.T) {
	needSimulator(t)
	if os.Getenv("NVMLSIM_LIB") != "" {
		t.Skip("this is the sanitized run, or one with a library of the caller's")
	}
	if raceDetector {
		t.Skip("the race detector and AddressSanitizer cannot share a process: run the tests without -race too")
	}
	if out, err := exec.Command("make", "-s", "-C", "..", "sanitized").CombinedOutput(); err != nil {
		t.Fatalf("build the sanitized library: %v\n%s", err, out)
	}
	library, err := filepath.Abs("../../../build/nvmlsim/sanitized/libnvidia-ml.so.1")
	if err != nil {
		t.Fatal(err)
	}
	var preload []string
	for _, name := range []string{"libasan.so", "libubsan.so"} {
		path, err := exec.Command("gcc", "-print-file-name="+name).Output()
		if err != nil {
			t.Fatal(err)
		}
		preload = append(preload, strings.TrimSpace(string(path)))
	}
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), "NVMLSIM_LIB="+library, "LD_PRELOAD="+strings.Join(preload, " "),
		// Leak detection is off, because memory that Go allocates would look like a leak.
		"ASAN_OPTIONS=detect_leaks=0:abort_on_error=1", "UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1")
	if out, err := command.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

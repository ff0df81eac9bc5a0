package golden

import (
	"bytes"
	"flag"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nodeharness"
)

const (
	nodeName = "node-1"
	// seed is what the simulator derives the UUIDs from.
	seed = "golden"
	// diffLines is how many lines of a diff an error shows at most.
	diffLines = 60
)

var update = flag.Bool("update", false, "write the golden files instead of comparing with them")

func TestMain(m *testing.M) { os.Exit(nodeharness.Main(m, nil)) }

// repository returns the root of the source tree, whatever the current directory is.
func repository() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "..", "..")
}

// files are the golden files of one test, which are all below the folder dir. seen has those that
// the test has compared so far.
type files struct {
	dir  string
	lock sync.Mutex
	seen map[string]bool
}

// newFiles returns the golden files below the folder dir of testdata. At the end of the test,
// checkLeftovers fails it for each of these files that was not compared.
func newFiles(t *testing.T, dir string) *files {
	t.Helper()
	f := &files{dir: filepath.Join(repository(), "test", "golden", "testdata", dir), seen: map[string]bool{}}
	t.Cleanup(func() { f.checkLeftovers(t) })
	return f
}

// check fails the test if got differs from the golden file with this name. With -update it writes
// got to the file instead.
func (f *files) check(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join(f.dir, name)
	f.lock.Lock()
	f.seen[path] = true
	f.lock.Unlock()
	want, err := os.ReadFile(path)
	switch {
	case err == nil && bytes.Equal(want, got):
	case *update:
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	case err != nil:
		t.Errorf("%v: record it with `make golden`", err)
	default:
		diff := strings.Split(cmp.Diff(strings.Split(string(want), "\n"), strings.Split(string(got), "\n")), "\n")
		if len(diff) > diffLines {
			diff = append(diff[:diffLines], "…")
		}
		t.Errorf("%s differs (-want +got). If that is intended, record it with `make golden`.\n%s",
			path, strings.Join(diff, "\n"))
	}
}

// checkLeftovers fails the test for each golden file that was not compared, or removes the file
// with -update. It does nothing if the test failed, was skipped or ran with -run, because then
// cases may be missing.
func (f *files) checkLeftovers(t *testing.T) {
	t.Helper()
	if t.Failed() || t.Skipped() || flag.Lookup("test.run").Value.String() != "" {
		return
	}
	err := filepath.WalkDir(f.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || f.seen[path] {
			return err
		}
		if *update {
			return os.Remove(path)
		}
		t.Errorf("no case makes %s any more: remove it with `make golden`", path)
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// needSimulator builds the simulated NVML library. It skips the test without root.
func needSimulator(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with the driver's numbers")
	}
	simulator := filepath.Join(repository(), "test", "nvmlsim")
	if out, err := exec.CommandContext(t.Context(), "make", "-s", "-C", simulator, "library").CombinedOutput(); err != nil {
		t.Fatalf("build the simulated library: %v\n%s", err, out)
	}
}

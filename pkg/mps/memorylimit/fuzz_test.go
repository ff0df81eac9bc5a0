package memorylimit

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// For any output of nvidia-smi, hardLimit returns a number that is in the output, or an error.
func FuzzHardLimit(f *testing.F) {
	for _, out := range []string{"hard limit: 8192 MiB\n", "", "hard limit: 8 GiB", "Hard Limit:1 MiB",
		"hard limit: -1 MiB", "hard limit: 99999999999999999999 MiB", "hard limit:\nhard limit: 1 MiB"} {
		f.Add(out)
	}
	f.Fuzz(func(t *testing.T, out string) {
		if n, err := hardLimit(out); err == nil && !strings.Contains(out, strings.TrimLeft(strconv.FormatUint(n, 10), "0")) {
			t.Errorf("%q is %d MiB", out, n)
		}
	})
}

// For any content of /proc/PID/cgroup, the control group to limit is below the root group, never
// the root group itself.
func FuzzControlGroup(f *testing.F) {
	for _, text := range []string{"0::/kubepods/pod1/c1\n", "", "0::/", "0::/../../etc", "0::a", "12:memory:/x\n0::/y\n", "0::/ \x00"} {
		f.Add([]byte(text))
	}
	proc := f.TempDir()
	if err := os.Mkdir(filepath.Join(proc, "7"), 0o700); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(filepath.Join(proc, "7", "cgroup"), text, 0o600); err != nil {
			t.Fatal(err)
		}
		group, err := Limit{Cgroups: "/cg"}.group(proc, 7)
		if err == nil && (!strings.HasPrefix(group, "/cg/") || group != filepath.Clean(group)) {
			t.Errorf("%q is group %s", text, group)
		}
	})
}

// Whatever the runtime passes as a container's state, the hook reads it without a panic, and fails
// on a host without nvidia-smi.
func FuzzState(f *testing.F) {
	f.Add([]byte(`{"id":"c1","pid":1}`))
	f.Add([]byte(`{"id":[]}`))
	root := f.TempDir()
	f.Fuzz(func(t *testing.T, state []byte) {
		if err := (Limit{DriverRoot: root, Cgroups: "/cg"}).Hook(t.Context(), bytes.NewReader(state)); err == nil {
			t.Errorf("%q is accepted", state)
		}
	})
}

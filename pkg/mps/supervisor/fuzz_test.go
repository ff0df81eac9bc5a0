package supervisor

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// The files in /proc must be parsed correctly whatever a process writes into them: any process may
// have a name with parentheses, blanks and newlines.
func FuzzProcessFiles(f *testing.F) {
	fields := " S 1 1 1 0 -1 4194560" + strings.Repeat(" 0", 12) + " 12345" + strings.Repeat(" 0", 30)
	for _, text := range []string{"1 (x)" + fields, "1 (x) Z (y) S)" + fields, "1 (x" + fields, ")", "", "1 (x) S", ")(",
		"1 (\n)" + strings.ReplaceAll(fields, "12345", "-1"), "1 (nvidia-cuda-mps)" + fields} {
		f.Add([]byte(text))
	}
	proc := f.TempDir()
	if err := os.Mkdir(filepath.Join(proc, "7"), 0o700); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(filepath.Join(proc, "7", "stat"), text, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := readStat(proc, 7); err == nil && len(strings.Fields(string(text))) < 20 {
			t.Errorf("%q is accepted without the field with the start time", text)
		}
		if (processSet{runRecord{1, "12345"}, proc}).contains(7) && !strings.Contains(string(text), "(nvidia-cuda-mps)") {
			t.Errorf("a process with stat %q counts as the daemon's", text)
		}
	})
}

// Whatever the control daemon answers, limitMatches accepts only an answer with the limit itself or
// the limit rounded down to GiB.
func FuzzLimitAnswer(f *testing.F) {
	for _, answer := range []string{"", "G", "M", "1G", "1500M", "-1M", "1G M", "18446744073709551616M", " 1M", "0x1M", "1_0M"} {
		f.Add(answer, uint64(1500))
	}
	f.Fuzz(func(t *testing.T, answer string, limit uint64) {
		if !limitMatches(answer, limit) {
			return
		}
		number, err := strconv.ParseUint(strings.TrimRight(answer, "GM"), 10, 64)
		if err != nil || number != limit && number != limit/1024 {
			t.Errorf("%q matches %d MiB", answer, limit)
		}
	})
}

// Whatever spec.json holds, readSpec returns a valid daemon or an error.
func FuzzDaemonOnDisk(f *testing.F) {
	for _, text := range []string{"", "{}", "null", "[]", `{"id":"a","devices":["GPU-0"]}`,
		`{"id":"../b","devices":["GPU-0"]}`,
		`{"bootID":"boot","daemon":{"id":"a","devices":["GPU-0"],"memoryLimits":{"0":1}}}`,
		`{"bootID":"boot","daemon":{"id":"b","devices":["GPU-0"]}}`} {
		f.Add([]byte(text))
	}
	d := directories{paths: mps.Paths{PluginDir: f.TempDir()}}
	if err := os.MkdirAll(d.paths.Dir("a"), 0o700); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(filepath.Join(d.paths.Dir("a"), specFile), text, 0o600); err != nil {
			t.Fatal(err)
		}
		if daemon, err := d.readSpec("boot", "a"); err == nil && (daemon.ID != "a" || daemon.Validate() != nil) {
			t.Errorf("%q is parsed as %+v", text, daemon)
		}
	})
}

package main

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// asPlugin is an environment variable. If it is set, the test binary runs as the plugin, so that a
// test can check the exit code.
const asPlugin = "GPU_KUBELET_PLUGIN_TEST_AS_PLUGIN"

// serveAndFail starts the plugin on a fake node with a GPU, and fails the test if the plugin
// succeeds. It returns the last line of the plugin's output and its exit code.
func serveAndFail(t *testing.T, environ []string, args ...string) (lastLine string, code int) {
	t.Helper()
	lines, code := outputOfFailure(t, environ, args...)
	return lines[len(lines)-1], code
}

func outputOfFailure(t *testing.T, environ []string, args ...string) (lines []string, code int) {
	t.Helper()
	root := t.TempDir()
	pciDevice(t, root, "0000:1b:00.0", "0x10de", "0x030200")
	registry := filepath.Join(root, "plugins_registry")
	if err := os.Mkdir(registry, 0o750); err != nil {
		t.Fatal(err)
	}
	args = append([]string{
		"--node-name=n", "--http-address=127.0.0.1:0", "--sysfs-root=" + filepath.Join(root, "sys"),
		"--plugin-dir=" + filepath.Join(root, "plugin"),
		"--cdi-root=" + filepath.Join(root, "cdi"), "--registrar-dir=" + registry,
	}, args...)
	child := exec.CommandContext(t.Context(), os.Args[0], args...)
	child.Env = append(append(os.Environ(), asPlugin+"=1"), environ...)
	child.WaitDelay = time.Second
	out, err := child.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		t.Fatalf("the plugin did not fail: %v\n%s", err, out)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n"), exit.ExitCode()
}

func TestLogCanBeJSON(t *testing.T) {
	lines, _ := outputOfFailure(t, nil, "--logging-format=json", "--v=4", "--cdi-root=/proc/cdi")
	log := lines[:len(lines)-1] // the last line is the error
	if len(log) == 0 {
		t.Fatalf("nothing was logged before %q", lines)
	}
	for _, line := range log {
		var entry struct{ Time, Level, Msg string }
		if err := json.Unmarshal([]byte(line), &entry); err != nil || entry.Time == "" || entry.Level == "" || entry.Msg == "" {
			t.Errorf("%s: %v", line, err)
		}
	}
}

func TestStartFailsWithOneClearError(t *testing.T) {
	dir := t.TempDir()
	file := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	inTheWay := file("file", "")
	everyones, link := filepath.Join(dir, "everyones"), filepath.Join(dir, "link")
	if err := errors.Join(os.Mkdir(everyones, 0o750), os.Chmod(everyones, 0o777), os.Symlink(t.TempDir(), link)); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		environ, args []string
		code          int
		says          []string
	}{
		"an unknown key in the file": {nil, []string{"--config", file("typo.yaml", "driverRot: /\n")}, exitUsage,
			[]string{"typo.yaml", `unknown key "driverRot"`}},
		"a bad value in the file": {nil, []string{"--config", file("value.yaml", "kubeApiQps: many\n")}, exitUsage,
			[]string{"value.yaml", "kubeApiQps", "many"}},
		"a file that is no YAML": {nil, []string{"--config", file("broken.yaml", "{")}, exitUsage, []string{"broken.yaml"}},
		"a file that is not there": {nil, []string{"--config", filepath.Join(dir, "absent")}, exitUsage,
			[]string{"configuration file", "absent"}},
		"a sysfs that is not there": {nil, []string{"--sysfs-root=" + filepath.Join(dir, "no-sysfs")}, exitFailed,
			[]string{"--sysfs-root", "no-sysfs"}},
		"an unknown flag":           {nil, []string{"--driver-rot=/"}, exitUsage, []string{"--driver-rot"}},
		"a bad value of a flag":     {nil, []string{"--kube-api-burst=0"}, exitUsage, []string{"--kube-api-burst", "below 1"}},
		"a bad value of a variable": {[]string{"GPU_DRA_KUBE_API_BURST=some"}, nil, exitUsage, []string{"GPU_DRA_KUBE_API_BURST", "some"}},
		"no node":                   {nil, []string{"--node-name="}, exitUsage, []string{"--node-name", "required"}},
		"a plugin dir below a file": {nil, []string{"--plugin-dir=" + inTheWay}, exitFailed, []string{"--plugin-dir", inTheWay,
			"not a directory"}},
		"a plugin dir in procfs": {nil, []string{"--plugin-dir=/proc/gpu"}, exitFailed, []string{"--plugin-dir", "/proc/gpu"}},
		"a CDI root in procfs":   {nil, []string{"--cdi-root=/proc/cdi"}, exitFailed, []string{"--cdi-root", "/proc/cdi"}},
		"a read-only CDI root": {nil, []string{"--cdi-root=/proc/sys"}, exitFailed, []string{"--cdi-root",
			"/proc/sys is not writable"}},
		"a world-writable plugin dir": {nil, []string{"--plugin-dir=" + everyones}, exitFailed, []string{"--plugin-dir",
			"refusing " + everyones, "others may write", "chmod go-w"}},
		"a world-writable CDI root": {nil, []string{"--cdi-root=" + everyones}, exitFailed, []string{"--cdi-root",
			"refusing " + everyones, "others may write", "chmod go-w"}},
		"a CDI root that is a link": {nil, []string{"--cdi-root=" + link}, exitFailed, []string{"--cdi-root",
			"refusing " + link, "symbolic link"}},
		"no kubelet": {nil, []string{"--registrar-dir=" + filepath.Join(dir, "elsewhere")}, exitFailed,
			[]string{"--registrar-dir", "another kubelet root directory"}},
		"a file instead of a registry": {nil, []string{"--registrar-dir=" + inTheWay}, exitFailed, []string{"--registrar-dir",
			inTheWay, "not a directory"}},
		"an address of another machine": {nil, []string{"--http-address=192.0.2.1:1"}, exitFailed, []string{"--http-address", "192.0.2.1:1"}},
		"no such kubeconfig": {nil, []string{"--kubeconfig=" + filepath.Join(dir, "absent")}, exitFailed,
			[]string{"--kubeconfig", "absent"}},
	} {
		t.Run(name, func(t *testing.T) {
			line, code := serveAndFail(t, c.environ, c.args...)
			if code != c.code {
				t.Errorf("exit code %d, want %d", code, c.code)
			}
			if !strings.HasPrefix(line, "gpu-kubelet-plugin: ") {
				t.Errorf("the last line is not the error: %q", line)
			}
			for _, want := range c.says {
				if !strings.Contains(line, want) {
					t.Errorf("%q does not say %q", line, want)
				}
			}
		})
	}
}

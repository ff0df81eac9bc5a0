package containers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nodeharness"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/smi"
)

func TestMain(m *testing.M) { os.Exit(nodeharness.Main(m, nil)) }

// gpu is the device that the claim has.
const gpu = "gpu-0000-1b-00-0"

// node is a simulated node on which the plugin has prepared a claim.
type node struct {
	specs   *cdilib.Cache
	devices []string
	dev     string // the folder with the driver's device nodes
	smi     string // nvidia-smi, or empty if it cannot be fetched
}

// newNode returns a node whose kubelet's directories only root can enter.
func newNode(t *testing.T) node {
	t.Helper()
	h := nodeharness.New(t, "0000:1b:00.0")
	n := node{dev: filepath.Join(h.Root, "driver", "dev")}
	must(t, os.MkdirAll(filepath.Join(h.Root, "driver", "devices"), 0o755))
	var err error
	if n.smi, err = smi.Fetch(t.Context(), smi.DefaultSuite); errors.Is(err, smi.ErrUnavailable) {
		t.Log("SKIPPED: nvidia-smi is not run in the containers:", err)
		n.smi = ""
	} else if err != nil {
		t.Fatal(err)
	} else {
		must(t, os.MkdirAll(filepath.Join(h.Root, "driver/usr/bin"), 0o755))
		copyFile(t, n.smi, filepath.Join(h.Root, "driver/usr/bin/nvidia-smi"))
	}

	cfg := h.Config()
	cfg.DriverRoot = cfg.DriverRootMount // the runtimes run on this machine
	cfg.HookSource = buildHook(t)
	cfg.MPSHookSource = cfg.HookSource
	open := openDir(t)
	must(t, os.Mkdir(filepath.Join(open, "kubelet"), 0o750))
	cfg.HookPath, cfg.HookDirs = "", []string{filepath.Join(open, "kubelet", "bin"), filepath.Join(open, "lib")}
	must(t, os.MkdirAll(filepath.Join(cfg.ProcRoot, "1"), 0o755))
	must(t, os.Symlink("/", filepath.Join(cfg.ProcRoot, "1", "root")))
	driver.PlaceHooks(t.Context(), cfg)

	api := nodeharness.NewAPI()
	running, err := h.StartWatching(t.Context(), api, cfg)
	must(t, err)
	t.Cleanup(func() {
		if err := running.Stop(); err != nil {
			t.Error(err)
		}
	})
	claim := nodeharness.Claim("one", gpu)
	must(t, api.Allocate(t.Context(), claim))
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for err = running.Prepare(ctx, claim); err != nil; err = running.Prepare(ctx, claim) {
		select {
		case <-ctx.Done():
			t.Fatal(err)
		case <-time.After(100 * time.Millisecond):
		}
	}
	n.devices = []string{cdi.BaseID, cdi.ClaimDeviceID(claim.UID, gpu, nil)}
	n.specs, err = cdilib.NewCache(cdilib.WithSpecDirs(cfg.CDIRoot))
	must(t, err)
	return n
}

// openDir returns a directory that all users can enter, as those in /var/lib. t.TempDir is not.
func openDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "host-") //nolint:usetesting // see above
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	must(t, os.Chmod(dir, 0o755))
	return dir
}

// buildHook builds nvidia-cdi-hook as the image has it.
func buildHook(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "nvidia-cdi-hook")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-tags", "netgo,osusergo", "-ldflags", "-extldflags=-static", "-o", path,
		"github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return path
}

// ociRuntime is an OCI runtime of this machine.
type ociRuntime struct {
	name, path string
	// major and minor are the version of crun.
	major, minor int
}

// findRuntime returns the OCI runtime with this name. It skips the test if this machine has no
// crun.
func findRuntime(t *testing.T, name string) ociRuntime {
	t.Helper()
	r := ociRuntime{name: name}
	var err error
	if name != "crun" {
		r.path, err = cluster.BuildProgram(t.Context(), name, cluster.Options{}, io.Discard)
		must(t, err)
		return r
	}
	if r.path, err = exec.LookPath(name); err != nil {
		t.Skip("SKIPPED: crun is not installed: apt-get install crun")
	}
	out, err := exec.CommandContext(t.Context(), r.path, "--version").Output()
	must(t, err)
	if _, err := fmt.Sscanf(string(out), "crun version %d.%d", &r.major, &r.minor); err != nil {
		t.Fatalf("%v in %q", err, out)
	}
	return r
}

// makesRootReadOnlyEarly reports whether the runtime makes a read-only root read-only before it
// runs the hooks, which write there: crun before 1.26
// (https://github.com/containers/crun/issues/1924).
func (r ociRuntime) makesRootReadOnlyEarly() bool { return r.isCrunBefore(26) }

// needsHooksToRead reports whether the runtime fails if a hook ends without reading its input: crun
// before 1.17 (https://github.com/containers/crun/pull/1553).
func (r ociRuntime) needsHooksToRead() bool { return r.isCrunBefore(17) }

func (r ociRuntime) isCrunBefore(minor int) bool {
	return r.name == "crun" && (r.major < 1 || r.major == 1 && r.minor < minor)
}

// mountsNodes reports whether the runtime mounts device nodes from the host's /dev into a container
// with a user namespace: runc, and crun before 1.8. Otherwise it creates them, and they belong to
// the container's user.
func (r ociRuntime) mountsNodes() bool { return r.name == "runc" || r.isCrunBefore(8) }

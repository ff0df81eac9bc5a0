package sharedmemory

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// A hook runs in the container's mount namespace: the test binary runs itself in one.
func TestMain(m *testing.M) {
	if len(os.Args) == 4 && os.Args[1] == "hook" {
		_ = json.NewEncoder(os.Stdout).Encode(inContainer(os.Args[2], os.Args[3]))
		os.Exit(0) //nolint:forbidigo // this process is the child of a test
	}
	m.Run()
}

// result is what is seen in the container after the hook.
type result struct {
	Changed bool
	Err     string
	Flags   int64
	Seen    []string // in its /dev/shm
}

func inContainer(source, root string) (r result) {
	changed, err := Hook(os.Stdin, source)
	r.Changed = changed
	if err != nil {
		r.Err = err.Error()
	}
	shm := filepath.Join(root, "dev/shm")
	var fs unix.Statfs_t
	if unix.Statfs(shm, &fs) == nil {
		r.Flags = fs.Flags
	}
	entries, _ := os.ReadDir(shm)
	for _, e := range entries {
		r.Seen = append(r.Seen, e.Name())
	}
	return r
}

const sandbox = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

// bundled is a container whose root file system has a /dev/shm with a file of its own in it.
type bundled struct {
	bundle, root, source string
	config               specs.Spec
}

func newContainer(t *testing.T, mounts ...specs.Mount) *bundled {
	t.Helper()
	dir := t.TempDir()
	c := &bundled{bundle: filepath.Join(dir, "bundle"), root: filepath.Join(dir, "bundle", "rootfs"), source: filepath.Join(dir, "shm", "daemon")}
	for _, path := range []string{filepath.Join(c.root, "dev/shm"), c.source} {
		if err := os.MkdirAll(path, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	touch(t, filepath.Join(c.root, "dev/shm/of-the-container"))
	touch(t, filepath.Join(c.source, "of-the-daemon"))
	c.config = specs.Spec{Version: specs.Version, Root: &specs.Root{Path: "rootfs"}, Mounts: mounts}
	return c
}

func touch(t *testing.T, path string) {
	t.Helper()
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

func (c *bundled) hook(t *testing.T) result {
	t.Helper()
	data, err := json.Marshal(c.config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(c.bundle, "config.json"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	state, err := json.Marshal(specs.State{Version: specs.Version, ID: "c1", Status: specs.StateCreating, Pid: 1, Bundle: c.bundle})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe", "hook", c.source, c.root)
	cmd.Stdin = strings.NewReader(string(state))
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	out, err := cmd.Output()
	if os.IsPermission(err) {
		t.Skip("needs the right to make mount namespaces")
	}
	var r result
	if err == nil {
		err = json.Unmarshal(out, &r)
	}
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (r result) sees(name string) bool { return strings.Contains(strings.Join(r.Seen, " "), name) }

func TestTheRuntimesSharedMemoryIsReplaced(t *testing.T) {
	for name, mounts := range map[string][]specs.Mount{
		"none":               nil,
		"OCI's default":      {{Destination: "/dev/shm", Type: "tmpfs", Source: "shm"}},
		"containerd":         {{Destination: "/dev/shm", Type: "bind", Source: "/run/containerd/io.containerd.grpc.v1.cri/sandboxes/" + sandbox + "/shm"}},
		"CRI-O":              {{Destination: "/dev/shm", Type: "bind", Source: "/run/containers/storage/overlay-containers/" + sandbox + "/userdata/shm"}},
		"Docker":             {{Destination: "/dev/shm", Type: "bind", Source: "/var/lib/docker/containers/" + sandbox + "/mounts/shm"}},
		"volumes elsewhere":  {{Destination: "/dev/shm", Type: "tmpfs"}, {Destination: "/data", Type: "bind", Source: "/var/lib/kubelet/pods/x/volumes/v"}},
		"written in its way": {{Destination: "/dev/shm/", Type: "tmpfs"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newContainer(t, mounts...).hook(t)
			if !r.Changed || r.Err != "" || !r.sees("of-the-daemon") || r.sees("of-the-container") {
				t.Errorf("%+v", r)
			}
			if want := int64(unix.ST_NOSUID | unix.ST_NODEV | unix.ST_NOEXEC); r.Flags&want != want {
				t.Errorf("mounted with flags %x", r.Flags)
			}
		})
	}
}

func TestWhatThePodPutThereStays(t *testing.T) {
	for name, mount := range map[string]specs.Mount{
		"an emptyDir in memory": {Destination: "/dev/shm", Type: "bind", Source: "/var/lib/kubelet/pods/2dfc/volumes/kubernetes.io~empty-dir/shm"},
		"a host path":           {Destination: "/dev/shm", Type: "bind", Source: "/scratch/shm"},
		"the host's, hostIPC":   {Destination: "/dev/shm", Type: "bind", Source: "/dev/shm"},
		"over the runtime's":    {Destination: "/dev//shm", Type: "bind", Source: "/data"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newContainer(t, specs.Mount{Destination: "/dev/shm", Type: "tmpfs"}, mount).hook(t)
			if r.Changed || r.Err != "" || !r.sees("of-the-container") {
				t.Errorf("%+v", r)
			}
		})
	}
}

func TestAContainerWithoutDevShmGetsOne(t *testing.T) {
	c := newContainer(t)
	if err := os.RemoveAll(filepath.Join(c.root, "dev/shm")); err != nil {
		t.Fatal(err)
	}
	if r := c.hook(t); !r.Changed || r.Err != "" || !r.sees("of-the-daemon") {
		t.Errorf("%+v", r)
	}
}

// An image may have any links. They lead where they would lead in the container.
func TestLinksOfTheImageDoNotLeadOutOfIt(t *testing.T) {
	c := newContainer(t)
	outside := filepath.Join(filepath.Dir(c.bundle), "outside")
	inside := filepath.Join(c.root, outside)
	for _, dir := range []string{outside, inside} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	shm := filepath.Join(c.root, "dev/shm")
	if err := os.RemoveAll(shm); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../../../../../../../../../../.."+outside, shm); err != nil {
		t.Fatal(err)
	}
	// The test sees "outside" through the link, where the container would see "inside".
	r := c.hook(t)
	if !r.Changed || r.Err != "" || r.sees("of-the-daemon") {
		t.Errorf("%+v", r)
	}
}

func TestHookFailuresNameTheirObject(t *testing.T) {
	good := newContainer(t)
	for name, c := range map[string]struct {
		state  string
		source string
		config string
		want   string
	}{
		"no state":           {"", good.source, "", "container's state"},
		"no JSON":            {"state", good.source, "", "container's state"},
		"no bundle":          {`{"id":"c1"}`, good.source, "", "no bundle"},
		"a relative bundle":  {`{"id":"c1","bundle":"x"}`, good.source, "", "no bundle"},
		"no configuration":   {`{"id":"c1","bundle":"BUNDLE"}`, good.source, "", "open its configuration"},
		"a broken one":       {`{"id":"c1","bundle":"BUNDLE"}`, good.source, "{", "read its configuration"},
		"an empty one":       {`{"id":"c1","bundle":"BUNDLE"}`, good.source, " ", "read its configuration"},
		"one without a root": {`{"id":"c1","bundle":"BUNDLE"}`, good.source, "{}", "names no root"},
		"a root that is not": {`{"id":"c1","bundle":"BUNDLE"}`, good.source, `{"root":{"path":"/nowhere"}}`, "/nowhere"},
		"no daemon":          {`{"id":"c1","bundle":"BUNDLE"}`, "/nowhere/shm", `{"root":{"path":"rootfs"}}`, "was the daemon stopped"},
	} {
		t.Run(name, func(t *testing.T) {
			bundle := t.TempDir()
			if c.config != "" {
				if err := os.WriteFile(filepath.Join(bundle, "config.json"), []byte(c.config), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			changed, err := Hook(strings.NewReader(strings.ReplaceAll(c.state, "BUNDLE", bundle)), c.source)
			if changed || err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, %v: %q is missing", changed, err, c.want)
			}
		})
	}
}

func FuzzHookTakesAnyState(f *testing.F) {
	f.Add([]byte(`{"id":"c1","bundle":"/nowhere"}`))
	f.Add([]byte(`{"bundle":[]}`))
	f.Fuzz(func(t *testing.T, state []byte) {
		if changed, err := Hook(strings.NewReader(string(state)), "/nowhere/shm"); changed || err == nil {
			t.Error("something was mounted", changed, err)
		}
	})
}

// Each claim that a container has brings a hook of its own, and only here they meet.
func TestAContainerOfTwoDaemonsDoesNotStart(t *testing.T) {
	hook := func(source string) specs.Hook {
		return specs.Hook{Path: "/opt/gpu-mps", Args: mps.Edits(mps.Paths{ShmRoot: source}, "/opt/gpu-mps", "a").Hooks[0].Args}
	}
	other := specs.Hook{Path: "/opt/nvidia-cdi-hook", Args: []string{"nvidia-cdi-hook", "update-ldcache", "--source=/x"}}
	c := newContainer(t)
	c.config.Hooks = &specs.Hooks{CreateContainer: []specs.Hook{hook("/one"), hook("/one"), other}}
	if got := c.hook(t); got.Err != "" || !got.Changed {
		t.Errorf("one daemon twice, for two fractions of one device: %+v", got)
	}
	c = newContainer(t)
	c.config.Hooks = &specs.Hooks{CreateContainer: []specs.Hook{hook("/one"), other, hook("/two")}}
	if got := c.hook(t); got.Changed || !strings.Contains(got.Err, "2 MPS daemons") || !strings.Contains(got.Err, "/one/gpu-dra-driver-mps/a, /two/") {
		t.Errorf("two daemons: %+v", got)
	}
}

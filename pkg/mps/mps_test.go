package mps

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"
)

func TestValidate(t *testing.T) {
	percent := func(p int) *int { return &p }
	gpus := []string{"GPU-0", "MIG-8e9c-1"}
	for name, c := range map[string]struct {
		daemon Daemon
		want   string // part of the error; empty means valid
	}{
		"all fields": {Daemon{ID: "gpu-0000-1b-00-0-mig-19-3-share", Devices: gpus,
			ThreadPercentage: percent(100), MemoryLimits: map[int]uint64{0: 1, 1: maxMemory}, MultiUser: true}, ""},
		"daemon of a claim":             {Daemon{ID: "0b7ce1b4-1c52-4a5c-9c32-5f1f5d1d0a51-0", Devices: gpus}, ""},
		"UUID form of old drivers":      {Daemon{ID: "a", Devices: []string{"MIG-GPU-0b7c/3/0"}}, ""},
		"no ID":                         {Daemon{Devices: gpus}, "needs an ID"},
		"ID with path elements":         {Daemon{ID: "../x", Devices: gpus}, "cannot be the ID"},
		"ID of dots":                    {Daemon{ID: "..", Devices: gpus}, "cannot be the ID"},
		"ID equal to the socket's name": {Daemon{ID: "supervisor_socket", Devices: gpus}, "cannot be the ID"},
		"long ID":                       {Daemon{ID: strings.Repeat("a", 64), Devices: gpus}, "cannot be the ID"},
		"no device":                     {Daemon{ID: "a"}, "no devices"},
		"too many devices":              {Daemon{ID: "a", Devices: make([]string, maxDevices+1)}, "257 devices"},
		"not a UUID":                    {Daemon{ID: "a", Devices: []string{"0"}}, "device 0"},
		"two UUIDs in one":              {Daemon{ID: "a", Devices: []string{"GPU-0,GPU-1"}}, "device 0"},
		"device listed twice":           {Daemon{ID: "a", Devices: []string{"GPU-0", "GPU-0"}}, "listed twice"},
		"no threads":                    {Daemon{ID: "a", Devices: gpus, ThreadPercentage: percent(0)}, "percentage is 0"},
		"too many threads":              {Daemon{ID: "a", Devices: gpus, ThreadPercentage: percent(101)}, "percentage is 101"},
		"limit for unknown device":      {Daemon{ID: "a", Devices: gpus, MemoryLimits: map[int]uint64{2: 1}}, "for device 2"},
		"negative ordinal":              {Daemon{ID: "a", Devices: gpus, MemoryLimits: map[int]uint64{-1: 1}}, "for device -1"},
		"no memory":                     {Daemon{ID: "a", Devices: gpus, MemoryLimits: map[int]uint64{0: 0}}, "is 0 MiB"},
		"too much memory":               {Daemon{ID: "a", Devices: gpus, MemoryLimits: map[int]uint64{0: maxMemory + 1}}, "MiB, not 1 to"},
	} {
		t.Run(name, func(t *testing.T) {
			switch err := c.daemon.Validate(); {
			case c.want == "" && err != nil:
				t.Error(err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("%v: %q is missing", err, c.want)
			}
		})
	}
}

// A daemon's description (Daemon) must be the same after it is written as JSON and read again,
// because the client sends it as JSON and the supervisor stores it so. Otherwise the supervisor
// would replace a daemon that runs as requested.
func TestDaemonSurvivesJSON(t *testing.T) {
	p := 40
	d := Daemon{ID: "a", Devices: []string{"GPU-0", "GPU-1"}, ThreadPercentage: &p, MemoryLimits: map[int]uint64{0: 18432}, MultiUser: true}
	data, err := json.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	var read Daemon
	if err := json.Unmarshal(data, &read); err != nil || !reflect.DeepEqual(d, read) {
		t.Errorf("%s: %+v, %v", data, read, err)
	}
}

func TestEditsMakeAClient(t *testing.T) {
	paths := Paths{PluginDir: "/var/lib/kubelet/plugins/gpu.nvidia.com"}
	e := Edits(paths, "a")
	if !slices.Equal(e.Env, []string{"CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"}) {
		t.Error(e.Env)
	}
	want := []*specs.Mount{
		{HostPath: "/var/lib/kubelet/plugins/gpu.nvidia.com/mps/a/pipe", ContainerPath: "/tmp/nvidia-mps"},
		{HostPath: "/var/lib/kubelet/plugins/gpu.nvidia.com/mps/a/shm", ContainerPath: "/dev/shm"},
	}
	for _, m := range want {
		m.Options = []string{"rw", "nosuid", "nodev", "noexec", "bind"}
	}
	if !reflect.DeepEqual(e.Mounts, want) || len(e.Hooks) > 0 {
		t.Errorf("%+v", e)
	}
	if err := (&cdi.ContainerEdits{ContainerEdits: &e}).Validate(); err != nil {
		t.Error(err)
	}
}

// Whatever the Pod mounts at /dev/shm, the container must see the daemon's shared memory there. The
// container runtime applies CDI edits after it has added the Pod's volumes to the OCI spec.
func TestEditsReplaceSharedMemoryOfPod(t *testing.T) {
	for name, there := range map[string][]oci.Mount{
		"nothing": nil,
		"the runtime's own": {{Destination: "/dev/shm", Type: "bind",
			Source: "/run/containerd/io.containerd.grpc.v1.cri/sandboxes/x/shm"}},
		"a volume in memory": {{Destination: "/dev/shm", Type: "bind",
			Source: "/var/lib/kubelet/pods/x/volumes/kubernetes.io~empty-dir/shm"}},
		"a volume with a final slash": {{Destination: "/dev/shm/", Type: "bind", Source: "/volume"}},
		"the host's /dev":             {{Destination: "/dev", Type: "bind", Source: "/dev"}},
	} {
		t.Run(name, func(t *testing.T) {
			e := Edits(Paths{PluginDir: "/plugin"}, "a")
			container := oci.Spec{Mounts: append([]oci.Mount{{Destination: "/proc", Type: "proc"}}, there...)}
			if err := (&cdi.ContainerEdits{ContainerEdits: &e}).Apply(&container); err != nil {
				t.Fatal(err)
			}
			seen := "" // Mounts apply in order, so the last one at or above a path is visible.
			for _, m := range container.Mounts {
				if place := filepath.Clean(m.Destination); place == "/dev/shm" || place == "/dev" {
					seen = m.Source
				}
			}
			if seen != "/plugin/mps/a/shm" {
				t.Errorf("the container's /dev/shm is %s: %+v", seen, container.Mounts)
			}
		})
	}
}

func TestLimitsAreVariables(t *testing.T) {
	if env := Limits(0, 0); len(env) > 0 {
		t.Error(env)
	}
	if env := Limits(18432, 25); !slices.Equal(env, []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=18432M",
		"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25"}) {
		t.Error(env)
	}
}

// deep returns Paths with a directory so deep that the path of the supervisor's socket is too long
// for the address of a Unix socket.
func deep(t *testing.T) Paths {
	t.Helper()
	paths := Paths{PluginDir: filepath.Join(t.TempDir(), strings.Repeat("deep/", 20), "plugin")}
	if err := os.MkdirAll(paths.Root(), 0o700); err != nil {
		t.Fatal(err)
	}
	return paths
}

func TestMissingSupervisorErrorSaysWhatToDo(t *testing.T) {
	paths := deep(t)
	c := NewClient(paths)
	d := Daemon{ID: "a", Devices: []string{"GPU-0"}}
	check := func(name string, err error) {
		t.Helper()
		absent := new(NotRunningError)
		if !errors.As(err, &absent) || !strings.Contains(err.Error(), "mps.enabled") || !strings.Contains(err.Error(), paths.Socket()) {
			t.Errorf("%s: %v", name, err)
		}
	}
	check("never there", c.Start(t.Context(), d))
	check("never there", c.Stop(t.Context(), "a"))
	listener, err := Listen(paths)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(paths.Socket()); err != nil || info.Mode().Perm() != 0o600 {
		t.Error(info, err)
	}
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = c.List(t.Context())
	check("stopped, with its socket left", err)
	if err := os.RemoveAll(paths.Root()); err != nil {
		t.Fatal(err)
	}
	check("no directory", c.Stop(t.Context(), "a"))
}

func TestClientReturnsSupervisorErrors(t *testing.T) {
	paths := deep(t)
	listener, err := Listen(paths)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("PUT "+Resource+"/reason", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusInternalServerError)
		_ = json.NewEncoder(w).Encode(Failure{Error: "the reason"})
	})
	mux.HandleFunc("PUT "+Resource+"/garbage", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "not JSON", http.StatusTeapot) })
	mux.HandleFunc("PUT "+Resource+"/good", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("PUT "+Resource+"/hang", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	mux.HandleFunc("GET "+Resource, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("[")) })
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Second}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	c := NewClient(paths)
	start := func(ctx context.Context, id string) error {
		return c.Start(ctx, Daemon{ID: id, Devices: []string{"GPU-0"}})
	}
	if err := start(t.Context(), "good"); err != nil {
		t.Error(err)
	}
	if err := start(t.Context(), "reason"); err == nil || err.Error() != "start MPS daemon reason: the reason" {
		t.Error(err)
	}
	if err := start(t.Context(), "garbage"); err == nil || !strings.Contains(err.Error(), "418") ||
		!strings.Contains(err.Error(), "not JSON") {
		t.Error(err)
	}
	late := errors.New("the claim's time is over")
	ctx, cancel := context.WithTimeoutCause(t.Context(), 10*time.Millisecond, late)
	defer cancel()
	if err := start(ctx, "hang"); !errors.Is(err, late) {
		t.Error(err)
	}
	if _, err := c.List(t.Context()); err == nil || !strings.Contains(err.Error(), "read the MPS supervisor's answer") {
		t.Error(err)
	}
	if err := start(t.Context(), "../x"); err == nil || !strings.Contains(err.Error(), "cannot be the ID") {
		t.Error(err)
	}
	if err := c.Stop(t.Context(), "../x"); err == nil || !strings.Contains(err.Error(), "cannot be the ID") {
		t.Error(err)
	}
}

func TestLimitEditsAddCreateRuntimeHook(t *testing.T) {
	e := LimitEdits(Roots{Driver: "/run/nvidia/driver", Cgroups: "/sys/fs/cgroup"}, "/opt/gpu-mps", "GPU-0", 3, 18432)
	want := []string{"gpu-mps", "memory-limit", "--gpu=GPU-0", "--minor=3", "--mebibytes=18432",
		"--driver-root=/run/nvidia/driver", "--cgroup-root=/sys/fs/cgroup"}
	if h := e.Hooks[0]; h.HookName != "createRuntime" || h.Path != "/opt/gpu-mps" || !slices.Equal(h.Args, want) {
		t.Errorf("%+v", *h)
	}
}

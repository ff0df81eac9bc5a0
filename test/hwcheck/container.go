package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
)

// way is how nvidia-smi was run with a spec's edits, and so how much its output shows.
type way int

const (
	// byRunc shows all: runc took the configuration, ran the hooks and set up the device cgroup.
	byRunc way = iota
	// inNamespace shows that the spec's mounts, device nodes and variables suffice.
	inNamespace
	// onTheMachine shows only that nvidia-smi works here.
	onTheMachine
)

func (w way) notShown() string {
	switch w {
	case inNamespace:
		return "it ran in a chroot with the spec's mounts, device nodes and variables; not shown: that runc takes the spec, its hooks, and that the device cgroup keeps other GPUs away"
	case onTheMachine:
		return "it ran on the machine itself; not shown: anything about the CDI spec in a container"
	default:
		return ""
	}
}

// containers runs nvidia-smi in containers that were given CDI devices, as well as this machine allows.
type containers struct {
	programs programs
	work     string
	specs    *specSet
	nvml     string
	smi      string // on the machine
	inside   string // in a container

	way way
	// refused says why a better way is not taken.
	refused []string
	count   int
}

// run runs nvidia-smi in a new container with these CDI devices.
func (c *containers) run(ctx context.Context, devices []string, args ...string) outcome {
	if err := permit(nvidiaSMI, args); err != nil {
		return outcome{err: err}
	}
	for {
		var result outcome
		var refused error
		switch c.way {
		case byRunc:
			result, refused = c.byRunc(ctx, devices, args)
		case inNamespace:
			result, refused = c.inNamespace(ctx, devices, args)
		default:
			return c.onTheMachine(ctx, args)
		}
		if refused == nil || ctx.Err() != nil {
			return result
		}
		c.refused = append(c.refused, refused.Error())
		c.way++
	}
}

// folder makes the folder of one container with a root file system in it.
func (c *containers) folder() (bundle, rootfs string, err error) {
	c.count++
	bundle = filepath.Join(c.work, fmt.Sprintf("container-%d", c.count))
	rootfs = filepath.Join(bundle, "rootfs")
	if err := os.MkdirAll(rootfs, 0o755); err != nil { //nolint:gosec // a container's root
		return "", "", err
	}
	return bundle, rootfs, makeRootfs(rootfs, c.smi, c.nvml)
}

// byRunc runs a container by runc. The second result says that no container came to be; that is not the fault of what was to run in it.
func (c *containers) byRunc(ctx context.Context, devices, args []string) (outcome, error) {
	bundle, _, err := c.folder()
	if err != nil {
		return outcome{}, err
	}
	id := fmt.Sprintf("hwcheck-%d-%d", os.Getpid(), c.count)
	config := configuration(id, append([]string{c.inside}, args...))
	if err := c.specs.inject(config, devices); err != nil {
		return outcome{}, err
	}
	data, err := json.Marshal(config)
	if err != nil {
		return outcome{}, err
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), data, 0o600); err != nil {
		return outcome{}, err
	}
	state, log := filepath.Join(c.work, "runc-state"), filepath.Join(bundle, "runc.log")
	result := c.programs.run(ctx, runc, "--root", state, "--log", log, "--log-format", "json", "run", "--bundle", bundle, id)
	if ctx.Err() != nil || result.err != nil {
		// Whatever is left of it; usually nothing, and runc says so.
		_ = c.programs.run(context.WithoutCancel(ctx), runc, "--root", state, "delete", "--force", id)
	}
	if failure := runcFailure(log); result.err != nil && failure != "" {
		return outcome{}, fmt.Errorf("runc made no container: %s", failure)
	}
	return result, nil
}

// runcFailure is the last error in runc's log. A program that ran and failed leaves none.
func runcFailure(log string) string {
	file, err := os.Open(log)
	if err != nil {
		return ""
	}
	defer func() { _ = file.Close() }()
	failure := ""
	for decoder := json.NewDecoder(file); ; {
		var line struct{ Level, Msg string }
		if decoder.Decode(&line) != nil {
			return failure
		}
		if line.Level == "error" || line.Level == "fatal" {
			failure = line.Msg
		}
	}
}

// configuration is a container without any capability, with a device cgroup that denies what the CDI devices don't allow.
func configuration(id string, argv []string) *oci.Spec {
	deny := oci.LinuxDeviceCgroup{Allow: false, Access: "rwm"}
	return &oci.Spec{
		Version: oci.Version,
		Process: &oci.Process{
			Args: argv, Cwd: "/", NoNewPrivileges: true, Capabilities: &oci.LinuxCapabilities{},
			Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"},
		},
		Root:     &oci.Root{Path: "rootfs"},
		Hostname: "hwcheck",
		Mounts: []oci.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
		},
		Linux: &oci.Linux{
			CgroupsPath: "/" + id,
			Namespaces: []oci.LinuxNamespace{
				{Type: oci.PIDNamespace}, {Type: oci.MountNamespace}, {Type: oci.IPCNamespace}, {Type: oci.UTSNamespace}, {Type: oci.NetworkNamespace},
			},
			Resources: &oci.LinuxResources{Devices: []oci.LinuxDeviceCgroup{deny}},
		},
	}
}

// onTheMachine runs nvidia-smi without any container.
func (c *containers) onTheMachine(ctx context.Context, args []string) outcome {
	return start(ctx, command{
		argv: slices.Concat([]string{c.programs.self, stageWithoutCapabilities, c.smi}, args),
		env:  []string{"LD_LIBRARY_PATH=" + filepath.Dir(c.nvml)},
	})
}

// reservations says what was not shown and why, empty when all was.
func (c *containers) reservations() string {
	if c.way == byRunc {
		return ""
	}
	return c.way.notShown() + " (" + strings.Join(c.refused, "; ") + ")"
}

var errNoSMI = errors.New("the base spec mounts no nvidia-smi: the driver was installed without it")

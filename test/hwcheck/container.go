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
	"sync/atomic"

	oci "github.com/opencontainers/runtime-spec/specs-go"
)

// way is how hwcheck runs a program with the edits of a CDI spec: with runc, in a chroot, or
// without a container. The first proves most about the spec.
type way int

const (
	// byRunc uses a container made by runc. It proves everything: that runc accepts the configuration,
	// runs the hooks and restricts the device cgroup.
	byRunc way = iota
	// inNamespace uses a chroot in a mount namespace. It proves that the spec's mounts, device nodes
	// and variables suffice.
	inNamespace
	// onTheMachine uses no container. It proves only that the program works on this machine.
	onTheMachine
)

func (w way) notShown() string {
	switch w {
	case inNamespace:
		return "it ran in a chroot with the spec's mounts, device nodes and variables; not shown: " +
			"that runc takes the spec, its hooks, and that the device cgroup keeps other GPUs away"
	case onTheMachine:
		return "it ran on the machine itself; not shown: anything about the CDI spec in a container"
	default:
		return ""
	}
}

// guest is a program to run in a container, without a network or capabilities.
type guest struct {
	host   string // path on the machine
	inside string // path in a container
	// copied says that hwcheck copies the program into the container. Otherwise the CDI spec mounts
	// it.
	copied bool
	// onlyByRunc says that the program must not run without a PID namespace, which only runc creates.
	onlyByRunc bool
	// change changes the configuration of the container. Only runc applies it.
	change func(bundle string, config *oci.Spec) error
}

// errNotByRunc is the error of an outcome whose program did not run, because only runc may run it.
var errNotByRunc = errors.New("it may run only in a container made by runc")

// containers runs programs in containers with CDI devices. It uses the way that proves most among
// those that this machine allows.
type containers struct {
	programs programs
	work     string
	specs    *specSet
	// libraries are the driver's libraries on the machine. Containers get the C library as far as
	// these need it.
	libraries []string

	way way
	// refused has the errors because of which the run does not use runc, or neither runc nor a chroot.
	refused []string
	count   atomic.Int32
}

// run runs a program with args in a new container that has these CDI devices. If the machine does
// not allow the current way (runc first, then a chroot), run uses the next one, now and in later
// calls. For a guest with onlyByRunc it returns errNotByRunc and the reason instead.
func (c *containers) run(ctx context.Context, p guest, devices []string, args ...string) outcome {
	if err := checkPermitted(filepath.Base(p.inside), args); err != nil {
		return outcome{err: err}
	}
	if p.onlyByRunc && c.way != byRunc {
		return outcome{err: fmt.Errorf("%w (%s)", errNotByRunc, strings.Join(c.refused, "; "))}
	}
	for {
		var result outcome
		var refused error
		switch c.way {
		case byRunc:
			result, refused = c.byRunc(ctx, p, devices, args)
		case inNamespace:
			result, refused = c.inNamespace(ctx, p, devices, args)
		default:
			return c.onTheMachine(ctx, p, args)
		}
		if refused == nil || ctx.Err() != nil {
			return result
		}
		if p.onlyByRunc {
			return outcome{err: fmt.Errorf("%w (%w)", errNotByRunc, refused)}
		}
		c.refused = append(c.refused, refused.Error())
		c.way++
	}
}

// folder creates the folder of a new container for a program. bundle is that folder, and rootfs the
// container's root file system in it.
func (c *containers) folder(p guest) (bundle, rootfs string, err error) {
	bundle = filepath.Join(c.work, fmt.Sprintf("container-%d", c.count.Add(1)))
	rootfs = filepath.Join(bundle, "rootfs")
	if err := os.MkdirAll(rootfs, 0o755); err != nil { //nolint:gosec // a container's root
		return "", "", err
	}
	if err := makeRootfs(rootfs, append(slices.Clone(c.libraries), p.host)...); err != nil || !p.copied {
		return bundle, rootfs, err
	}
	return bundle, rootfs, copyFile(p.host, filepath.Join(rootfs, p.inside))
}

// byRunc runs a program in a container with runc. The error means that runc could not create the
// container. If the program fails, outcome has its error.
func (c *containers) byRunc(ctx context.Context, p guest, devices, args []string) (outcome, error) {
	bundle, _, err := c.folder(p)
	if err != nil {
		return outcome{}, err
	}
	id := fmt.Sprintf("hwcheck-%d-%s", os.Getpid(), strings.TrimPrefix(filepath.Base(bundle), "container-"))
	config := configuration(id, append([]string{p.inside}, args...))
	if err := c.specs.inject(config, devices); err != nil {
		return outcome{}, err
	}
	if p.change != nil {
		if err := p.change(bundle, config); err != nil {
			return outcome{}, err
		}
	}
	data, err := json.Marshal(config)
	if err != nil {
		return outcome{}, err
	}
	// Hooks read it, in a user namespace as another user.
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), data, 0o644); err != nil { //nolint:gosec // see above
		return outcome{}, err
	}
	state, log := filepath.Join(c.work, "runc-state"), filepath.Join(bundle, "runc.log")
	result := c.programs.run(ctx, runc, "--root", state, "--log", log, "--log-format", "json", "run", "--bundle", bundle, id)
	if ctx.Err() != nil || result.err != nil {
		// Usually runc has removed the container already, and then this call fails.
		_ = c.programs.run(context.WithoutCancel(ctx), runc, "--root", state, "delete", "--force", id)
	}
	if failure := runcFailure(log); result.err != nil && failure != "" {
		return outcome{}, fmt.Errorf("runc made no container: %s", failure)
	}
	return result, nil
}

// runcFailure returns the last error in the log file of runc. It returns nothing if runc could
// start the program, even if the program failed.
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

// configuration returns the configuration of a container without capabilities. Its device cgroup
// denies all devices until inject adds the CDI devices.
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

// onTheMachine runs a program without a container.
func (c *containers) onTheMachine(ctx context.Context, p guest, args []string) outcome {
	return start(ctx, command{
		argv: slices.Concat([]string{c.programs.self, stageWithoutCapabilities, p.host}, args),
		env:  []string{"LD_LIBRARY_PATH=" + filepath.Dir(c.libraries[0])},
	})
}

// reservations says what the runs could not prove and why. It returns an empty string
// if they ran in runc and so proved everything.
func (c *containers) reservations() string {
	if c.way == byRunc {
		return ""
	}
	return c.way.notShown() + " (" + strings.Join(c.refused, "; ") + ")"
}

var errNoSMI = errors.New("the base spec mounts no nvidia-smi: the driver was installed without it")

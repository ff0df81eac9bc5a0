package containers

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	oci "github.com/opencontainers/runtime-spec/specs-go"
)

// mappedRoot is the host's user that is root in a container with a user namespace.
const mappedRoot = 100000

// way is how a Pod's container may run.
type way struct {
	name  string
	owner int // the host's user who owns the container's files
	apply func(*oci.Spec)
	// refused says for which runtimes no such container starts, as docs/support.md says. Nil means
	// none.
	refused func(ociRuntime) bool
}

var ways = []way{
	plainly,
	inUserNamespace,
	withReadOnlyRoot,
	{"with a read-only root in a user namespace", mappedRoot, func(c *oci.Spec) {
		withReadOnlyRoot.apply(c)
		inUserNamespace.apply(c)
	}, ociRuntime.makesRootReadOnlyEarly},
	{"with a read-only /etc/ld.so.conf.d", 0, func(c *oci.Spec) {
		c.Mounts = append(c.Mounts, oci.Mount{
			Destination: "/etc/ld.so.conf.d", Type: "bind", Source: "volume", Options: []string{"bind", "ro"},
		})
	}, func(r ociRuntime) bool { return r.name == "runc" || r.makesRootReadOnlyEarly() }},
	withoutPrivileges,
}

var (
	plainly         = way{"plainly", 0, func(*oci.Spec) {}, nil}
	inUserNamespace = way{"in a user namespace", mappedRoot, func(c *oci.Spec) {
		c.Linux.Namespaces = append(c.Linux.Namespaces, oci.LinuxNamespace{Type: oci.UserNamespace})
		c.Linux.UIDMappings = []oci.LinuxIDMapping{{ContainerID: 0, HostID: mappedRoot, Size: 65536}}
		c.Linux.GIDMappings = c.Linux.UIDMappings
	}, nil}
	withReadOnlyRoot  = way{"with a read-only root", 0, func(c *oci.Spec) { c.Root.Readonly = true }, ociRuntime.makesRootReadOnlyEarly}
	withoutPrivileges = way{"without privileges", 0, func(c *oci.Spec) {
		c.Process.User = oci.User{UID: 1000, GID: 1000}
		c.Process.Capabilities, c.Process.NoNewPrivileges = &oci.LinuxCapabilities{}, true
	}, nil}
)

// findsLibraries is what a container runs. It fails unless the loader finds the driver's libraries
// under the names that programs use, and prints what differs.
const findsLibraries = `set -e
status=0
wrong() { echo "WRONG: $*"; status=1; }
cache=$(/sbin/ldconfig -p)
for library in libcuda.so.1 libnvidia-ml.so.1; do
    LD_PRELOAD=$library /bin/cat /proc/self/maps 2>&1 | grep -q "/$library\|/${library%.1}\.[0-9]" ||
        wrong "the loader does not find $library"
    file=$(grep "\s$library (" <<<"$cache") || wrong "ldconfig -p does not list $library"
    linked=$(ldd "${file##*=> }") || wrong "ldd does not find $library"
    case "$linked" in *"not found"*) wrong "$library lacks libraries: $linked" ;; esac
done
`

// runsPrograms continues findsLibraries on a node whose programs are real.
const runsPrograms = `
if [ -e /usr/bin/nvidia-smi ]; then
    nvidia-smi -L || wrong "nvidia-smi -L failed"
fi
if [ -e /proc/driver/nvidia/params ]; then
    grep -qx 'ModifyDeviceFiles: 0' /proc/driver/nvidia/params || wrong "the driver's libraries may create device nodes"
fi
exit $status
`

// A container with a claimed GPU starts, and its programs find the driver, whichever runtime the
// node has and however the Pod's security context confines the container.
func TestContainersWithAClaimedGPU(t *testing.T) {
	n := newNode(t)
	var others []string
	if n.smi != "" {
		others = append(others, n.smi)
	}
	image := newImage(t, others...)
	for _, name := range []string{"runc", "crun"} {
		t.Run(name, func(t *testing.T) {
			runtime := findRuntime(t, name)
			for _, way := range ways {
				t.Run(way.name, func(t *testing.T) {
					out, err := n.run(t, runtime, image, way, findsLibraries+runsPrograms)
					if way.refused != nil && way.refused(runtime) {
						if err == nil || !strings.Contains(out, "hook") {
							t.Errorf("the container was not refused because of a hook, change docs/support.md: %v\n%s", err, out)
						}
						return
					}
					if err != nil || n.smi != "" && !strings.Contains(out, "GPU 0: ") {
						t.Errorf("%v\n%s", err, out)
					}
				})
			}
		})
	}
}

// onHost runs a command in a mount namespace in which /dev has the driver's device nodes, which are
// in the folder $1. In a user namespace, runtimes mount them from there. If the machine has cgroup
// v1 and v2, the namespace has v1 alone, because crun refuses both together.
const onHost = `dev=$1; shift
mount -t tmpfs tmpfs "$dev/../devices"
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty "$dev/." "$dev/../devices"
mount --bind "$dev/../devices" /dev
[ ! -d /sys/fs/cgroup/unified ] || mount -t tmpfs tmpfs /sys/fs/cgroup/unified
exec "$@"`

// run runs a program in a container that has the node's devices, and returns what program and
// runtime print. It starts another container when an older crun could not write to a hook that has
// ended: without a file of the driver, as here, one of NVIDIA's hooks reads nothing.
func (n node) run(t *testing.T, runtime ociRuntime, image image, how way, program string, env ...string) (out string, err error) {
	t.Helper()
	for range 5 {
		out, err = n.runOnce(t, runtime.path, image, how, program, env...)
		if !runtime.needsHooksToRead() || !strings.Contains(out, "(exit code: -33)") {
			break
		}
	}
	return out, err
}

func (n node) runOnce(t *testing.T, runtime string, image image, how way, program string, env ...string) (string, error) {
	t.Helper()
	bundle := openDir(t)
	must(t, os.Mkdir(filepath.Join(bundle, "volume"), 0o755))
	image.unpack(t, filepath.Join(bundle, "rootfs"), how.owner)
	id := fmt.Sprintf("gpu-test-%d-%s", os.Getpid(), filepath.Base(bundle))
	config := configuration(id, []string{"/bin/bash", "-c", program})
	config.Process.Env = append(config.Process.Env, env...)
	how.apply(config)
	if unresolved, err := n.specs.InjectDevices(config, n.devices...); err != nil {
		t.Fatalf("%v: %v", unresolved, err)
	}
	data, err := json.Marshal(config)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(bundle, "config.json"), data, 0o644)) // hooks read it

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	state := t.TempDir()
	t.Cleanup(func() { // usually the runtime has removed the container already, and then this fails
		_ = exec.CommandContext(context.WithoutCancel(ctx), runtime, "--root", state, "delete", "--force", id).Run()
	})
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, "unshare", "--mount", "--propagation", "private", "sh", "-ec", onHost, "sh", n.dev,
		runtime, "--root", state, "run", "--bundle", bundle, id)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &out, time.Second
	err = cmd.Run()
	return out.String(), err
}

// configuration returns the configuration that containerd gives to a Pod's container: with the
// default capabilities, and a device cgroup that denies all devices until CDI devices are added.
func configuration(id string, argv []string) *oci.Spec {
	capabilities := []string{
		"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW", "CAP_SETGID", "CAP_SETUID", "CAP_SETFCAP",
		"CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL", "CAP_AUDIT_WRITE",
	}
	return &oci.Spec{
		Version: "1.0.2", // crun 1.8 refuses later ones
		Process: &oci.Process{
			Args: argv, Cwd: "/",
			Capabilities: &oci.LinuxCapabilities{Bounding: capabilities, Effective: capabilities, Permitted: capabilities},
			Env:          []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"},
		},
		Root:     &oci.Root{Path: "rootfs"},
		Hostname: "gpu-test",
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
			Resources: &oci.LinuxResources{Devices: []oci.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}},
		},
	}
}

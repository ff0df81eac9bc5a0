package config

import (
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// Field is one row of the table: a name in kebab case, the variable behind it, and what it is for.
type Field struct {
	Name  string
	Usage string
	Value pflag.Value
}

// Env is the environment variable of a field: driver-root is GPU_DRA_DRIVER_ROOT.
func (f Field) Env() string {
	return "GPU_DRA_" + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
}

// Key is the field's key in the YAML file: driver-root is driverRoot. Initialisms stay lower case after the first word's rule: kube-api-qps is kubeApiQps.
func (f Field) Key() string {
	words := strings.Split(f.Name, "-")
	for i, w := range words[1:] {
		words[i+1] = strings.ToUpper(w[:1]) + w[1:]
	}
	return strings.Join(words, "")
}

// Fields is the table, bound to this Config: setting a Value sets the Config.
func (c *Config) Fields() []Field {
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	var fields []Field
	row := func(name, usage string) {
		fields = append(fields, Field{Name: name, Usage: usage, Value: flags.Lookup(name).Value})
	}
	str := func(p *string, name, usage string) { flags.StringVar(p, name, *p, usage); row(name, usage) }
	num := func(p *int, name, usage string) { flags.IntVar(p, name, *p, usage); row(name, usage) }
	span := func(p *time.Duration, name, usage string) { flags.DurationVar(p, name, *p, usage); row(name, usage) }
	float := func(p *float64, name, usage string) { flags.Float64Var(p, name, *p, usage); row(name, usage) }

	str(&c.NodeName, "node-name", "name of the Node that this process serves; also the name of its pool")
	str(&c.Namespace, "namespace", "namespace of the plugin's own Pod and DaemonSet")
	str(&c.PodName, "pod-name", "name of the plugin's own Pod; it tells overlapping instances apart in the log")
	str(&c.PodUID, "pod-uid", "UID of the plugin's own Pod; with it the sockets of an old and a new instance stand beside each other during a rolling update")
	str(&c.DaemonSetName, "daemonset-name", "the plugin's own DaemonSet; when it has been deleted and no claim is held, a terminating plugin removes what it made on the node")
	str(&c.Kubeconfig, "kubeconfig", "path of a kubeconfig; empty means the Pod's own service account")

	str(&c.PluginDir, "plugin-dir", "the plugin's directory below the kubelet's root, at the same path on the host: sockets, and state/ with records and locks")
	str(&c.RegistrarDir, "registrar-dir", "the kubelet's plugin registration directory, at the same path on the host")
	str(&c.CDIRoot, "cdi-root", "directory for CDI specs, at the same path on the host; the container runtime must read it")

	str(&c.DriverRoot, "driver-root", "root of the NVIDIA driver's files as the host sees it: / on a plain host, /run/nvidia/driver for a driver container")
	str(&c.DriverRootMount, "driver-root-mount", "the driver root as this process sees it; empty means the same path")
	str(&c.DevRoot, "dev-root", "directory whose dev/ holds the NVIDIA device nodes; empty means the driver root if it has dev/nvidiactl, else /")
	str(&c.DriverDirs, "driver-dirs", "directories outside the driver root, separated by commas and at the same path on the host, in which files of the driver lie too; what leads neither there nor into the driver root is not given to containers")
	str(&c.SysfsRoot, "sysfs-root", "where sysfs is mounted for this process")
	str(&c.ProcRoot, "proc-root", "where procfs is mounted for this process")
	str(&c.CgroupRoot, "cgroup-root", "where the host and this process have mounted cgroup v2, by which NVIDIA drivers from r615 on hold a container as a whole to its fraction of a GPU's memory, where they can; empty means to limit each process alone")
	str(&c.HookSource, "hook-source", "the nvidia-cdi-hook binary in this image")
	str(&c.HookPath, "hook-path", "where nvidia-cdi-hook is installed, at the same path on the host; empty means bin/nvidia-cdi-hook in the plugin directory")
	str(&c.MPSHookSource, "mps-hook-source", "the gpu-mps binary in this image; it is installed beside nvidia-cdi-hook")
	str(&c.ShmRoot, "shm-root", "the host's file system for shared memory, of which MPS daemons and their clients get a directory")
	str(&c.CRISocket, "cri-socket", "socket of the container runtime, asked every minute whether CDI is switched on; empty means not to ask")
	str(&c.MIGPolicy, "mig-policy", "what may be done about the partitions of GPUs that can be cut, as [SELECTOR=]POLICY,...: SELECTOR is a PCI address, a UUID or a product name with * for anything, POLICY is static (the default: whole, or as an admin cut it), dynamic (cut what claims ask for), adopt (dynamic, and idle instances that an admin made are removed) or off (whole GPUs only); dynamic and adopt take a list of profiles, as in dynamic(1g.10gb,3g.40gb); of rules that fit a GPU the last one holds, and the Node annotation gpu.nvidia.com/mig-policy goes before this")
	str(&c.HealthEffects, "health-effects", "what the state of a device's health does to scheduling, as STATE=EFFECT,...: STATE is lost, unhealthy, unknown or degraded, EFFECT is the effect of the device's taint: off (no taint), none (a taint that only informs), NoSchedule or NoExecute; states that are not named keep their default")
	str(&c.XIDRules, "xid-rules", "what XIDs mean where the built-in table is not to hold, as CODE=WEIGHT,...: WEIGHT is ignore (only counted), app (told, never takes a device out), degraded or unhealthy (until a reset is seen)")
	str(&c.ReleaseLabels, "release-labels", "the Node's labels, separated by commas, that ask for the hardware while their value has paused-for- in it, as k8s-driver-manager sets it before it changes the driver")
	str(&c.Shares, "shares", "which devices several claims may hold at once, as [SELECTOR[/PROFILE]=]KIND,...: SELECTOR is a PCI address, a UUID, a product name with * for anything, or #N for the GPU at place N by PCI address, PROFILE that of partitions (without one the rule is about whole GPUs), KIND is fractions (of memory and compute units, kept by MPS), shares:N (N of them, in turn and without limits) or off (the default); of rules that fit a device the last one holds")

	str(&c.BesideDevicePlugin, "beside-device-plugin", "what to do while NVIDIA's device plugin offers GPUs of the same node (nvidia.com/gpu or nvidia.com/mig-* in the Node's capacity): refuse (prepare nothing, and taint the devices) or warn")
	span(&c.ClaimGrace, "claim-grace", "how long a claim that is held must have been gone from the API server (deleted, replaced, or without its devices) before the plugin gives its devices back by itself, like 5m; while containers have them it does not; held claims are looked up once in that time; 0 means never")

	str(&c.HTTPAddress, "http-address", "host:port for /livez, /readyz and /metrics; empty means off")
	str(&c.GRPCHealthAddress, "grpc-health-address", "host:port for the gRPC health service (grpc.health.v1); empty means off")
	float(&c.KubeAPIQPS, "kube-api-qps", "sustained requests per second to the API server")
	num(&c.KubeAPIBurst, "kube-api-burst", "requests to the API server in a burst; one Prepare costs one request per claim")
	num(&c.Verbosity, "v", "log verbosity: 0 tells an operator what changed, 4 tells a developer how")
	str(&c.LoggingFormat, "logging-format", "text or json")
	return fields
}

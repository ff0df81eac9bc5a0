package config

import (
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
)

// Config is the resolved configuration of one plugin process. A new setting needs a field, a
// default in [Default] and a row in Fields.
type Config struct {
	NodeName      string
	Namespace     string
	PodName       string
	PodUID        string
	DaemonSetName string
	Kubeconfig    string

	PluginDir    string
	RegistrarDir string
	CDIRoot      string

	DriverRoot      string
	DriverRootMount string
	DevRoot         string
	DriverDirs      string
	SysfsRoot       string
	ProcRoot        string
	CgroupRoot      string
	HookSource      string
	// HookPath is the path of nvidia-cdi-hook on the host, once the plugin has installed it in one of
	// HookDirs. Before that it is the setting, which may be empty.
	HookPath string
	// HookDirs are where the plugin may install the hooks, at the same path on the host. They follow
	// from HookPath and PluginDir.
	HookDirs      []string
	LdconfigPath  string
	DevCharDir    string
	MPSHookSource string
	MPS           bool
	CRISocket     string
	ReleaseLabels string
	ClaimGrace    time.Duration
	ClaimStatus   bool

	RequireValidation bool
	// SettingsFile is the file with Settings, which has the defaults if there is no file.
	SettingsFile   string
	Settings       settings.Document
	DeviceMetadata bool
	// DevicePluginConflict is what the plugin does while NVIDIA's device plugin offers GPUs of the
	// same node: ConflictRefuse or ConflictWarn.
	DevicePluginConflict string

	HTTPAddress   string
	KubeAPIQPS    float64
	KubeAPIBurst  int
	Verbosity     int
	LoggingFormat string
}

// Default returns the configuration for a plain host: the NVIDIA driver is installed in the host's
// root file system, and the kubelet has its usual root directory.
func Default() *Config {
	return &Config{
		PluginDir:            "/var/lib/kubelet/plugins/gpu.nvidia.com",
		RegistrarDir:         "/var/lib/kubelet/plugins_registry",
		CDIRoot:              "/var/run/cdi",
		DriverRoot:           "/",
		SysfsRoot:            "/sys",
		ProcRoot:             "/proc",
		HookSource:           "/usr/bin/nvidia-cdi-hook",
		ReleaseLabels:        "nvidia.com/gpu.deploy.dra-driver,nvidia.com/gpu.deploy.client,nvidia.com/gpu.deploy.device-plugin",
		ClaimGrace:           5 * time.Minute,
		ClaimStatus:          true,
		DeviceMetadata:       true,
		DevicePluginConflict: ConflictRefuse,
		MPSHookSource:        "/usr/bin/gpu-mps",
		CgroupRoot:           "/sys/fs/cgroup",
		HTTPAddress:          ":8080",
		KubeAPIQPS:           100,
		KubeAPIBurst:         200,
		LoggingFormat:        "text",
	}
}

// Fields returns the table of settings. Setting the Value of a field changes c.
func (c *Config) Fields() []Field {
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	var fields []Field
	row := func(name, usage string) {
		fields = append(fields, Field{Name: name, Usage: usage, Value: flags.Lookup(name).Value})
	}
	str := func(p *string, name, usage string) { flags.StringVar(p, name, *p, usage); row(name, usage) }
	path := func(p *string, name, usage string) { str(p, name, usage); fields[len(fields)-1].isPath = true }
	emptyOrPath := func(p *string, name, usage string) { path(p, name, usage); fields[len(fields)-1].mayBeEmpty = true }
	num := func(p *int, name, usage string) { flags.IntVar(p, name, *p, usage); row(name, usage) }
	span := func(p *time.Duration, name, usage string) { flags.DurationVar(p, name, *p, usage); row(name, usage) }
	boolean := func(p *bool, name, usage string) { flags.BoolVar(p, name, *p, usage); row(name, usage) }
	float := func(p *float64, name, usage string) { flags.Float64Var(p, name, *p, usage); row(name, usage) }

	str(&c.NodeName, "node-name", "name of the Node that this process serves, and of its pool")
	str(&c.Namespace, "namespace", "namespace of the plugin's own Pod and DaemonSet")
	str(&c.PodName, "pod-name", "name of the plugin's own Pod, which identifies overlapping instances in the log")
	str(&c.PodUID, "pod-uid",
		"UID of the plugin's own Pod; it keeps the sockets of the old and the new instance apart during a rolling "+
			"update")
	str(&c.DaemonSetName, "daemonset-name",
		"the plugin's own DaemonSet; if it was deleted and no claim holds a device, a terminating plugin removes what it made "+
			"on the node")
	emptyOrPath(&c.Kubeconfig, "kubeconfig", "path of a kubeconfig; empty means the Pod's own service account")

	path(&c.PluginDir, "plugin-dir",
		"the plugin's directory below the kubelet's root, at the same path on the host: sockets, and state/ with "+
			"records and locks")
	path(&c.RegistrarDir, "registrar-dir", "the kubelet's plugin registration directory, at the same path on the host")
	path(&c.CDIRoot, "cdi-root", "directory for CDI specs, at the same path on the host; the container runtime must read it")

	path(&c.DriverRoot, "driver-root",
		"root of the NVIDIA driver's files as the host sees it: / on a plain host, /run/nvidia/driver for a driver "+
			"container")
	emptyOrPath(&c.DriverRootMount, "driver-root-mount", "the driver root as this process sees it; empty means the same path")
	emptyOrPath(&c.DevRoot, "dev-root",
		"directory whose dev/ holds the NVIDIA device nodes; empty means the driver root if it has dev/nvidiactl, else "+
			"/")
	str(&c.DriverDirs, "driver-dirs",
		"directories outside the driver root that also hold files of the driver, separated by commas and at the same "+
			"path on the host; containers get no file outside of them and the driver root")
	path(&c.SysfsRoot, "sysfs-root", "where sysfs is mounted for this process")
	path(&c.ProcRoot, "proc-root", "where procfs is mounted for this process")
	emptyOrPath(&c.CgroupRoot, "cgroup-root",
		"where the host and this process have mounted cgroup v2. NVIDIA drivers from r615 on can use it to limit a "+
			"container as a whole to its fraction of a GPU's memory. Empty means to limit only single processes")
	path(&c.HookSource, "hook-source", "the nvidia-cdi-hook binary in this image")
	emptyOrPath(&c.HookPath, "hook-path",
		"where nvidia-cdi-hook is installed, at the same path on the host, in a directory named by its content: "+
			"/opt/bin/nvidia-cdi-hook becomes /opt/bin/hooks-…/nvidia-cdi-hook. Empty means the first of /var/lib/gpu-dra-driver, "+
			"/run/gpu-dra-driver and bin in the plugin directory where every user of the host can run it")
	emptyOrPath(&c.LdconfigPath, "ldconfig-path",
		"path of ldconfig on the host, which a hook runs for each container; empty means /sbin/ldconfig")
	emptyOrPath(&c.DevCharDir, "dev-char-dir",
		"the host's /dev/char as this process sees it. The plugin links it to the driver's device nodes by number, because "+
			"containers lose a device without such a link when systemd reloads its units; empty means no links")
	path(&c.MPSHookSource, "mps-hook-source", "the gpu-mps binary in this image, installed next to nvidia-cdi-hook")
	boolean(&c.MPS, "mps", "whether the cluster has supervisors of MPS daemons; false refuses claims that ask for MPS or fractions")
	emptyOrPath(&c.CRISocket, "cri-socket",
		"socket of the container runtime, which the plugin asks every minute whether CDI is enabled; empty means that "+
			"it does not ask")
	emptyOrPath(&c.SettingsFile, "settings",
		"YAML file with mig, passthrough, shares, health and xidRules, as the chart's values have them; empty means the defaults")
	str(&c.ReleaseLabels, "release-labels",
		"the Node's labels, separated by commas, that ask the plugin to release the hardware while their value "+
			"contains paused-for-; k8s-driver-manager sets it before it changes the driver")
	str(&c.DevicePluginConflict, "device-plugin-conflict",
		"what to do while NVIDIA's device plugin offers GPUs of the same node (nvidia.com/gpu or nvidia.com/mig-* in "+
			"the Node's capacity): refuse (prepare nothing, and taint the devices) or warn")
	span(&c.ClaimGrace, "claim-grace",
		"how long a prepared claim must be missing from the API server (deleted, replaced, or without its devices) before "+
			"the plugin releases its devices, for example 5m. It keeps devices that containers use. It looks up prepared "+
			"claims once in that time. 0 means never")
	boolean(&c.RequireValidation, "require-validation",
		"whether a GPU that comes, or comes back after a reset, has the taint gpu.nvidia.com/unvalidated until an admin's check "+
			"removes it with an annotation of the Node")
	boolean(&c.ClaimStatus, "claim-status",
		"whether to write into a claim's status.devices what each device is (UUIDs, profile, place, condition Ready), "+
			"for monitoring; if false, the plugin does not need the rights for it")
	boolean(&c.DeviceMetadata, "device-metadata",
		"whether containers get files that describe the devices of their claims (KEP-5304), as KubeVirt needs them. If false, "+
			"claims that were prepared with such files keep them")

	str(&c.HTTPAddress, "http-address", "host:port for /livez, /readyz and /metrics; empty means off")
	float(&c.KubeAPIQPS, "kube-api-qps", "sustained requests per second to the API server")
	num(&c.KubeAPIBurst, "kube-api-burst", "requests to the API server in a burst; each Prepare sends one request per claim")
	num(&c.Verbosity, "v", "log verbosity: 0 tells an operator what changed, 4 tells a developer how")
	str(&c.LoggingFormat, "logging-format", "text, or json with the keys of Go's log/slog: time, level, msg, source")
	return fields
}

// Field is one row of the table of settings. Name is in kebab case, Usage is the description, and
// Value reads and sets the setting in the [Config].
type Field struct {
	Name  string
	Usage string
	Value pflag.Value
	// isPath is true for a path, which must be absolute, or may be empty if mayBeEmpty is true.
	isPath, mayBeEmpty bool
}

// Env returns the environment variable of the field. That of driver-root is GPU_DRA_DRIVER_ROOT.
func (f Field) Env() string {
	return "GPU_DRA_" + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
}

// Key returns the field's key in the YAML file. That of driver-root is driverRoot. Only the first
// letter of a word is a capital, also in initialisms: the key of kube-api-qps is kubeApiQps.
func (f Field) Key() string {
	words := strings.Split(f.Name, "-")
	for i, w := range words[1:] {
		words[i+1] = strings.ToUpper(w[:1]) + w[1:]
	}
	return strings.Join(words, "")
}

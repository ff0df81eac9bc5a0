package config

import (
	"errors"
	"fmt"
	"math"
	"net"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/validation"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// Config is the resolved configuration of one plugin process.
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
	HookPath        string
	MPSHookSource   string
	MPS             bool
	ShmRoot         string
	CRISocket       string
	MIGPolicy       string
	Shares          string
	HealthEffects   string
	XIDRules        string
	ReleaseLabels   string
	ClaimGrace      time.Duration
	ClaimStatus     bool
	// BesideDevicePlugin is what to do where NVIDIA's device plugin offers the same GPUs.
	BesideDevicePlugin string

	HTTPAddress       string
	GRPCHealthAddress string
	KubeAPIQPS        float64
	KubeAPIBurst      int
	Verbosity         int
	LoggingFormat     string
}

// What is done where NVIDIA's device plugin offers the same GPUs.
const (
	BesideRefuse = "refuse"
	BesideWarn   = "warn"
)

// leastClaimGrace is the shortest time that a claim must have been gone before its devices are given back.
const leastClaimGrace = 10 * time.Second

// Default is the configuration of a plain host: a driver installed into the root file system, the usual kubelet root.
func Default() *Config {
	return &Config{
		PluginDir:          "/var/lib/kubelet/plugins/gpu.nvidia.com",
		RegistrarDir:       "/var/lib/kubelet/plugins_registry",
		CDIRoot:            "/var/run/cdi",
		DriverRoot:         "/",
		SysfsRoot:          "/sys",
		ProcRoot:           "/proc",
		HookSource:         "/usr/bin/nvidia-cdi-hook",
		HealthEffects:      health.DefaultEffects,
		ReleaseLabels:      "nvidia.com/gpu.deploy.dra-driver,nvidia.com/gpu.deploy.client,nvidia.com/gpu.deploy.device-plugin",
		ClaimGrace:         5 * time.Minute,
		ClaimStatus:        true,
		BesideDevicePlugin: BesideRefuse,
		MPSHookSource:      "/usr/bin/gpu-mps",
		ShmRoot:            "/dev/shm",
		CgroupRoot:         "/sys/fs/cgroup",
		HTTPAddress:        ":8080",
		KubeAPIQPS:         100,
		KubeAPIBurst:       200,
		LoggingFormat:      "text",
	}
}

// complete derives the values that follow from others.
func (c *Config) complete() {
	if c.DriverRootMount == "" {
		c.DriverRootMount = c.DriverRoot
	}
	if c.HookPath == "" {
		c.HookPath = filepath.Join(c.PluginDir, "bin", "nvidia-cdi-hook")
	}
}

// MPSHookPath is where the program that holds containers to their fraction of a GPU's memory is
// installed: beside the other hook.
func (c *Config) MPSHookPath() string {
	return filepath.Join(filepath.Dir(c.HookPath), mps.HookProgram)
}

// ExtraDriverDirs are the directories outside the driver root in which files of the driver may lie too.
func (c *Config) ExtraDriverDirs() []string {
	return strings.FieldsFunc(c.DriverDirs, func(r rune) bool { return r == ',' })
}

// StateDir holds what must survive the process: records, locks, quarantine.
func (c *Config) StateDir() string { return filepath.Join(c.PluginDir, "state") }

// Validate reports everything that is wrong at once, each with the flag to change.
func (c *Config) Validate() error {
	var errs []error
	wrong := func(flag, format string, args ...any) {
		errs = append(errs, fmt.Errorf("--%s: %w", flag, fmt.Errorf(format, args...)))
	}
	if c.NodeName != "" {
		for _, msg := range validation.NameIsDNSSubdomain(c.NodeName, false) {
			wrong("node-name", "%q is no node name: %s", c.NodeName, msg)
		}
	}
	for flag, path := range map[string]string{
		"plugin-dir": c.PluginDir, "registrar-dir": c.RegistrarDir, "cdi-root": c.CDIRoot,
		"driver-root": c.DriverRoot, "driver-root-mount": c.DriverRootMount,
		"sysfs-root": c.SysfsRoot, "proc-root": c.ProcRoot, "hook-source": c.HookSource, "hook-path": c.HookPath, "mps-hook-source": c.MPSHookSource, "shm-root": c.ShmRoot,
	} {
		if !filepath.IsAbs(path) {
			wrong(flag, "%q is not an absolute path", path)
		}
	}
	for flag, path := range map[string]string{"dev-root": c.DevRoot, "cgroup-root": c.CgroupRoot, "cri-socket": c.CRISocket, "kubeconfig": c.Kubeconfig} {
		if path != "" && !filepath.IsAbs(path) {
			wrong(flag, "%q is not an absolute path", path)
		}
	}
	for _, dir := range c.ExtraDriverDirs() {
		if !filepath.IsAbs(dir) || filepath.Clean(dir) == "/" {
			wrong("driver-dirs", "%q is not an absolute path of a directory below /", dir)
		}
	}
	for flag, address := range map[string]string{"http-address": c.HTTPAddress, "grpc-health-address": c.GRPCHealthAddress} {
		if address == "" {
			continue
		}
		if _, _, err := net.SplitHostPort(address); err != nil {
			wrong(flag, "%q is not host:port: %w", address, err)
		}
	}
	if _, err := device.ParsePolicies(c.MIGPolicy); err != nil {
		wrong("mig-policy", "%w", err)
	}
	if _, err := device.ParseShares(c.Shares); err != nil {
		wrong("shares", "%w", err)
	}
	if _, err := health.ParseEffects(c.HealthEffects); err != nil {
		wrong("health-effects", "%w", err)
	}
	if _, err := health.ParseRules(c.XIDRules); err != nil {
		wrong("xid-rules", "%w", err)
	}
	for label := range strings.SplitSeq(c.ReleaseLabels, ",") {
		for _, msg := range utilvalidation.IsQualifiedName(label) {
			if c.ReleaseLabels != "" {
				wrong("release-labels", "%q is no name of a label: %s", label, msg)
			}
		}
	}
	if c.BesideDevicePlugin != BesideRefuse && c.BesideDevicePlugin != BesideWarn {
		wrong("beside-device-plugin", "%q is neither %s nor %s", c.BesideDevicePlugin, BesideRefuse, BesideWarn)
	}
	if c.ClaimGrace != 0 && c.ClaimGrace < leastClaimGrace {
		wrong("claim-grace", "%s is less than %s, within which the API server and the kubelet may well be of two minds; 0 is never", c.ClaimGrace, leastClaimGrace)
	}
	if c.KubeAPIQPS <= 0 || math.IsNaN(c.KubeAPIQPS) {
		wrong("kube-api-qps", "%v is no number above 0", c.KubeAPIQPS)
	}
	if c.KubeAPIBurst < 1 {
		wrong("kube-api-burst", "%d is below 1", c.KubeAPIBurst)
	}
	if c.Verbosity < 0 || c.Verbosity > 10 {
		wrong("v", "%d is not between 0 and 10", c.Verbosity)
	}
	if c.LoggingFormat != "text" && c.LoggingFormat != "json" {
		wrong("logging-format", "%q is neither text nor json", c.LoggingFormat)
	}
	return errors.Join(errs...)
}

// RequireNode is asked by the commands that serve a node; the read-only ones run without a cluster.
func (c *Config) RequireNode() error {
	if c.NodeName == "" {
		return errors.New("--node-name: the name of the Node object that this process serves is required (the chart sets it from spec.nodeName)")
	}
	return nil
}

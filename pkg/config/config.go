package config

import (
	"errors"
	"fmt"
	"math"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/validation"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// ConflictRefuse and ConflictWarn are the values of DevicePluginConflict. With refuse the plugin
// prepares no claims and taints the devices. With warn it only warns.
const (
	ConflictRefuse = "refuse"
	ConflictWarn   = "warn"
)

// minClaimGrace is the shortest ClaimGrace that Validate accepts, except 0, with which the plugin
// never releases the devices of claims that are missing from the API server.
const minClaimGrace = 10 * time.Second

// complete fills in empty values whose default depends on other values.
func (c *Config) complete() {
	if c.DriverRootMount == "" {
		c.DriverRootMount = c.DriverRoot
	}
	if c.HookPath != "" {
		c.HookDirs = []string{filepath.Dir(c.HookPath)}
	} else {
		c.HookDirs = append(slices.Clone(OwnHookDirs), filepath.Join(c.PluginDir, "bin"))
	}
}

// OwnHookDirs are the directories of the host that hooks are installed in by default. Every host
// can write to both. A distribution may mount /run noexec (Debian, Ubuntu) or /var
// (Container-Optimized OS). Not every host has /opt.
var OwnHookDirs = []string{"/var/lib/gpu-dra-driver", "/run/gpu-dra-driver"}

// MPSHookPath returns the path on the host of gpu-mps, which limits the GPU memory of containers.
// It is in the same directory as nvidia-cdi-hook.
func (c *Config) MPSHookPath() string {
	return filepath.Join(filepath.Dir(c.HookPath), mps.HookProgram)
}

// ExtraDriverDirs returns the directories of DriverDirs: outside the driver root, but with files of
// the driver.
func (c *Config) ExtraDriverDirs() []string {
	return strings.FieldsFunc(c.DriverDirs, func(r rune) bool { return r == ',' })
}

// StateDir returns the directory for what must survive the plugin's process: the records of claims,
// locks, and quarantined files.
func (c *Config) StateDir() string { return filepath.Join(c.PluginDir, "state") }

// MetadataDir returns the directory of the files that describe claims' devices to containers.
func (c *Config) MetadataDir() string { return filepath.Join(c.PluginDir, "metadata") }

// Validate returns an error if a value is invalid. The error lists every invalid value with its
// flag.
func (c *Config) Validate() error {
	var errs []error
	wrong := func(flag, format string, args ...any) {
		errs = append(errs, fmt.Errorf("--%s: %w", flag, fmt.Errorf(format, args...)))
	}
	if c.NodeName != "" {
		for _, msg := range validation.NameIsDNSSubdomain(c.NodeName, false) {
			wrong("node-name", "%q is not a valid node name: %s", c.NodeName, msg)
		}
	}
	// Host and plugin see these directories at the same path, and / would be all of the host.
	for flag, dir := range map[string]string{"plugin-dir": c.PluginDir, "hook-path": filepath.Dir(c.HookPath)} {
		if filepath.Clean(dir) == "/" {
			wrong(flag, "the directory / cannot be mounted for it: use a directory below /")
		}
	}
	for _, f := range c.Fields() {
		path := f.Value.String()
		if f.isPath && !filepath.IsAbs(path) && (path != "" || !f.mayBeEmpty) {
			wrong(f.Name, "%q is not an absolute path", path)
		}
	}
	for _, dir := range c.ExtraDriverDirs() {
		if !filepath.IsAbs(dir) || filepath.Clean(dir) == "/" {
			wrong("driver-dirs", "%q is not an absolute path of a directory below /", dir)
		}
	}
	if _, _, err := net.SplitHostPort(c.HTTPAddress); c.HTTPAddress != "" && err != nil {
		wrong("http-address", "%q is not host:port: %w", c.HTTPAddress, err)
	}
	for label := range strings.SplitSeq(c.ReleaseLabels, ",") {
		for _, msg := range utilvalidation.IsQualifiedName(label) {
			if c.ReleaseLabels != "" {
				wrong("release-labels", "%q is not a valid label name: %s", label, msg)
			}
		}
	}
	if c.DevicePluginConflict != ConflictRefuse && c.DevicePluginConflict != ConflictWarn {
		wrong("device-plugin-conflict", "%q is neither %s nor %s", c.DevicePluginConflict, ConflictRefuse, ConflictWarn)
	}
	if c.ClaimGrace != 0 && c.ClaimGrace < minClaimGrace {
		wrong("claim-grace", "%s is below %s, for which API server and kubelet may disagree: set it to 0 (never) or at least that",
			c.ClaimGrace, minClaimGrace)
	}
	if c.KubeAPIQPS <= 0 || math.IsNaN(c.KubeAPIQPS) {
		wrong("kube-api-qps", "%v is not a number above 0", c.KubeAPIQPS)
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

// RequireNode returns an error if NodeName is missing. Only commands that serve a node call it,
// because the read-only commands need no cluster.
func (c *Config) RequireNode() error {
	if c.NodeName == "" {
		return errors.New("--node-name: required: the name of the Node object that this process serves (the chart sets it from spec.nodeName)")
	}
	return nil
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/uninstall"
)

// idleInterval is how often a plugin on a node without an NVIDIA GPU looks for one again.
const idleInterval = 10 * time.Second

// writeProbe is the name of the file that checkWritable creates and removes. The name is fixed, so
// that the next plugin removes the file of a killed one.
const writeProbe = "." + driver.DriverName + ".writable"

// serve runs the plugin until a signal or a failed server ends it. It returns an error at once if
// the configuration or a directory is wrong. If the NVIDIA driver is missing, it waits for the
// driver.
func serve(ctx context.Context, args []string, _ io.Writer) error {
	cfg, err := config.Load("gpu-kubelet-plugin", args, os.LookupEnv, nil)
	if err != nil {
		return asUsage(err)
	}
	if err := errors.Join(cfg.RequireNode(), startLogging(cfg)); err != nil {
		return asUsage(err)
	}
	logger := klog.FromContext(ctx)
	logger.Info("Starting gpu-kubelet-plugin", "version", version)
	for _, f := range cfg.Fields() {
		logger.Info("Configuration setting", "name", f.Name, "value", f.Value.String())
	}

	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	m := metrics.New(version)
	probe := driver.NewProbe()
	if err := driver.ServeHTTP(ctx, cfg.HTTPAddress, probe, m.Registry, fail); err != nil {
		return err
	}
	if err := awaitDevice(ctx, cfg.SysfsRoot, probe); err != nil {
		if ctx.Err() != nil {
			return stopped(ctx)
		}
		return err
	}
	if err := makeDirectories(cfg); err != nil {
		return err
	}
	client, err := newClient(cfg)
	if err != nil {
		return err
	}
	statusClient, err := newClient(cfg)
	if err != nil {
		return err
	}
	executable, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find the plugin's own binary, whose child processes access the hardware: %w", err)
	}
	// While this process has the lock, no other instance removes the hooks for an uninstallation.
	placing, err := uninstall.AcquireInstanceLock(ctx, cfg.PluginDir)
	if err != nil {
		return err
	}
	driver.PlaceHooks(ctx, cfg)
	partitions := driver.NewPartitions(cfg, executable, m)
	d, err := driver.New(ctx, cfg, driver.Parts{
		Client: client, StatusClient: statusClient, Hardware: driver.NewHardware(cfg, executable),
		Partitions: partitions, StopWorkers: partitions.StopWorkers, Binder: driver.NewBinder(cfg, executable, partitions),
		Watch: driver.NewWatch(cfg, executable, partitions), Metrics: m,
	})
	placing.Release() // the driver has a lock of its own
	if err != nil {
		return err
	}
	if err := d.Run(ctx, probe); err != nil {
		return err
	}
	return stopped(ctx)
}

// stopped returns nil if a signal ended ctx, and the cause if a failed server did.
func stopped(ctx context.Context) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

// awaitDevice returns when the node has an NVIDIA PCI device. Until then the plugin contacts no API
// server, loads no library and reports ready, because a node without a GPU is no failure.
func awaitDevice(ctx context.Context, sysfs string, probe *driver.Probe) error {
	idle := false
	for {
		found, err := scan.HasNVIDIADevice(sysfs)
		if err != nil {
			return fmt.Errorf("look for NVIDIA devices below %s (--sysfs-root): %w", sysfs, err)
		}
		if found {
			probe.Set(func(context.Context) error { return nil }, func(context.Context) error { return errors.New("starting") })
			return nil
		}
		if !idle {
			idle = true
			klog.FromContext(ctx).Info("No NVIDIA PCI device on this node, idling until one appears", "sysfs", sysfs, "interval", idleInterval)
			probe.Set(func(context.Context) error { return nil }, func(context.Context) error { return nil })
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(idleInterval):
		}
	}
}

// makeDirectories creates the plugin's directories. It returns an error if other users can write to
// one of them, if the plugin cannot write there, or if the kubelet's registration directory does
// not exist.
func makeDirectories(cfg *config.Config) error {
	for _, d := range []struct {
		flag, dir string
		mode      fs.FileMode
	}{{"plugin-dir", cfg.PluginDir, 0o755}, {"plugin-dir", cfg.StateDir(), 0o700}, {"cdi-root", cfg.CDIRoot, 0o755}} {
		flag, dir := d.flag, d.dir
		if err := os.MkdirAll(dir, d.mode); err != nil {
			return fmt.Errorf("--%s: create %s: %w", flag, dir, err)
		}
		// Other users must not be able to write here. A CDI spec names programs that the container
		// runtime runs as root, and the claim records determine what the plugin does.
		if err := durable.CheckDir(dir); err != nil {
			return fmt.Errorf("--%s: %w", flag, err)
		}
		if err := checkWritable(filepath.Join(dir, writeProbe)); err != nil {
			return fmt.Errorf("--%s: %s is not writable: %w", flag, dir, err)
		}
	}
	info, err := os.Stat(cfg.RegistrarDir)
	if err == nil && !info.IsDir() {
		err = syscall.ENOTDIR
	}
	if err != nil {
		return fmt.Errorf("--registrar-dir: %s is not the kubelet's plugin registration directory "+
			"(does this node have another kubelet root directory?): %w", filepath.Clean(cfg.RegistrarDir), err)
	}
	return nil
}

// checkWritable creates the file at path and removes it again. It accepts that the file already
// exists or is already gone, because another instance of the plugin may do the same now, or was
// killed in between.
func checkWritable(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	probe, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(probe.Close(), os.Remove(path)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func newClient(cfg *config.Config) (kubernetes.Interface, error) {
	var rc *rest.Config
	var err error
	if cfg.Kubeconfig == "" {
		rc, err = rest.InClusterConfig()
	} else {
		rc, err = clientcmd.BuildConfigFromFlags("", cfg.Kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("find the API server (--kubeconfig, or the Pod's service account): %w", err)
	}
	rc.QPS = float32(cfg.KubeAPIQPS)
	rc.Burst = cfg.KubeAPIBurst
	rc.UserAgent = "gpu-kubelet-plugin/" + version
	client, err := kubernetes.NewForConfig(rc)
	if err != nil {
		return nil, fmt.Errorf("connect to the API server: %w", err)
	}
	return client, nil
}

func asUsage(err error) error {
	if err == nil || errors.Is(err, config.ErrHelp) {
		return err
	}
	return usageError{err}
}

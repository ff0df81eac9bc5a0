package driver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/uninstall"
)

// DriverName is the driver's name in DeviceClasses and in the registration with the kubelet.
const DriverName = device.DriverName

// ScanCommand is the subcommand of the plugin's binary that scans the hardware. The plugin runs it
// as a child process, for the reasons that [nvidia] gives.
const ScanCommand = "scan"

// drainTimeout is how long a stopping plugin waits for the kubelet's running calls. The Pod's
// termination grace period in the chart is longer.
const drainTimeout = 30 * time.Second

// firstScanTimeout is how long a starting plugin waits for the first scan of the hardware before it
// registers with the kubelet. Reads of the Node at the start have the same limit.
const firstScanTimeout = 5 * time.Second

// Driver is one instance of the plugin: its life cycle, from the start to the end. The kubelet's
// calls are in requests, and everything else in the rooms that run in the background.
type Driver struct {
	*requests

	cfg    *config.Config
	client kubernetes.Interface
	inv    *inventory.Inventory
	calls  *inFlightCalls
	// policy reads the Node, and host checks what the host must provide.
	policy *nodePolicy
	host   *hostWatch
	// background has the rooms that run until the plugin stops. Their errors are fatal.
	background []func(context.Context) error
	// cleaner has this instance's shared instance lock.
	cleaner *uninstall.Cleaner

	fail   context.CancelCauseFunc
	helper atomic.Pointer[kubeletplugin.Helper]
}

var _ kubeletplugin.DRAPlugin = &Driver{}

// Run serves the node until the context ends, then waits for the kubelet's running calls. An error
// is fatal: main must exit with a code other than 0.
func (d *Driver) Run(ctx context.Context, probe *Probe) error {
	logger := klog.FromContext(ctx)
	defer d.cleaner.Release()
	ctx, d.fail = context.WithCancelCause(ctx)
	defer d.fail(nil)

	sockets, err := socketsOf(d.cfg)
	if err != nil {
		return fmt.Errorf("serve the kubelet: %w", err)
	}
	if err := removeStaleSockets(ctx, d.cfg.PluginDir, d.cfg.RegistrarDir); err != nil {
		logger.Error(err, "Failed to remove stale sockets")
	}
	d.policy.Read(ctx)
	// Before the plugin prepares a claim, it must know whether the container runtime would ignore the
	// claim's CDI devices.
	d.host.Check(ctx)
	background := d.startBackground(ctx)
	defer background.Wait()
	defer d.fail(nil)
	d.awaitFirstScan(ctx)

	// The gRPC servers have their own context, so that running calls continue after the plugin gets
	// the signal to stop.
	serving, stopServing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopServing()
	options := []kubeletplugin.Option{
		kubeletplugin.DriverName(DriverName),
		kubeletplugin.KubeClient(d.client),
		kubeletplugin.NodeName(d.cfg.NodeName),
		kubeletplugin.PluginDataDirectoryPath(d.cfg.PluginDir),
		kubeletplugin.RegistrarDirectoryPath(d.cfg.RegistrarDir),
		kubeletplugin.Serialize(false),
		kubeletplugin.GRPCInterceptor(d.calls.intercept),
	}
	if sockets.id != "" {
		options = append(options, kubeletplugin.RollingUpdate(sockets.id))
	}
	helper, err := kubeletplugin.Start(serving, d, options...)
	if err != nil {
		return fmt.Errorf("serve the kubelet: %w", err)
	}
	defer helper.Stop()
	d.helper.Store(helper)
	probe.Set(func(ctx context.Context) error { return errors.Join(d.live(ctx), sockets.checkPresence()) }, d.ready)

	<-ctx.Done()
	logger.Info("Stopping the plugin after the running calls of the kubelet", "cause", context.Cause(ctx))
	background.Wait()
	drain, cancel := context.WithTimeout(serving, drainTimeout)
	defer cancel()
	drained := d.calls.Drain(drain)
	if drained != nil {
		logger.Error(drained, "Stopping the plugin before all calls of the kubelet have ended; the kubelet repeats them", "timeout", drainTimeout)
	}
	helper.Stop()
	if drained == nil {
		d.cleaner.CleanUp(serving)
	}
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

// startBackground starts the rooms of d.background, which end with the context. The Wait of the
// returned WaitGroup returns after the last of them has ended.
func (d *Driver) startBackground(ctx context.Context) *sync.WaitGroup {
	var wg sync.WaitGroup
	for _, run := range d.background {
		wg.Go(func() {
			if err := run(ctx); err != nil {
				d.fail(err)
			}
		})
	}
	return &wg
}

// awaitFirstScan waits for the first scan of the hardware before the plugin registers with the
// kubelet. Without a scan this instance could only refuse claims, while an older instance may still
// serve the kubelet. The wait is limited, because hung hardware must not delay an Unprepare for
// long.
func (d *Driver) awaitFirstScan(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-d.node.FirstLook():
	case <-time.After(firstScanTimeout):
	}
}

// HandleError logs an error of the kubelet plugin's background goroutines. Unless the library
// retries what failed, the plugin shuts down in order.
func (d *Driver) HandleError(ctx context.Context, err error, msg string) {
	utilruntime.HandleErrorWithContext(ctx, err, msg)
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		d.fail(fmt.Errorf("%s: %w", msg, err))
	}
}

// live returns an error if only a restart of the plugin's container helps: the CDI directory was
// removed on the host, and the container's mount still shows the removed directory. Calls that hang
// in the hardware are no such case, because they have timeouts.
func (d *Driver) live(context.Context) error {
	var stat syscall.Stat_t
	if err := syscall.Stat(d.cfg.CDIRoot, &stat); err == nil && stat.Nlink == 0 {
		return fmt.Errorf("the CDI directory %s was removed on the host: a restarted container sees the new one", d.cfg.CDIRoot)
	}
	return nil
}

// ready returns nil when the kubelet has registered the plugin and the node can prepare claims.
func (d *Driver) ready(context.Context) error {
	status := d.helper.Load().RegistrationStatus()
	switch {
	case status == nil:
		return errors.New("the kubelet has not registered the plugin yet")
	case !status.PluginRegistered:
		return fmt.Errorf("the kubelet refused to register the plugin: %s", status.Error)
	}
	if s := d.node.View().Preparable; !s.Ready {
		return fmt.Errorf("claims are not prepared yet: %s", s.Reason)
	}
	return nil
}

package nodeharness

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/watch"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

// API is a fake API server in memory. It stores every field of a ResourceSlice.
type API struct{ *fake.Clientset }

// NewAPI returns a fake API server that has only the Node object.
func NewAPI() API {
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "uid-" + nodeName}})
	var created atomic.Int64
	client.PrependReactor("create", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		create, ok := a.(clienttesting.CreateActionImpl)
		if !ok {
			return false, nil, nil
		}
		if len(create.CreateOptions.DryRun) > 0 {
			return true, create.GetObject(), nil
		}
		if slice, ok := create.GetObject().(*resourceapi.ResourceSlice); ok && slice.Name == "" {
			slice.Name = fmt.Sprint(slice.GenerateName, created.Add(1))
			slice.UID = types.UID("uid-" + slice.Name)
		}
		return false, nil, nil
	})
	return API{client}
}

// Delay makes each call of this verb to this resource wait. The fake handles one call after
// another, so calls that come later wait too.
func (a API) Delay(verb, resource string, wait time.Duration) {
	a.PrependReactor(verb, resource, func(clienttesting.Action) (bool, runtime.Object, error) {
		<-time.After(wait)
		return false, nil, nil
	})
}

// Allocate stores the allocated claim c in the API server. It replaces a claim of the same name, so
// the new one has no device status.
func (a API) Allocate(ctx context.Context, c *resourceapi.ResourceClaim) error {
	if err := a.Free(ctx, c); err != nil {
		return err
	}
	_, err := a.ResourceV1().ResourceClaims(c.Namespace).Create(ctx, c.DeepCopy(), metav1.CreateOptions{})
	return err
}

// Free deletes the claim from the API server. A missing claim is no error.
func (a API) Free(ctx context.Context, c *resourceapi.ResourceClaim) error {
	err := a.ResourceV1().ResourceClaims(c.Namespace).Delete(ctx, c.Name, metav1.DeleteOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// Driver is the whole plugin, running in the test's process. The test makes the calls that the
// kubelet would make.
type Driver struct {
	// Registry has the plugin's metrics.
	Registry *prometheus.Registry
	driver   *driver.Driver
	stop     context.CancelFunc
	ended    chan error
	worker   *cut.Partitions
}

// Start starts the plugin on node n with the API server api. No event of the hardware reaches the
// plugin, which runs until [Driver.Stop].
func (n Node) Start(ctx context.Context, api API) (*Driver, error) {
	return n.start(ctx, api, n.Config(), func(*cut.Partitions) Watch { return watchNothing })
}

// watchNothing is a hardware watcher that runs and reports no event and no answer.
func watchNothing(ctx context.Context, report func(device.Signal)) error {
	report(device.Signal{Watcher: &device.WatcherState{Up: true, Events: true}})
	<-ctx.Done()
	return nil
}

// Watch watches the health of the node's GPUs, as [driver.Parts] has it.
type Watch = func(ctx context.Context, report func(device.Signal)) error

// StartWatching is like [Node.Start], but the plugin also watches the GPUs' health, and its
// configuration is cfg.
func (n Node) StartWatching(ctx context.Context, api API, cfg *config.Config) (*Driver, error) {
	return n.start(ctx, api, cfg, func(p *cut.Partitions) Watch {
		o := watch.Options{Paths: n.Paths(), Command: n.Command(watchRole), Partitions: p}
		return func(ctx context.Context, report func(device.Signal)) error { return watch.Run(ctx, o, report) }
	})
}

func (n Node) start(ctx context.Context, api API, cfg *config.Config, watchWith func(*cut.Partitions) Watch) (*Driver, error) {
	m := metrics.New("test")
	paths := driver.Paths(cfg)
	worker := cut.New(paths, m.MIGCall, n.Command(partitionRole)...)
	d, err := driver.New(ctx, cfg, driver.Parts{
		Watch:  watchWith(worker),
		Client: api, StatusClient: api, Partitions: worker, StopWorkers: worker.StopWorkers, Metrics: m,
		Hardware: inventory.Hardware{
			Scan:        scan.Isolated(paths, n.Command(scanRole)...),
			Fingerprint: func() string { return scan.Fingerprint(paths) },
			Present:     func() (bool, error) { return scan.HasNVIDIADevice(paths.Sysfs) },
		},
	})
	if err != nil {
		nvidiatest.StopWorkers(worker)
		return nil, err
	}
	ctx, stop := context.WithCancel(ctx)
	s := &Driver{Registry: m.Registry, driver: d, stop: stop, ended: make(chan error, 1), worker: worker}
	go func() { s.ended <- d.Run(ctx, driver.NewProbe()) }()
	return s, nil
}

// Stop shuts the plugin down in order and waits until it has ended.
func (d *Driver) Stop() error {
	d.stop()
	err := <-d.ended
	nvidiatest.StopWorkers(d.worker)
	return err
}

// Prepare calls the plugin to prepare claim c, as the kubelet would.
func (d *Driver) Prepare(ctx context.Context, c *resourceapi.ResourceClaim) error {
	answer, err := d.driver.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{c})
	result, answered := answer[c.UID]
	if !answered {
		return errors.Join(err, fmt.Errorf("no answer about claim %s", c.Name))
	}
	return errors.Join(err, result.Err)
}

// Unprepare calls the plugin to unprepare claim c, as the kubelet would.
func (d *Driver) Unprepare(ctx context.Context, c *resourceapi.ResourceClaim) error {
	name := types.NamespacedName{Namespace: c.Namespace, Name: c.Name}
	answer, err := d.driver.UnprepareResourceClaims(ctx, []kubeletplugin.NamespacedObject{{NamespacedName: name, UID: c.UID}})
	failed, answered := answer[c.UID]
	if !answered {
		return errors.Join(err, fmt.Errorf("no answer about claim %s", c.Name))
	}
	return errors.Join(err, failed)
}

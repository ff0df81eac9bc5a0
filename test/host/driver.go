package host

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// API is an API server in memory, which keeps every field of a slice.
type API struct{ *fake.Clientset }

// NewAPI knows the node and nothing else.
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

// Slowly lets such calls wait for a while, and with them all others.
func (a API) Slowly(verb, resource string, wait time.Duration) {
	a.PrependReactor(verb, resource, func(clienttesting.Action) (bool, runtime.Object, error) {
		<-time.After(wait)
		return false, nil, nil
	})
}

// Allocate has the claim in the API server, as allocated and as nobody has said yet what it got.
func (a API) Allocate(ctx context.Context, c *resourceapi.ResourceClaim) error {
	if err := a.Free(ctx, c); err != nil {
		return err
	}
	_, err := a.ResourceV1().ResourceClaims(c.Namespace).Create(ctx, c.DeepCopy(), metav1.CreateOptions{})
	return err
}

// Free deletes the claim. One that is not there is deleted already.
func (a API) Free(ctx context.Context, c *resourceapi.ResourceClaim) error {
	err := a.ResourceV1().ResourceClaims(c.Namespace).Delete(ctx, c.Name, metav1.DeleteOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// Driver is the whole plugin, as one process has it, except that the kubelet's calls are made here.
type Driver struct {
	driver *driver.Driver
	stop   context.CancelFunc
	ended  chan error
	cuts   *nvidia.Partitions
}

// Start starts the plugin. It serves until it is stopped.
func (h Host) Start(ctx context.Context, api API) (*Driver, error) {
	cfg := h.Config()
	m := metrics.New("test")
	cuts := h.Cutter()
	paths := h.Paths()
	glance := nvidia.NewGlance(paths)
	d, err := driver.New(ctx, cfg, driver.Parts{
		Client: api, StatusClient: api, Partitions: cuts, Metrics: m,
		Hardware: inventory.Hardware{
			Scan:        nvidia.Isolated(paths, h.Command(scanRole)...),
			Fingerprint: glance.Fingerprint,
			Present:     glance.Present,
		},
	})
	if err != nil {
		cuts.Close()
		return nil, err
	}
	ctx, stop := context.WithCancel(ctx)
	s := &Driver{driver: d, stop: stop, ended: make(chan error, 1), cuts: cuts}
	go func() { s.ended <- d.Run(ctx, driver.NewProbe()) }()
	return s, nil
}

// Stop ends the plugin in order.
func (d *Driver) Stop() error {
	d.stop()
	err := <-d.ended
	d.cuts.Close()
	return err
}

// Prepare is the kubelet's call.
func (d *Driver) Prepare(ctx context.Context, c *resourceapi.ResourceClaim) error {
	answer, err := d.driver.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{c})
	result, answered := answer[c.UID]
	if !answered {
		return errors.Join(err, fmt.Errorf("no answer about claim %s", c.Name))
	}
	return errors.Join(err, result.Err)
}

// Unprepare is the kubelet's call.
func (d *Driver) Unprepare(ctx context.Context, c *resourceapi.ResourceClaim) error {
	name := types.NamespacedName{Namespace: c.Namespace, Name: c.Name}
	answer, err := d.driver.UnprepareResourceClaims(ctx, []kubeletplugin.NamespacedObject{{NamespacedName: name, UID: c.UID}})
	failed, answered := answer[c.UID]
	if !answered {
		return errors.Join(err, fmt.Errorf("no answer about claim %s", c.Name))
	}
	return errors.Join(err, failed)
}
